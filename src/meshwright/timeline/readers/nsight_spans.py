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

from meshwright.timeline.readers.arrow_arrays import labels, numbers, table
from meshwright.timeline.readers.communication import collective_of, dtype_in, rule_of
from meshwright.timeline.readers.kineto_columns import Codes, Numbered
from meshwright.timeline.readers.kineto_spans import KINDS, first_of_each, kind_of_kernel
from meshwright.timeline.readers.kineto_times import Ints
from meshwright.timeline.readers.nsight_calls import Communication, add_calls
from meshwright.timeline.readers.nsight_groups import Group, Place
from meshwright.timeline.readers.nsight_names import runtime_categories
from meshwright.timeline.readers.nsight_rows import Gathered
from meshwright.timeline.schema import ABSENT, SPANS, Kind

PROCESS_BITS = 24
"""Nsight's numbers of threads are those of their process, then the thread's in so many bits."""
_CATEGORIES = (
    "kernel", "gpu_memcpy", "gpu_memset", "cuda_graph", "cuda_sync", "cuda_runtime",
    "user_annotation", "user_annotation", "overhead", "cuda_driver", "cpu_op", "nccl",
)  # fmt: skip
"""By group; then those that a name decides."""
_KINDS = {
    Group.KERNEL: Kind.COMPUTE, Group.GRAPH: Kind.COMPUTE, Group.COPY: Kind.MEMORY_COPY,
    Group.FILL: Kind.MEMORY_COPY, Group.SYNC: Kind.WAIT,
}  # fmt: skip
_LANE_ENDS = {Group.SYNC: " sync", Group.OPEN_RANGE: " ranges", Group.OVERHEAD: " overhead"}
_LARGEST_CORRELATION = 2**32 - 1


class Columns(NamedTuple):
    """The columns of all rows, and what their places are."""

    places: list[Place]
    place: Codes
    group: npt.NDArray[np.int8]
    name: Codes
    names: list[str]
    start_ns: Ints
    duration_ns: Ints
    flow: Ints


def process_of(place: Place) -> int:
    """Nsight's number of the process of a place."""
    return place.owner >> PROCESS_BITS


def columns_of(gathered: Gathered) -> Columns:
    """Join what was gathered."""
    parts = gathered.columns
    joined = {name: _joined(parts.pop(name), name) for name in tuple(parts)}
    places = [Place(Group(group), *rest) for group, *rest in gathered.places]
    groups = np.array([int(place.group) for place in places] or [0], dtype=np.int8)
    name = gathered.names.codes(joined["key"])
    start, duration = joined["start_ns"], joined["duration_ns"]
    unended = np.concatenate([np.empty(0, np.int64), *gathered.unended])
    if unended.size:
        duration[unended] = int((start + duration).max()) - start[unended]
        gathered.notes["spans have no end: they last to the last event"] += len(unended)
    flow = joined["flow"]
    flow[(flow > _LARGEST_CORRELATION) | (flow < 0)] = ABSENT
    place = joined["place"]
    return Columns(
        places, place, groups[place], name, list(gathered.names.names), start, duration, flow
    )


def spans_table(
    columns: Columns, gathered: Gathered, ranks: Mapping[int, int], base_ns: int
) -> pa.Table:
    """The spans of the processes that have a rank, as a timeline's table."""
    ranked = sorted(set(ranks.values()))
    of_place = np.array(
        [ranks.get(process_of(place), ABSENT) for place in columns.places] or [ABSENT], np.int32
    )
    rank = of_place[columns.place]
    kept = rank >= 0
    if len(ranked) > 1:
        # Every process counts its calls from 1: numbers of flows shall differ between ranks.
        offset = np.searchsorted(ranked, rank).astype(np.int64) << 32
        columns.flow[columns.flow >= 0] += offset[columns.flow >= 0]
    kind = _kinds(columns)
    communication = _communication(columns, gathered, kind == KINDS.index(Kind.COMMUNICATION))
    process, lane = _lanes(columns, ranks)
    np.add(columns.start_ns, base_ns, out=columns.start_ns)
    flow_out, flow_in = _flows(columns)
    arrays: dict[str, Any] = {
        "rank": numbers(rank),
        "process": process,
        "lane": lane,
        "start_ns": numbers(columns.start_ns),
        "duration_ns": numbers(columns.duration_ns),
        "kind": labels(kind, list(KINDS)),
        "name": labels(columns.name, columns.names),
        "flow_out": numbers(flow_out, nullable=True),
        "flow_in": numbers(flow_in, nullable=True),
        "bytes": numbers(communication.num_bytes, nullable=True),
        "collective": labels(*communication.collective),
        "group": labels(*communication.group),
        "dtype": labels(*communication.dtype),
        "category": _categories(columns, gathered),
    }
    extra = gathered.extra.column()
    if extra is not None:
        arrays["extra"] = extra
    spans = table(arrays, SPANS)
    return spans if kept.all() else spans.filter(_booleans(kept))


def _joined(parts: list[Any], name: str) -> Any:
    joined = np.concatenate([np.empty(0, np.int32 if name == "place" else np.int64), *parts])
    parts.clear()
    return joined


def _booleans(values: npt.NDArray[np.bool_]) -> Any:
    buffer = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, buffer])


def _kinds(columns: Columns) -> Codes:
    of_group = [KINDS.index(_KINDS.get(group, Kind.HOST)) for group in Group]
    kind = np.array(of_group, dtype=np.int32)[columns.group]
    kernels = np.flatnonzero(columns.group == Group.KERNEL)
    of_name = np.full(len(columns.names), KINDS.index(Kind.COMPUTE), dtype=np.int32)
    for code in np.flatnonzero(np.bincount(columns.name[kernels])).tolist():
        of_name[code] = KINDS.index(kind_of_kernel(columns.names[code]))
    kind[kernels] = of_name[columns.name[kernels]]
    return kind


def _categories(columns: Columns, gathered: Gathered) -> Any:
    codes = columns.group.astype(np.int32)
    calls = np.flatnonzero(columns.group == Group.CALL)
    driver = runtime_categories(columns.names)
    codes[calls[driver[columns.name[calls]]]] = _CATEGORIES.index("cuda_driver")
    ranges = np.flatnonzero((columns.group == Group.RANGE) | (columns.group == Group.OPEN_RANGE))
    of_name = [_CATEGORIES.index(gathered.names.category(name)) for name in columns.names]
    codes[ranges] = np.array(of_name or [0], dtype=np.int32)[columns.name[ranges]]
    values = list(dict.fromkeys(_CATEGORIES))
    return labels(np.array([values.index(name) for name in _CATEGORIES], np.int32)[codes], values)


def _lanes(columns: Columns, ranks: Mapping[int, int]) -> tuple[Any, Any]:
    """The process and lane of each row."""
    processes, lanes = Numbered(), Numbered()
    hosts: dict[int, set[int]] = {}
    for place in columns.places:
        if place.group > Group.SYNC and process_of(place) in ranks:
            hosts.setdefault(ranks[process_of(place)], set()).add(process_of(place))
    devices: dict[int, set[int]] = {}
    for place in columns.places:
        if place.group <= Group.GRAPH:
            devices.setdefault(process_of(place), set()).add(place.device)
    which, line = [0], [0]
    for place in columns.places:
        end = _LANE_ENDS.get(place.group, "")
        number = process_of(place)
        if place.group <= Group.SYNC:
            own, device = devices.get(number, set()), place.device
            if place.group is Group.SYNC and len(own) == 1:
                # Nsight says device 0 for every wait, whatever device its context is of.
                device = min(own)
            name, lane = f"gpu {device}", f"stream {place.stream}{end}"
        else:
            several = len(hosts.get(ranks.get(number, ABSENT), ())) > 1
            name = f"host {number & (1 << PROCESS_BITS) - 1}" if several else "host"
            lane = f"thread {place.owner & (1 << PROCESS_BITS) - 1}{end}"
        which.append(processes[name])
        line.append(lanes[lane])
    at = columns.place + 1
    return (
        labels(np.array(which, dtype=np.int32)[at], list(processes)),
        labels(np.array(line, dtype=np.int32)[at], list(lanes)),
    )


def _flows(columns: Columns) -> tuple[Ints, Ints]:
    """Flows from launches to what they launched; a launch that leads nowhere starts none."""
    on_device = columns.group <= Group.SYNC
    flow_in = np.where(on_device, columns.flow, ABSENT)
    flow_out = np.full(len(flow_in), ABSENT, dtype=np.int64)
    launches = np.flatnonzero((columns.group == Group.CALL) & (columns.flow >= 0))
    ends = np.sort(columns.flow[on_device])
    if ends.size and launches.size:
        flow = columns.flow[launches]
        at = np.minimum(np.searchsorted(ends, flow), ends.size - 1)
        flow_out[launches] = np.where(ends[at] == flow, flow, ABSENT)
    if (flow_out >= 0).any():
        first_of_each(flow_out)
    return flow_out, flow_in


def _communication(
    columns: Columns, gathered: Gathered, is_communication: npt.NDArray[np.bool_]
) -> Communication:
    kernels = np.flatnonzero(is_communication)
    found = add_calls(columns, gathered, kernels)
    for (array, values), read in ((found.collective, collective_of), (found.dtype, dtype_in)):
        of_name = np.full(len(columns.names), ABSENT, dtype=np.int32)
        rows = kernels[array[kernels] == ABSENT]
        for code in np.unique(columns.name[rows]).tolist():
            said = read(columns.names[code]) if rule_of(columns.names[code]) else None
            if said is not None:
                if said not in values:
                    values.append(said)
                of_name[code] = values.index(said)
        array[rows] = of_name[columns.name[rows]]
    return found
