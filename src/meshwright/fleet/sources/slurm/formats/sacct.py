"""The text of `sacct -P`, with any list of fields, as records."""

import re
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.slurm.formats.delimited_table import DelimitedTable
from meshwright.fleet.sources.slurm.formats.local_time import LocalTimes, resolve_dst
from meshwright.fleet.sources.slurm.formats.text_columns import (
    Floats,
    drop_placeholders,
    parse_durations,
    parse_numbers,
    parse_sizes,
    to_arrow,
)
from meshwright.fleet.sources.slurm.job_records import RECORD_SCHEMA, make_records

_PLAIN: Final = {
    "cluster": ("Cluster",), "record": ("DBIndex",), "name": ("JobName",), "user": ("User",),
    "uid": ("UID",), "team": ("Account",), "partition": ("Partition",), "qos": ("QOS",),
    "exit": ("ExitCode",), "reason": ("Reason",), "failed_node": ("FailedNode",),
    "submit_line": ("SubmitLine",), "wckey": ("WCKey",), "alloc": ("AllocTRES",),
    "req": ("ReqTRES",), "gres": ("AllocGRES", "ReqGRES"), "req_mem": ("ReqMem",),
    "nodelist": ("NodeList",),
}  # fmt: skip
_COUNTS: Final = {
    "num_nodes": ("NNodes", "AllocNodes"), "cpus": ("AllocCPUS", "NCPUS"), "tasks": ("NTasks",),
    "restarts": ("Restarts",),
}  # fmt: skip
_NO_GPUS: Final = r"gres/gpu[^,=]*=(?:-|[A-Za-z]|,|$)"
_TIMES: Final = ("Submit", "Eligible", "Start", "End")
FIELDS: Final = tuple(
    dict.fromkeys(
        [
            "JobID", "JobIDRaw", "State", *_TIMES, "Elapsed", "ElapsedRaw", "Suspended", "Planned",
            "Reserved", "Timelimit", "TimelimitRaw", "MaxRSS", "AveRSS", "TotalCPU", "UserCPU",
            "SystemCPU", "TRESUsageInTot", "TRESUsageInAve",
            *(name for names in (*_PLAIN.values(), *_COUNTS.values()) for name in names),
        ]
    )
)  # fmt: skip
"""Every field that anything is made of."""


def is_sacct_header(header: bytes) -> bool:
    """Say whether a first line is a header of sacct's."""
    names = re.split(rb"[^A-Za-z0-9_/:()%]+", header.strip())
    if not {b"JobID", b"JobIDRaw"} & set(names):
        return False
    # Lists of others may have a column JobID too.
    return len({name.decode() for name in names if name} & set(FIELDS)) > 1


def read_sacct(stream: BinaryIO, where: str, zone: str = "UTC") -> tuple[pa.Table, tuple[str, ...]]:
    """Read what `sacct -P` printed in a time zone; the notes say what could not be read."""
    table = DelimitedTable(stream, where)
    if not {"JobID", "JobIDRaw"} & set(table.column_names):
        what = (
            f"has neither JobID nor JobIDRaw among its fields "
            f"({', '.join(table.column_names[:6])}, …)"
        )
        raise InputError([Problem(where, what, "print them: sacct -P -o JobID,State,Start,End,…")])
    notes: list[str] = []
    parts = [
        _records(_drop_unreadable(block, where, zone, notes), zone)
        for block in table.iter_tables(FIELDS)
    ]
    if table.num_bad_lines:
        notes.append(f"{where}: {table.num_bad_lines:,} lines could not be cut into their fields")
    if table.num_bad_lines and not sum(part.num_rows for part in parts):
        what = f"none of its lines has a field for each of its {len(table.column_names)} names"
        fix = "print it with a delimiter that no field has: sacct -P --delimiter='|'"
        raise InputError([Problem(where, what, fix)])
    if "State" not in table.column_names:
        notes.append(f"{where}: without the field State nobody can say how jobs ended")
    return (pa.concat_tables(parts) if parts else RECORD_SCHEMA.empty_table()), tuple(notes)


def _drop_unreadable(block: pa.Table, where: str, zone: str, notes: list[str]) -> pa.Table:
    """Leave out records with a time that is none, or with GPUs that are no number, and say so."""
    faulty = np.zeros(block.num_rows, dtype=np.bool_)
    for name in (*_TIMES, "AllocTRES"):
        if name not in block.column_names:
            continue
        column = block[name].combine_chunks()
        strange = (
            np.array(pc.match_substring_regex(column, _NO_GPUS))
            if name == "AllocTRES"
            else LocalTimes(column, zone).unread
        )
        places = np.flatnonzero(strange & ~faulty)
        if len(places):
            known = [one for one in ("JobID", "JobIDRaw") if one in block.column_names]
            job = block[known[0]][int(places[0])].as_py() if known else "?"
            what = f"{column[int(places[0])].as_py()!r} cannot be read"
            count = f"{len(places):,} records left out"
            notes.append(f"{where}: {count}: job {job}, field {name}: {what}")
        faulty |= strange
    return block.filter(pa.array(~faulty)) if faulty.any() else block


def _records(block: pa.Table, zone: str) -> pa.Table:
    told = {name: block[name].combine_chunks() for name in block.column_names}
    length = block.num_rows
    columns: dict[str, Any] = {
        ours: drop_placeholders(_first(told, names))
        for ours, names in _PLAIN.items()
        if _any(told, names)
    }
    columns |= {
        ours: to_arrow(parse_numbers(_first(told, names)))
        for ours, names in _COUNTS.items()
        if _any(told, names)
    }
    columns |= _names(told)
    columns |= _when(told, zone, length)
    columns |= _used(told, length)
    return make_records(columns, length)


def _any(told: dict[str, pa.Array], names: tuple[str, ...]) -> bool:
    return any(name in told for name in names)


def _first(told: dict[str, pa.Array], names: tuple[str, ...]) -> pa.Array:
    """Take the first of several fields, or where it is empty the next."""
    there = [told[name] for name in names if name in told]
    result = there[0]
    for other in there[1:]:
        result = pc.if_else(pc.equal(result, ""), other, result)
    return result


def _names(told: dict[str, pa.Array]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for ours, field in (("id", "JobID"), ("scheduler_id", "JobIDRaw")):
        if field in told:
            found = pc.extract_regex(told[field], r"^(?P<job>[^.]*)(?:\.(?P<step>.*))?$")
            columns[ours] = drop_placeholders(pc.struct_field(found, "job"))
            columns["step"] = drop_placeholders(pc.struct_field(found, "step"))
    columns.setdefault("id", columns.get("scheduler_id"))
    if "State" in told:
        found = pc.extract_regex(told["State"], r"^(?P<word>\S*)(?: by (?P<by>.*))?$")
        columns["state"] = drop_placeholders(pc.struct_field(found, "word"))
        columns["by"] = drop_placeholders(pc.struct_field(found, "by"))
    return columns


def _when(told: dict[str, pa.Array], zone: str, length: int) -> dict[str, Any]:
    nothing = pa.array([""] * length)
    submit, eligible, start, end = (LocalTimes(told.get(name, nothing), zone) for name in _TIMES)
    elapsed = _span(told, length, "ElapsedRaw", "Elapsed")
    passed = elapsed + np.nan_to_num(_span(told, length, "Suspended"))
    waited = _span(told, length, "Planned", "Reserved")
    submit_s, eligible_s, start_s, end_s = resolve_dst(submit, eligible, start, end, passed)
    # What a list of fields leaves out follows from the rest.
    if "Start" not in told:
        start_s = np.where(np.isnan(end_s), eligible_s + waited, end_s - passed)
    if "End" not in told:
        running = _is(told, "State", r"^(RUNNING|PENDING|SUSPENDED|RESIZING|REQUEUED)", length)
        end_s = np.where(running, np.nan, start_s + passed)
    if "Eligible" not in told:
        eligible_s = start_s - waited
    limit = parse_durations(told["Timelimit"]) if "Timelimit" in told else np.full(length, np.nan)
    if "TimelimitRaw" in told:
        raw = parse_numbers(told["TimelimitRaw"]) * 60
        limit = np.where(np.isnan(raw), limit, raw)
    times = {"submit_s": submit_s, "eligible_s": eligible_s, "start_s": start_s, "end_s": end_s}
    return {
        **{name: to_arrow(values) for name, values in times.items()},
        "elapsed_s": to_arrow(elapsed),
        "time_limit_s": to_arrow(limit),
    }


def _span(told: dict[str, pa.Array], length: int, *fields: str) -> Floats:
    result = np.full(length, np.nan)
    for field in fields:
        if field in told:
            read = (
                parse_numbers(told[field])
                if field.endswith("Raw")
                else parse_durations(told[field])
            )
            result = np.where(np.isnan(result), read, result)
    return result


def _is(told: dict[str, pa.Array], field: str, pattern: str, length: int) -> Any:
    if field not in told:
        return np.zeros(length, bool)
    return np.array(pc.match_substring_regex(told[field], pattern))


def _used(told: dict[str, pa.Array], length: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for ours, field in (("rss_max", "MaxRSS"), ("rss_ave", "AveRSS")):
        if field in told:
            columns[ours] = to_arrow(parse_sizes(told[field], bare=1.0))
    # Averages are over tasks, totals their sums: with NTasks each tells the other.
    for field in ("TRESUsageInAve", "TRESUsageInTot"):
        if field not in told:
            continue
        tasks = parse_numbers(told["NTasks"]) if "NTasks" in told else np.full(length, np.nan)
        per = 1.0 if field.endswith("Tot") else np.nan_to_num(tasks, nan=1.0)
        usage = {
            "memory_total": parse_sizes(told[field], 1.0, "mem"),
            "gpu_util_total": parse_sizes(told[field], 1.0, "gres/gpuutil"),
            "gpu_memory_total": parse_sizes(told[field], 1.0, "gres/gpumem"),
        }
        columns |= {ours: to_arrow(values * per) for ours, values in usage.items()}
    if "TotalCPU" in told:
        columns["cpu_s"] = to_arrow(parse_durations(told["TotalCPU"]))
    elif {"UserCPU", "SystemCPU"} <= set(told):
        columns["cpu_s"] = to_arrow(
            parse_durations(told["UserCPU"]) + parse_durations(told["SystemCPU"])
        )
    return columns
