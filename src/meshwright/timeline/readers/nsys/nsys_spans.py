"""Makes the columns of a timeline of what was gathered from an Nsight export.

The same places, names and categories as of the profiler of PyTorch (see `kineto_spans`), so that
every analysis works on both. Beside those: process "gpu 0" has whole CUDA graphs where their
kernels were not recorded, and lane "thread 5 ranges" of a host has ranges that may cross others.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.timeline.readers.kineto.kineto_spans import (
    KINDS,
    classify_kernel_kind,
    find_first_occurrences,
)
from meshwright.timeline.readers.nsys.name_table import find_driver_calls
from meshwright.timeline.readers.nsys.nccl_calls import match_nccl_calls
from meshwright.timeline.readers.nsys.nsys_rows import NsysRows
from meshwright.timeline.readers.nsys.row_groups import NsysRowGroup, NsysTrack
from meshwright.timeline.readers.parsing.arrow_arrays import (
    build_arrow_table,
    to_dictionary_array,
    to_number_array,
)
from meshwright.timeline.readers.parsing.collective_args import CollectiveColumns
from meshwright.timeline.readers.parsing.communication_names import (
    match_communication_rule,
    normalize_collective,
    parse_kernel_dtype,
)
from meshwright.timeline.readers.parsing.label_encoder import Codes, LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import Ints
from meshwright.timeline.schema import ABSENT, SPAN_COLUMNS_BY_NAME, SpanKind

THREAD_ID_BITS = 24
"""Nsight's numbers of threads are those of their process, then the thread's in so many bits."""
_CATEGORIES = (
    "kernel", "gpu_memcpy", "gpu_memset", "cuda_graph", "cuda_sync", "cuda_runtime",
    "user_annotation", "user_annotation", "overhead", "cuda_driver", "cpu_op", "nccl",
)  # fmt: skip
"""By group; then those that a name decides."""
_KINDS = {
    NsysRowGroup.KERNEL: SpanKind.COMPUTE,
    NsysRowGroup.GRAPH: SpanKind.COMPUTE,
    NsysRowGroup.MEMCPY: SpanKind.MEMORY_COPY,
    NsysRowGroup.MEMSET: SpanKind.MEMORY_COPY,
    NsysRowGroup.SYNC: SpanKind.WAIT,
}
_LANE_ENDS = {
    NsysRowGroup.SYNC: " sync",
    NsysRowGroup.OPEN_NVTX_RANGE: " ranges",
    NsysRowGroup.OVERHEAD: " overhead",
}
_LARGEST_CORRELATION = 2**32 - 1


class NsysSpanColumns(NamedTuple):
    """The columns of all rows, and what their places are."""

    tracks: list[NsysTrack]
    track: Codes
    group: npt.NDArray[np.int8]
    name: Codes
    names: list[str]
    start_ns: Ints
    duration_ns: Ints
    flow: Ints


def find_process_id(place: NsysTrack) -> int:
    """Nsight's number of the process of a place."""
    return place.global_id >> THREAD_ID_BITS


def join_columns(gathered: NsysRows) -> NsysSpanColumns:
    """Join what was gathered."""
    parts = gathered.columns
    joined = {name: _joined(parts.pop(name), name) for name in tuple(parts)}
    places = [NsysTrack(NsysRowGroup(group), *rest) for group, *rest in gathered.tracks]
    groups = np.array([int(place.group) for place in places] or [0], dtype=np.int8)
    name = gathered.names.find_codes(joined["key"])
    start, duration = joined["start_ns"], joined["duration_ns"]
    unended = np.concatenate([np.empty(0, np.int64), *gathered.missing_end])
    if unended.size:
        duration[unended] = int((start + duration).max()) - start[unended]
        gathered.notes["spans have no end: they last to the last event"] += len(unended)
    flow = joined["flow"]
    flow[(flow > _LARGEST_CORRELATION) | (flow < 0)] = ABSENT
    place = joined["place"]
    return NsysSpanColumns(
        places, place, groups[place], name, list(gathered.names.names), start, duration, flow
    )


def build_nsys_spans(
    columns: NsysSpanColumns, gathered: NsysRows, ranks: Mapping[int, int], base_ns: int
) -> pa.Table:
    """The spans of the processes that have a rank, as a timeline's table."""
    ranked = sorted(set(ranks.values()))
    of_place = np.array(
        [ranks.get(find_process_id(place), ABSENT) for place in columns.tracks] or [ABSENT],
        np.int32,
    )
    rank = of_place[columns.track]
    kept = rank >= 0
    if len(ranked) > 1:
        # Every process counts its calls from 1: numbers of flows shall differ between ranks.
        offset = np.searchsorted(ranked, rank).astype(np.int64) << 32
        columns.flow[columns.flow >= 0] += offset[columns.flow >= 0]
    kind = _kinds(columns)
    communication = _communication(columns, gathered, kind == KINDS.index(SpanKind.COMMUNICATION))
    process, lane = _lanes(columns, ranks)
    np.add(columns.start_ns, base_ns, out=columns.start_ns)
    flow_out, flow_in = _flows(columns)
    arrays: dict[str, Any] = {
        "rank": to_number_array(rank),
        "process": process,
        "lane": lane,
        "start_ns": to_number_array(columns.start_ns),
        "duration_ns": to_number_array(columns.duration_ns),
        "kind": to_dictionary_array(kind, list(KINDS)),
        "name": to_dictionary_array(columns.name, columns.names),
        "flow_out": to_number_array(flow_out, nullable=True),
        "flow_in": to_number_array(flow_in, nullable=True),
        "bytes": to_number_array(communication.num_bytes, nullable=True),
        "collective": to_dictionary_array(*communication.collective),
        "group": to_dictionary_array(*communication.group),
        "dtype": to_dictionary_array(*communication.dtype),
        "category": _categories(columns, gathered),
    }
    extra = gathered.extra.column()
    if extra is not None:
        arrays["extra"] = extra
    spans = build_arrow_table(arrays, SPAN_COLUMNS_BY_NAME)
    return spans if kept.all() else spans.filter(_booleans(kept))


def _joined(parts: list[Any], name: str) -> Any:
    joined = np.concatenate([np.empty(0, np.int32 if name == "place" else np.int64), *parts])
    parts.clear()
    return joined


def _booleans(values: npt.NDArray[np.bool_]) -> Any:
    buffer = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, buffer])


def _kinds(columns: NsysSpanColumns) -> Codes:
    of_group = [KINDS.index(_KINDS.get(group, SpanKind.HOST)) for group in NsysRowGroup]
    kind = np.array(of_group, dtype=np.int32)[columns.group]
    kernels = np.flatnonzero(columns.group == NsysRowGroup.KERNEL)
    of_name = np.full(len(columns.names), KINDS.index(SpanKind.COMPUTE), dtype=np.int32)
    for code in np.flatnonzero(np.bincount(columns.name[kernels])).tolist():
        of_name[code] = KINDS.index(classify_kernel_kind(columns.names[code]))
    kind[kernels] = of_name[columns.name[kernels]]
    return kind


def _categories(columns: NsysSpanColumns, gathered: NsysRows) -> Any:
    codes = columns.group.astype(np.int32)
    calls = np.flatnonzero(columns.group == NsysRowGroup.API_CALL)
    driver = find_driver_calls(columns.names)
    codes[calls[driver[columns.name[calls]]]] = _CATEGORIES.index("cuda_driver")
    ranges = np.flatnonzero(
        (columns.group == NsysRowGroup.NVTX_RANGE) | (columns.group == NsysRowGroup.OPEN_NVTX_RANGE)
    )
    of_name = [_CATEGORIES.index(gathered.names.classify_range(name)) for name in columns.names]
    codes[ranges] = np.array(of_name or [0], dtype=np.int32)[columns.name[ranges]]
    values = list(dict.fromkeys(_CATEGORIES))
    return to_dictionary_array(
        np.array([values.index(name) for name in _CATEGORIES], np.int32)[codes], values
    )


def _lanes(columns: NsysSpanColumns, ranks: Mapping[int, int]) -> tuple[Any, Any]:
    """The process and lane of each row."""
    processes, lanes = LabelEncoder(), LabelEncoder()
    hosts: dict[int, set[int]] = {}
    for place in columns.tracks:
        if place.group > NsysRowGroup.SYNC and find_process_id(place) in ranks:
            hosts.setdefault(ranks[find_process_id(place)], set()).add(find_process_id(place))
    devices: dict[int, set[int]] = {}
    for place in columns.tracks:
        if place.group <= NsysRowGroup.GRAPH:
            devices.setdefault(find_process_id(place), set()).add(place.device)
    which, line = [0], [0]
    for place in columns.tracks:
        end = _LANE_ENDS.get(place.group, "")
        number = find_process_id(place)
        if place.group <= NsysRowGroup.SYNC:
            own, device = devices.get(number, set()), place.device
            if place.group is NsysRowGroup.SYNC and len(own) == 1:
                # Nsight says device 0 for every wait, whatever device its context is of.
                device = min(own)
            name, lane = f"gpu {device}", f"stream {place.stream}{end}"
        else:
            several = len(hosts.get(ranks.get(number, ABSENT), ())) > 1
            name = f"host {number & (1 << THREAD_ID_BITS) - 1}" if several else "host"
            lane = f"thread {place.global_id & (1 << THREAD_ID_BITS) - 1}{end}"
        which.append(processes[name])
        line.append(lanes[lane])
    at = columns.track + 1
    return (
        to_dictionary_array(np.array(which, dtype=np.int32)[at], list(processes)),
        to_dictionary_array(np.array(line, dtype=np.int32)[at], list(lanes)),
    )


def _flows(columns: NsysSpanColumns) -> tuple[Ints, Ints]:
    """Flows from launches to what they launched; a launch that leads nowhere starts none."""
    on_device = columns.group <= NsysRowGroup.SYNC
    flow_in = np.where(on_device, columns.flow, ABSENT)
    flow_out = np.full(len(flow_in), ABSENT, dtype=np.int64)
    launches = np.flatnonzero((columns.group == NsysRowGroup.API_CALL) & (columns.flow >= 0))
    ends = np.sort(columns.flow[on_device])
    if ends.size and launches.size:
        flow = columns.flow[launches]
        at = np.minimum(np.searchsorted(ends, flow), ends.size - 1)
        flow_out[launches] = np.where(ends[at] == flow, flow, ABSENT)
    if (flow_out >= 0).any():
        find_first_occurrences(flow_out)
    return flow_out, flow_in


def _communication(
    columns: NsysSpanColumns, gathered: NsysRows, is_communication: npt.NDArray[np.bool_]
) -> CollectiveColumns:
    kernels = np.flatnonzero(is_communication)
    found = match_nccl_calls(columns, gathered, kernels)
    for (array, values), read in (
        (found.collective, normalize_collective),
        (found.dtype, parse_kernel_dtype),
    ):
        of_name = np.full(len(columns.names), ABSENT, dtype=np.int32)
        rows = kernels[array[kernels] == ABSENT]
        for code in np.unique(columns.name[rows]).tolist():
            said = (
                read(columns.names[code]) if match_communication_rule(columns.names[code]) else None
            )
            if said is not None:
                if said not in values:
                    values.append(said)
                of_name[code] = values.index(said)
        array[rows] = of_name[columns.name[rows]]
    return found
