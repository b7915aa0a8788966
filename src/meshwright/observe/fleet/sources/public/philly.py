"""Philly as it was published: jobs with their attempts, samples by the minute, machines."""

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from meshwright.errors import DamagedFile, Problem
from meshwright.observe.fleet.sources.public.accounts import PACIFIC
from meshwright.observe.fleet.sources.public.columns import (
    GIB,
    STATES,
    number,
    seconds,
    seconds_of,
    text,
)
from meshwright.observe.fleet.sources.public.files import Part
from meshwright.observe.fleet.sources.public.form import Form, Tables, Told, form, nodes
from meshwright.observe.fleet.sources.source import rows_of

_GPUS = 16
"""Most GPUs of a machine that samples are looked for; Philly's had up to eight."""
_KIB = 1024.0


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


def looks_like_jobs(head: bytes) -> bool:
    """Say whether JSON begins like Philly's list of jobs."""
    return b'"jobid"' in head and (b'"attempts"' in head or b'"status"' in head)


def read_jobs(part: Part, told: Told) -> Tables:
    """Read jobs and which GPUs each attempt held.

    What ended before the last attempt was taken up again. An attempt without an end still ran when
    the list was made.
    """
    try:
        found = msgspec.json.decode(part.content(), type=list[_Job])
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
            ended = STATES.get((job.status or "").lower(), "unknown") if last else "requeued"
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
    return {"jobs": _jobs(rows, told), "held": _held(places, told)}


def _jobs(rows: dict[str, list[Any]], told: Told) -> pa.Table:
    count = len(rows["job"])
    return rows_of(
        "jobs",
        {
            "cluster": [told.cluster] * count,
            "job": pa.array(rows["job"], pa.string()),
            "attempt": pa.array(rows["attempt"], pa.int32()),
            "user": pa.array(rows["user"], pa.string()),
            "team": pa.array(rows["partition"], pa.string()),
            "partition": pa.array(rows["partition"], pa.string()),
            "state": pa.array(rows["state"], pa.string()),
            "submit_s": _times(rows["submit"]),
            "start_s": _times(rows["start"]),
            "end_s": _times(rows["end"]),
            "gpus": pa.array(rows["gpus"], pa.float64()),
            "num_nodes": pa.array([len(found) or None for found in rows["nodes"]], pa.int32()),
            "nodes": pa.array(rows["nodes"], pa.list_(pa.string())),
            "seen_s": np.full(count, told.seen_s),
        },
    )


def _held(places: dict[str, list[Any]], told: Told) -> pa.Table:
    count = len(places["job"])
    return rows_of(
        "held",
        {
            "cluster": [told.cluster] * count,
            "job": pa.array(places["job"], pa.string()),
            "attempt": pa.array(places["attempt"], pa.int32()),
            "node": pa.array(places["node"], pa.string()),
            "gpu": pa.array(places["gpu"], pa.int32()),
            "start_s": _times(places["start"]),
            "end_s": _times(places["end"]),
            "share": np.ones(count),
            "seen_s": np.full(count, told.seen_s),
        },
    )


def _times(words: list[str | None]) -> Any:
    known = [None if word in (None, "None", "") else word for word in words]
    return seconds_of(pa.array(known, pa.string()), PACIFIC)


def _digits(name: str) -> int | None:
    digits = "".join(letter for letter in name if letter.isdigit())
    return int(digits) if digits else None


def _gpu_samples(block: pa.Table, told: Told) -> Tables:
    """Lay the columns of a machine's GPUs below one another; a GPU without a value was offline."""
    time, node = seconds(block, "time", PACIFIC), text(block, "machineId")
    tables = []
    for gpu in range(_GPUS):
        name = f"gpu{gpu}_util"
        if name in block.column_names:
            util = number(block, name, 0.01)
            rows = rows_of(
                "samples",
                {
                    "cluster": [told.cluster] * block.num_rows,
                    "node": node,
                    "gpu": np.full(block.num_rows, gpu, dtype=np.int32),
                    "time_s": time,
                    "gpu_util": util.astype(np.float32),
                },
            )
            tables.append(rows.filter(pa.array(~np.isnan(util))))
    return {"samples": pa.concat_tables(tables)}


def _cpu_samples(block: pa.Table, told: Told) -> Tables:
    return _node_samples(block, told, cpu_util=number(block, "cpu_util", 0.01))


def _memory_samples(block: pa.Table, told: Told) -> Tables:
    total = number(block, "mem_total", _KIB)
    used = total - number(block, "mem_free", _KIB)
    return _node_samples(block, told, memory_total=total, memory_used=used)


def _node_samples(block: pa.Table, told: Told, **columns: Any) -> Tables:
    alike = {
        "cluster": [told.cluster] * block.num_rows,
        "node": text(block, "machine_id"),
        "time_s": seconds(block, "time", PACIFIC),
    }
    known = ~np.isnan(next(iter(columns.values())))
    return {"node_samples": rows_of("node_samples", alike | columns).filter(pa.array(known))}


def _machines(block: pa.Table, told: Told) -> Tables:
    names = {name.strip().lower(): name for name in block.column_names}
    gpus = number(block, names["number of gpus"])
    return nodes(
        told,
        text(block, names["machineid"]),
        np.zeros(block.num_rows),
        gpus=pa.array(gpus, from_pandas=True).cast(pa.int32()),
        gpu_kind=[
            f"{memory:g} GB" if memory > 0 else None
            for memory in number(block, names["single gpu mem"], GIB) / GIB
        ],
    )


FORMS: tuple[Form, ...] = (
    form("Philly GPU samples", "time, machineId, gpu0_util", _gpu_samples, "Philly"),
    form("Philly CPU samples", "time, machine_id, cpu_util", _cpu_samples, "Philly"),
    form(
        "Philly memory samples", "time, machine_id, mem_total, mem_free", _memory_samples, "Philly"
    ),
    form("Philly machines", "machineId, number of GPUs, single GPU mem", _machines, "Philly"),
)
