"""Philly as it was published: jobs with their attempts, samples by the minute, machines."""

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from meshwright.errors import DamagedFile, Problem
from meshwright.fleet.sources.public_traces.columns import (
    GIB,
    JOB_STATE_BY_NAME,
    read_numbers,
    read_shares,
    read_text,
    read_times,
    to_counts,
)
from meshwright.fleet.sources.public_traces.job_lists import PACIFIC_TIME_ZONE
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_files import TraceTable
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    make_node_rows,
)
from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.sources.time_text import parse_times

_GPUS = 16
"""Most GPUs of a machine that samples are looked for; Philly's had up to eight."""
_KIB = 1024.0
_TIMES = ("submit", "start", "end")
_CLOCK = "the clock of Philly"


class _Place(msgspec.Struct):
    ip: str
    gpus: list[str] = []


class _Attempt(msgspec.Struct):
    start_time: str | None = None
    end_time: str | None = None
    detail: list[_Place] = []


class _Job(msgspec.Struct):
    jobid: str
    status: str | None = None
    vc: str | None = None
    attempts: list[_Attempt] = []
    submitted_time: str | None = None
    user: str | None = None


def is_job_list(head: bytes) -> bool:
    """Say whether JSON begins like Philly's list of jobs."""
    return b'"jobid"' in head and (b'"attempts"' in head or b'"status"' in head)


def read_jobs(part: TraceTable, told: ReadContext) -> RowsByTable:
    """Read jobs and which GPUs each attempt held.

    What ended before the last attempt was taken up again. An attempt without an end still ran when
    the list was made.
    """
    try:
        found = msgspec.json.decode(part.read_bytes(), type=list[_Job])
    except msgspec.DecodeError as error:
        what = f"is no list of Philly's jobs: {error}"
        raise DamagedFile([Problem(part.label, what, "copy it again")]) from None
    rows: dict[str, list[Any]] = {
        name: []
        for name in (
            "job", "attempt", "user", "partition", "state", "submit", "start", "end", "gpus",
            "nodes",
        )
    }  # fmt: skip
    places: dict[str, list[Any]] = {
        name: [] for name in ("job", "attempt", "node", "gpu", "start", "end")
    }
    for job in found:
        for place, attempt in enumerate(job.attempts or [_Attempt()]):
            last = place >= len(job.attempts) - 1
            ended = (
                JOB_STATE_BY_NAME.get((job.status or "").lower(), "unknown") if last else "requeued"
            )
            if last and job.attempts and attempt.start_time and not attempt.end_time:
                ended = "running"
            values = (
                job.jobid, place, job.user, job.vc, ended, job.submitted_time, attempt.start_time,
                attempt.end_time, sum(len(node.gpus) for node in attempt.detail) or None,
                [node.ip for node in attempt.detail],
            )  # fmt: skip
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
            for node in attempt.detail:
                for gpu in node.gpus:
                    held = (
                        job.jobid, place, node.ip, _digits(gpu), attempt.start_time,
                        attempt.end_time,
                    )  # fmt: skip
                    for column, value in zip(places.values(), held, strict=True):
                        column.append(value)
    # Attempts in the order of the list: a fault names the place of its attempt.
    block = told.open_block(pa.table({name: _words(rows[name]) for name in _TIMES}), part)
    jobs = _jobs(rows, block, told)
    sound = block.keep_sound_rows("jobs", jobs)
    block.faults.count_block(block.faulty)
    attempts = zip(rows["job"], rows["attempt"], block.faulty.tolist(), strict=True)
    bad = {(job, attempt) for job, attempt, faulty in attempts if faulty}
    owners = zip(places["job"], places["attempt"], strict=True)
    kept = [at for at, owner in enumerate(owners) if owner not in bad]
    places = {name: [values[at] for at in kept] for name, values in places.items()}
    return {"jobs": sound, "allocations": _held(places, told)}


def _jobs(rows: dict[str, list[Any]], block: TraceBlock, told: ReadContext) -> pa.Table:
    count = len(rows["job"])
    times = {name: read_times(block, name, PACIFIC_TIME_ZONE, _CLOCK) for name in _TIMES}
    made = make_rows(
        "jobs",
        {
            "cluster": [told.cluster] * count,
            "job": pa.array(rows["job"], pa.string()),
            "attempt": pa.array(rows["attempt"], pa.int32()),
            "user": pa.array(rows["user"], pa.string()),
            "team": pa.array(rows["partition"], pa.string()),
            "partition": pa.array(rows["partition"], pa.string()),
            "state": pa.array(rows["state"], pa.string()),
            "submit_s": times["submit"],
            "start_s": times["start"],
            "end_s": times["end"],
            "gpus": pa.array(rows["gpus"], pa.float64()),
            "num_nodes": pa.array([len(found) or None for found in rows["nodes"]], pa.int32()),
            "nodes": pa.array(rows["nodes"], pa.list_(pa.string())),
            "seen_s": np.full(count, told.seen_s),
        },
    )
    block.check_jobs(made, {f"{name}_s": (name,) for name in _TIMES})
    return made


def _held(places: dict[str, list[Any]], told: ReadContext) -> pa.Table:
    count, zone = len(places["job"]), told.zone or PACIFIC_TIME_ZONE
    return make_rows(
        "allocations",
        {
            "cluster": [told.cluster] * count,
            "job": pa.array(places["job"], pa.string()),
            "attempt": pa.array(places["attempt"], pa.int32()),
            "node": pa.array(places["node"], pa.string()),
            "gpu": pa.array(places["gpu"], pa.int32()),
            "start_s": parse_times(_words(places["start"]), zone).moments_s,
            "end_s": parse_times(_words(places["end"]), zone).moments_s,
            "gpu_fraction": np.ones(count),
            "seen_s": np.full(count, told.seen_s),
        },
    )


def _words(words: list[str | None]) -> pa.Array:
    known = [None if word in (None, "None", "") else word for word in words]
    return pa.array(known, pa.string())


def _digits(name: str) -> int | None:
    digits = "".join(letter for letter in name if letter.isdigit())
    return int(digits) if digits else None


def _gpu_samples(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Lay the columns of a machine's GPUs below one another; a GPU without a value was offline."""
    time, node = read_times(block, "time", PACIFIC_TIME_ZONE, _CLOCK), read_text(block, "machineId")
    tables = []
    for gpu in range(_GPUS):
        name = f"gpu{gpu}_util"
        if name in block.column_names:
            util = read_shares(block, name)
            rows = make_rows(
                "gpu_samples",
                {
                    "cluster": [told.cluster] * block.num_rows,
                    "node": node,
                    "gpu": np.full(block.num_rows, gpu, dtype=np.int32),
                    "time_s": time,
                    "gpu_util": util.astype(np.float32),
                },
            )
            tables.append(rows.filter(pa.array(~np.isnan(util))))
    return {"gpu_samples": pa.concat_tables(tables)}


def _cpu_samples(block: TraceBlock, told: ReadContext) -> RowsByTable:
    return _node_samples(block, told, cpu_util=read_shares(block, "cpu_util"))


def _memory_samples(block: TraceBlock, told: ReadContext) -> RowsByTable:
    total = read_numbers(block, "mem_total", _KIB)
    used = total - read_numbers(block, "mem_free", _KIB)
    with np.errstate(invalid="ignore"):
        more = used < 0
    block.add_fault(more, "mem_free", "is more than there is", "write it in KiB, as mem_total")
    return _node_samples(block, told, memory_total=total, memory_used=np.where(more, np.nan, used))


def _node_samples(block: TraceBlock, told: ReadContext, **columns: Any) -> RowsByTable:
    alike = {
        "cluster": [told.cluster] * block.num_rows,
        "node": read_text(block, "machine_id"),
        "time_s": read_times(block, "time", PACIFIC_TIME_ZONE, _CLOCK),
    }
    known = ~np.isnan(next(reversed(columns.values())))
    return {"node_samples": make_rows("node_samples", alike | columns).filter(pa.array(known))}


def _machines(block: TraceBlock, told: ReadContext) -> RowsByTable:
    names = {name.strip().lower(): name for name in block.column_names}
    gpus = read_numbers(block, names["number of gpus"])
    return make_node_rows(
        told,
        read_text(block, names["machineid"]),
        np.zeros(block.num_rows),
        gpus=to_counts(gpus),
        gpu_kind=[
            f"{memory:g} GB" if memory > 0 else None
            for memory in read_numbers(block, names["single gpu mem"], GIB, units=True) / GIB
        ],
    )


TRACE_FORMATS: tuple[TraceFormat, ...] = (
    define_format(
        "Philly GPU samples", "time, machineId, gpu0_util", _gpu_samples, "Philly", dates=True
    ),
    define_format(
        "Philly CPU samples", "time, machine_id, cpu_util", _cpu_samples, "Philly", dates=True
    ),
    define_format(
        "Philly memory samples",
        "time, machine_id, mem_total, mem_free",
        _memory_samples,
        "Philly",
        dates=True,
    ),
    define_format(
        "Philly machines", "machineId, number of GPUs, single GPU mem", _machines, "Philly"
    ),
)
