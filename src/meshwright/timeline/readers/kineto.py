"""Reads a trace of PyTorch's profiler (Kineto's Chrome trace events, JSON) into a `Timeline`.

GPU work is told by its category alone: a `stream` among the arguments says nothing, as launches of
compiled kernels have one too. Times keep their nanoseconds. The file is read in pieces, so that
memory holds the columns and one piece of text.

The profiler's own category stands in `category`; `extra` holds the arguments, of those spans
that `Detail` names.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Raw

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.arrow_arrays import labels, numbers, table
from meshwright.timeline.readers.kineto_columns import Gathered
from meshwright.timeline.readers.kineto_events import FAULTS, Instant
from meshwright.timeline.readers.kineto_moments import Counters, as_span, counters, pair_halves
from meshwright.timeline.readers.kineto_pieces import BUFFER_BYTES, CutShort, NoTrace, read_pieces
from meshwright.timeline.readers.kineto_roles import Detail
from meshwright.timeline.readers.kineto_source import Source as Bytes
from meshwright.timeline.readers.kineto_spans import spans_table
from meshwright.timeline.schema import COUNTERS, Source
from meshwright.timeline.timeline import Timeline

_RANK = re.compile(r"rank[-_ ]?(\d+)|(?:^|[-_.])r(\d+)(?=[-_.])", re.IGNORECASE)
_LARGEST_RANK = 2**31 - 1
_LARGEST_BASE_NS = 2**62
_SETTINGS = (
    "schemaVersion", "cupti_version", "cuda_runtime_version", "cuda_driver_version",
    "roctracer_version", "rocprofiler-sdk_version", "hip_runtime_version", "hip_driver_version",
    "record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules", "trace_id",
)  # fmt: skip


def read_kineto(
    path: str | Path, *, rank: int | None = None, detail: Detail | str = Detail.STANDARD
) -> Timeline:
    """Read one trace file; `rank` stands in for what neither it nor its name says.

    Raises `DamagedFile` where it breaks off or is corrupt; its `kept` is the `Timeline` of all
    events before that. `InputError` where it is no trace at all.
    """
    path = Path(path)
    source = Bytes(path, BUFFER_BYTES)
    gathered = Gathered(Detail(detail))
    try:
        rest = read_pieces(iter(source), gathered.take)
    except CutShort as cut:
        kept, what = _timeline(gathered, {}, path, rank), source.fault or str(cut)
        raise DamagedFile([Problem(str(path), what, "record it again")], kept=kept) from None
    except NoTrace as refused:
        what = f"{refused}; {source.fault}" if source.fault else str(refused)
        fix = "name a trace that PyTorch's profiler wrote, as .json or .json.gz"
        raise InputError([Problem(str(path), what, fix)]) from None
    timeline = _timeline(gathered, rest.fields, path, rank)
    fault = source.fault or rest.fault
    if fault:
        fix = f"use the {timeline.num_spans:,} spans before that, or record it again"
        raise DamagedFile([Problem(str(path), fault, fix)], kept=timeline)
    return timeline


def rank_in(info: Mapping[str, Any], path: Path, given: int | None) -> tuple[int, str]:
    """The rank that a trace says, or its name, or the caller, else 0; and a note on a guess."""
    said = info.get("rank")
    if isinstance(said, str) and said.isascii() and said.isdigit() and len(said) < 11:
        said = int(said)
    if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= _LARGEST_RANK:
        return said, ""
    match = _RANK.search(path.name)
    if match is not None and len(match[1] or match[2]) < 10:
        return int(match[1] or match[2]), "the rank is from the file's name"
    if given is not None:
        return given, f"the trace says no rank: {given} by its place in the folder"
    return 0, "the trace says no rank: taken as 0"


def _timeline(
    gathered: Gathered, fields: Mapping[str, Raw], path: Path, given: int | None
) -> Timeline:
    notes: list[str] = []
    info = _decoded(fields, "distributedInfo", dict[str, Any], notes) or {}
    rank, note = rank_in(info, path, given)
    notes += [note] if note else []
    base_ns = _base_ns(fields, notes)
    _add_moments(gathered, notes)
    notes += [f"{count:,} {what}" for what, count in gathered.notes.items()]
    counted = counters(gathered.moments, gathered.memory)
    settings = {name: _decoded(fields, name, Any, []) for name in _SETTINGS if name in fields}
    metadata = {
        "profiler": "kineto",
        "distributed": _json(_with_lists(info)) if info else "",
        "devices": _json(_decoded(fields, "deviceProperties", list[dict[str, Any]], notes) or []),
        "settings": _json(settings),
        # What was added to the file's own times: figures that round as HTA does need those.
        "base_ns": str(base_ns),
        "notes": "\n".join(notes),
    }
    return Timeline(
        spans=spans_table(gathered, rank, base_ns),
        counters=_counters_table(counted, rank, base_ns),
        source=Source.MEASURED,
        metadata={key: value for key, value in metadata.items() if value},
    )


def _base_ns(fields: Mapping[str, Raw], notes: list[str]) -> int:
    """When the trace's own times begin; some tools that write traces again make a text of it."""
    given = _decoded(fields, "baseTimeNanoseconds", int | float | str, notes) or 0
    try:
        base_ns = int(given)
    except (ValueError, OverflowError):
        base_ns = 2 * _LARGEST_BASE_NS
    if abs(base_ns) > _LARGEST_BASE_NS:
        notes.append(f"baseTimeNanoseconds {str(given)[:40]} is no time and was left out")
        return 0
    return base_ns


def _counters_table(counted: Counters, rank: int, base_ns: int) -> pa.Table:
    count = len(counted.which)
    units = sorted(set(counted.units))
    unit_of = np.array([units.index(unit) for unit in counted.units] or [0], dtype=np.int32)
    arrays = {
        "rank": numbers(np.full(count, rank, dtype=np.int32)),
        "name": labels(counted.which, counted.names),
        "unit": labels(unit_of[counted.which], units),
        "time_ns": numbers(counted.time_ns + base_ns),
        "value": numbers(counted.value),
    }
    return table(arrays, COUNTERS)


def _add_moments(gathered: Gathered, notes: list[str]) -> None:
    """Add spans in two halves, and instants, behind the complete spans."""
    last_ns = max([gathered.last_ns, *(moment.time_ns for moment in gathered.moments)])
    halves = pair_halves(gathered.moments, last_ns)
    instants = [as_span(moment, 0) for moment in gathered.moments if moment.kind is Instant]
    gathered.add_in_ns([*halves.spans, *instants])
    if halves.unended:
        notes.append(f"{halves.unended:,} spans have no end: they last to the last event")
    if halves.unbegun:
        notes.append(f"{halves.unbegun:,} ends without a start were left out")


def _decoded(fields: Mapping[str, Raw], name: str, kind: Any, notes: list[str]) -> Any:
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except FAULTS:
        notes.append(f"{name} has an unknown form and was left out")
        return None


def _with_lists(info: dict[str, Any]) -> dict[str, Any]:
    """The groups' ranks as lists: Kineto writes them as text, PyTorch as lists."""
    groups = info.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), str):
            try:
                group["ranks"] = msgspec.json.decode(group["ranks"], type=list[int])
            except FAULTS:
                continue
    return info


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else ""


__all__ = ["Detail", "rank_in", "read_kineto"]
