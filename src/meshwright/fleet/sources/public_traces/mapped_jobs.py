"""Lists of jobs whose columns the user names: `--column gpus=num_gpus`.

Columns that nobody maps are found by the names that most lists give them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.fleet.columns import Floats
from meshwright.fleet.sources.public_traces.columns import (
    read_numbers,
    read_states,
    read_text,
    read_times,
    to_counts,
)
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_files import TraceTable
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    make_job_rows,
    name_jobs_by_row,
)
from meshwright.fleet.tables import UNKNOWN_WAIT
from meshwright.spec.name_suggestions import build_unknown_name_problem

MAPPED_FORMAT_NAME: Final = "a list of jobs, by --column"
TIME_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
"""Units that plain numbers may be in."""
USUAL_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "job": ("job_id", "jobid", "id", "job_name"),
    "gpus": ("gpu_num", "num_gpus", "num_gpu", "n_gpus", "ngpus", "gpu_count", "gpu_request"),
    "submit_s": (
        "submit_time",
        "submit",
        "submitted",
        "submission_time",
        "arrival_time",
        "arrival",
    ),
    "start_s": ("start_time", "started"),
    "end_s": ("end_time", "ended", "finish_time", "finish", "finished"),
    "duration_s": ("duration", "run_time", "runtime", "elapsed", "walltime"),
    "deadline_s": ("deadline",),
    "time_limit_s": ("time_limit", "timelimit"),
    "user": ("user_id", "username", "owner"),
    "team": ("account", "group", "project", "namespace"),
    "partition": ("queue", "vc", "virtual_cluster"),
    "state": ("status",),
    "priority": (),
    "qos": (),
    "name": (),
    "workload": ("model", "model_name"),
    "gpu_kind": ("gpu_type", "gpu_model"),
    "cpus": ("cpu_num", "num_cpus"),
    "num_nodes": ("node_num", "nodes"),
}
"""Columns of a job, and what lists call them; `duration_s` tells an end that nothing else does."""
_TIMES: Final = ("submit_s", "start_s", "end_s", "deadline_s")


def map_columns(found: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return which column of a file is which of ours; those that are given come first."""
    taken = dict(given)
    by_word = {_word(name): name for name in reversed(found)}
    for ours, usual in USUAL_NAMES.items():
        for name in (ours, ours.removesuffix("_s"), *usual):
            theirs = by_word.get(_word(name))
            if ours not in taken and theirs is not None and theirs not in taken.values():
                taken[ours] = theirs
    return taken


def list_missing_columns(mapped: Mapping[str, str]) -> list[str]:
    """Say what a list of jobs still needs, as the names of our columns."""
    missing = [] if "gpus" in mapped else ["gpus"]
    if "submit_s" not in mapped and "start_s" not in mapped:
        missing.append("submit_s or start_s")
    if "end_s" not in mapped and "duration_s" not in mapped:
        missing.append("end_s or duration_s")
    return missing


def define_mapped_format(
    part: TraceTable, given: Mapping[str, str], unit: str = "s"
) -> TraceFormat:
    """Return the form of a table with the columns that `given` and their names tell."""
    problems = []
    for ours, theirs in given.items():
        if ours not in USUAL_NAMES and f"{ours}_s" not in USUAL_NAMES:
            problems.append(build_unknown_name_problem("column", ours, USUAL_NAMES, "--column"))
        if theirs not in part.columns:
            label = f"column of {part.label}"
            problems.append(build_unknown_name_problem(label, theirs, part.columns, "--column"))
    full = {name if name in USUAL_NAMES else f"{name}_s": to for name, to in given.items()}
    mapped = map_columns(part.columns, full)
    if not problems and (missing := list_missing_columns(mapped)):
        what = f"has nothing for {', '.join(missing)}; its columns are {', '.join(part.columns)}"
        fix = f"add --column {missing[0].partition(' ')[0]}=NAME"
        problems.append(Problem(part.label, what, fix))
    if problems:
        raise InputError(problems)
    read = partial(_read, mapped=mapped, scale=TIME_UNITS_S[unit])
    return TraceFormat(MAPPED_FORMAT_NAME, frozenset(mapped.values()), read, has_dates=True)


def _read(
    block: TraceBlock, told: ReadContext, mapped: Mapping[str, str], scale: float
) -> RowsByTable:
    unknown = np.full(block.num_rows, np.nan)
    times = {
        name: read_times(block, mapped[name], scale=scale) if name in mapped else unknown
        for name in _TIMES
    }
    duration = _numbers(block, mapped, "duration_s", scale)
    submit, start, end = (times[name] for name in _TIMES[:3])
    no_start = "start_s" not in mapped
    submit = start if "submit_s" not in mapped else submit
    start = submit if no_start else start
    end = np.where(np.isnan(end), start + duration, end)
    if "end_s" in mapped and "duration_s" in mapped:
        expected = (end - start, end - submit)
        said = "the time from start to end"
        block.check_unit(mapped["duration_s"], *(one / scale for one in expected), said=said)
    text = {
        name: read_text(block, mapped[name]) if name in mapped else None
        for name in ("user", "team", "partition", "qos", "name", "workload", "gpu_kind")
    }
    job = read_text(block, mapped["job"]) if "job" in mapped else name_jobs_by_row(block, told)
    wait = pa.array([UNKNOWN_WAIT if no_start else None] * block.num_rows, pa.string())
    return make_job_rows(
        block, told, origins={ours: (theirs,) for ours, theirs in mapped.items()},
        job=job, submit_s=submit, start_s=start, end_s=end, deadline_s=times["deadline_s"],
        time_limit_s=_numbers(block, mapped, "time_limit_s", scale),
        gpus=_numbers(block, mapped, "gpus"), cpus=_numbers(block, mapped, "cpus"),
        num_nodes=to_counts(_numbers(block, mapped, "num_nodes")),
        priority=_numbers(block, mapped, "priority", signed=True),
        state=read_states(block, mapped.get("state", "")), reason=wait,
        **{name: values for name, values in text.items() if values is not None},
    )  # fmt: skip


def _numbers(
    block: TraceBlock, mapped: Mapping[str, str], name: str, scale: float = 1.0,
    *, signed: bool = False,
) -> Floats:  # fmt: skip
    return read_numbers(block, mapped.get(name, ""), scale, signed=signed)


def _word(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
