"""Reads a trace of PyTorch's profiler (Kineto's Chrome trace events, JSON) into a `Timeline`.

GPU work is told by its category alone: a `stream` among the arguments says nothing, as launches of
compiled kernels have one too. Times keep their nanoseconds. The file is read in pieces, so that
memory holds the columns and one piece of text.

The profiler's own category stands in `category`; `extra` holds the arguments, of those spans
that `TraceDetail` names.
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
from meshwright.timeline.readers.chrome_trace.counter_events import (
    CounterColumns,
    collect_counters,
    pair_begin_end,
    to_complete_event,
)
from meshwright.timeline.readers.chrome_trace.event_chunks import (
    BUFFER_BYTES,
    NotATrace,
    TruncatedTrace,
    read_event_chunks,
)
from meshwright.timeline.readers.chrome_trace.event_columns import EventColumns
from meshwright.timeline.readers.chrome_trace.event_types import DECODE_ERRORS, InstantEvent
from meshwright.timeline.readers.kineto.kineto_spans import build_kineto_spans
from meshwright.timeline.readers.parsing.arrow_arrays import (
    build_arrow_table,
    to_dictionary_array,
    to_number_array,
)
from meshwright.timeline.readers.parsing.compressed_file import TextChunks
from meshwright.timeline.readers.parsing.event_categories import TraceDetail
from meshwright.timeline.readers.parsing.inferred_rank import INFERRED_RANK_NOTE_PREFIX
from meshwright.timeline.schema import COUNTER_COLUMNS_BY_NAME, TimelineSource
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
    path: str | Path, *, rank: int | None = None, detail: TraceDetail | str = TraceDetail.STANDARD
) -> Timeline:
    """Read one trace file; `rank` stands in for what neither it nor its name says.

    Raises `DamagedFile` where it breaks off or is corrupt; its `kept` is the `Timeline` of all
    events before that. `InputError` where it is no trace at all.
    """
    path = Path(path)
    source = TextChunks(path, BUFFER_BYTES)
    gathered = EventColumns(TraceDetail(detail))
    try:
        rest = read_event_chunks(iter(source), gathered.add_events)
    except TruncatedTrace as cut:
        kept, what = _timeline(gathered, {}, path, rank), source.error or str(cut)
        raise DamagedFile([Problem(str(path), what, "record it again")], kept=kept) from None
    except NotATrace as refused:
        what = f"{refused}; {source.error}" if source.error else str(refused)
        fix = "name a trace that PyTorch's profiler wrote, as .json or .json.gz"
        raise InputError([Problem(str(path), what, fix)]) from None
    timeline = _timeline(gathered, rest.fields, path, rank)
    fault = source.error or rest.error
    if fault:
        fix = f"use the {timeline.num_spans:,} spans before that, or record it again"
        raise DamagedFile([Problem(str(path), fault, fix)], kept=timeline)
    return timeline


def detect_rank(info: Mapping[str, Any], path: Path, given: int | None) -> tuple[int, str]:
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
        return given, f"{INFERRED_RANK_NOTE_PREFIX}; rank {given} by its place in the folder"
    return 0, f"{INFERRED_RANK_NOTE_PREFIX}; rank 0 assumed"


def _timeline(
    gathered: EventColumns, fields: Mapping[str, Raw], path: Path, given: int | None
) -> Timeline:
    notes: list[str] = []
    info = _decoded(fields, "distributedInfo", dict[str, Any], notes) or {}
    rank, note = detect_rank(info, path, given)
    notes += [note] if note else []
    base_ns = _base_ns(fields, notes)
    _add_moments(gathered, notes)
    notes += [f"{count:,} {what}" for what, count in gathered.notes.items()]
    counted = collect_counters(gathered.point_events, gathered.memory)
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
        spans=build_kineto_spans(gathered, rank, base_ns),
        counters=_counters_table(counted, rank, base_ns),
        source=TimelineSource.MEASURED,
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


def _counters_table(counted: CounterColumns, rank: int, base_ns: int) -> pa.Table:
    count = len(counted.name_index)
    units = sorted(set(counted.units))
    unit_of = np.array([units.index(unit) for unit in counted.units] or [0], dtype=np.int32)
    arrays = {
        "rank": to_number_array(np.full(count, rank, dtype=np.int32)),
        "name": to_dictionary_array(counted.name_index, counted.names),
        "unit": to_dictionary_array(unit_of[counted.name_index], units),
        "time_ns": to_number_array(counted.time_ns + base_ns),
        "value": to_number_array(counted.value),
    }
    return build_arrow_table(arrays, COUNTER_COLUMNS_BY_NAME)


def _add_moments(gathered: EventColumns, notes: list[str]) -> None:
    """Add spans in two halves, and instants, behind the complete spans."""
    last_ns = max([gathered.last_ns, *(moment.time_ns for moment in gathered.point_events)])
    halves = pair_begin_end(gathered.point_events, last_ns)
    instants = [
        to_complete_event(moment, 0)
        for moment in gathered.point_events
        if moment.kind is InstantEvent
    ]
    gathered.add_spans([*halves.spans, *instants])
    if halves.missing_end:
        notes.append(f"{halves.missing_end:,} spans have no end: they last to the last event")
    if halves.missing_begin:
        notes.append(f"{halves.missing_begin:,} ends without a start were left out")


def _decoded(fields: Mapping[str, Raw], name: str, kind: Any, notes: list[str]) -> Any:
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except DECODE_ERRORS:
        notes.append(f"{name} has an unknown form and was left out")
        return None


def _with_lists(info: dict[str, Any]) -> dict[str, Any]:
    """The groups' ranks as lists: Kineto writes them as text, PyTorch as lists."""
    groups = info.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("ranks"), str):
            try:
                group["ranks"] = msgspec.json.decode(group["ranks"], type=list[int])
            except DECODE_ERRORS:
                continue
    return info


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else ""


__all__ = ["TraceDetail", "detect_rank", "read_kineto"]
