"""Logs of training runs, as Zhejiang Lab publishes them: when each step was done.

Every line of progress carries a time and `iter: 12/2436`. What lies before the first step is
start-up, what lies between two steps is work, and what a step took longer than usual after a model
was saved is the checkpoint. Workers of a run log the same steps: only its master's log is read.
"""

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.fleet.columns import Floats
from meshwright.fleet.sources.public_traces.trace_files import TraceTable, open_table
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
)
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.sources.time_text import parse_times

LOG_FORMAT: Final = define_format("log of a training run", "", None, dates=True)
POD_FORMAT: Final = define_format("pods of a training run", "", None)
_HEAD_BYTES = 1 << 18
_TIME = rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3})"
_STEP = re.compile(rb"\[" + _TIME + rb"\][^\n]*?\biter: (\d+)/(\d+)")
_STAMP = re.compile(rb"\[" + _TIME + rb"\]")
_SAVED = re.compile(rb"\[" + _TIME + rb"\][^\n]*Saving model checkpoint")
_RANKS = re.compile(rb"\b(?:world_size: |nranks )(\d+)")
_POD = re.compile(
    rb"^(\S+)[ \t]+\d+\.\d+\.\d+\.\d+[ \t]+(\S+)[ \t]+(\d{4}-\d\d-\d\dT[\d:]+Z)\s*$", re.M
)
_WORKER = re.compile(r"-worker-\d+$")
_ROLE = re.compile(r"-(?:master|worker)(?:-\d+)?$")
_USUAL = 1.5
"""A step that takes so many times the median is not made of work alone."""


_Steps = tuple[Floats, npt.NDArray[np.int64]]


def match_log_format(part: TraceTable) -> TraceFormat | None:
    """Return the form of a text that is no table: a log, a list of pods, or None."""
    with open_table(part) as stream:
        head = stream.read(_HEAD_BYTES)
    if _STEP.search(head):
        return LOG_FORMAT
    lines = head.strip().splitlines()
    return POD_FORMAT if lines and len(_POD.findall(head)) == len(lines) else None


def read_log(part: TraceTable, pods: TraceTable | None, told: ReadContext) -> RowsByTable:
    """Read a run's job and its progress."""
    if _WORKER.search(part.stem):
        return {}
    text = part.read_bytes()
    steps = [(match[1], match[2], int(match[3]), int(match[4])) for match in _STEP.finditer(text)]
    time = _times(((day, thousandth) for day, thousandth, _, _ in steps), told.zone)
    stamps = _times(((match[1], match[2]) for match in _STAMP.finditer(text)), told.zone)
    saved = _times(((match[1], match[2]) for match in _SAVED.finditer(text)), told.zone)
    why = "" if told.zone else "the clock of containers"
    told.log.open(part).note_zone(told.zone or "UTC", why)
    job = _ROLE.sub("", part.stem)
    placed = _placed(pods, job)
    start = min([float(stamps.min()), *(at for _, at in placed)])
    end = float(stamps.max())
    ranks = _RANKS.search(text)
    done = steps[-1][2] == steps[-1][3]
    alike = {"cluster": [told.cluster], "job": [job], "attempt": [0], "seen_s": [told.seen_s]}
    row = {
        "state": ["completed" if done else "unknown"],
        "submit_s": [start],
        "start_s": [start],
        "end_s": [end],
        "gpus": [float(ranks[1]) if ranks else None],
        "num_nodes": [len(placed) or None],
        "nodes": [[node for node, _ in placed]],
    }
    number = np.array([step for _, _, step, _ in steps], dtype=np.int64)
    return {
        "jobs": make_rows("jobs", alike | row),
        "progress": _progress((time, number), saved, (start, end), job, told),
    }


def _progress(
    steps: _Steps, saved: Floats, span: tuple[float, float], job: str, told: ReadContext
) -> pa.Table:
    """Lay a run out: start-up, steps, checkpoints."""
    order = np.argsort(steps[0], kind="stable")
    time, step = steps[0][order], steps[1][order]
    usual = float(np.median(np.diff(time))) if len(time) > 1 else 0.0
    begin = np.append(max(span[0], time[0] - usual), time[:-1])
    phases: list[tuple[float, float, str, int | None]] = [(span[0], begin[0], "startup", None)]
    for first, last, number in zip(begin.tolist(), time.tolist(), step.tolist(), strict=True):
        within = saved[(saved >= first) & (saved < last)]
        worked = last
        if len(within) and last - first > _USUAL * usual:
            worked = first + usual
            phases.append((worked, last, "checkpoint", None))
        phases.append((first, worked, "productive", number))
    if (saved >= time[-1]).any():
        phases.append((float(time[-1]), span[1], "checkpoint", None))
    kept = sorted(phase for phase in phases if phase[1] > phase[0])
    count = len(kept)
    return make_rows(
        "progress",
        {
            "cluster": [told.cluster] * count,
            "job": [job] * count,
            "attempt": np.zeros(count, dtype=np.int32),
            "start_s": [phase[0] for phase in kept],
            "end_s": [phase[1] for phase in kept],
            "phase": [phase[2] for phase in kept],
            "step": [phase[3] for phase in kept],
            "seen_s": np.full(count, told.seen_s),
        },
    )


def _placed(pods: TraceTable | None, job: str) -> list[tuple[str, float]]:
    """Return the nodes of a run's pods and when each pod began."""
    if pods is None:
        return []
    found = [
        match for match in _POD.findall(pods.read_bytes()) if match[0].decode().startswith(job)
    ]
    at = _times(((time.replace(b"T", b" ").rstrip(b"Z"), b"000") for _, _, time in found), "UTC")
    return [(node.decode(), when) for (_, node, _), when in zip(found, at.tolist(), strict=True)]


def _times(words: Iterable[tuple[bytes, bytes]], zone: str) -> Floats:
    texts = [f"{day.decode()}.{thousandth.decode()}" for day, thousandth in words]
    return parse_times(pa.array(texts, pa.string()), zone or "UTC").moments_s
