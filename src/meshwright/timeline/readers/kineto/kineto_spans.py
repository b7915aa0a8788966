"""Makes the columns of a timeline of what was gathered from a trace.

    process "gpu 0", lane "stream 7"          kernels, copies, fills; flow_in = correlation
                     lane "stream 7 marks"    the host's annotations, projected onto the stream
                     lane "stream 7 sync"     waits of and for the stream, where they were recorded
    process "host", lane "thread 123"         operators, annotations, calls; flow_out of launches
    process "profiler"                        the profiler's own window

Several processes of a host are told apart as "host 123". Works on whole columns; no file is known.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.timeline.readers.chrome_trace.event_columns import EVENT_COLUMN_TYPES, EventColumns
from meshwright.timeline.readers.kineto.kineto_collectives import match_collective_calls
from meshwright.timeline.readers.parsing.arrow_arrays import (
    build_arrow_table,
    to_dictionary_array,
    to_number_array,
)
from meshwright.timeline.readers.parsing.communication_names import match_communication_rule
from meshwright.timeline.readers.parsing.event_categories import EventRole
from meshwright.timeline.readers.parsing.label_encoder import Codes
from meshwright.timeline.readers.parsing.timestamps import Ints
from meshwright.timeline.schema import ABSENT, SPAN_COLUMNS_BY_NAME, SpanKind

KINDS = tuple(kind.value for kind in SpanKind)
_LANE_ENDS = {EventRole.MARK: " marks", EventRole.SYNC: " sync"}


class KinetoSpanColumns:
    """The columns of a trace's spans on their way to a table."""

    def __init__(self, gathered: EventColumns) -> None:
        columns = gathered.columns
        self.count = gathered.num_spans
        self.names: list[str] = list(gathered.names)
        self.categories: list[str] = list(gathered.categories)
        given = {
            name: np.ndarray(self.count, EVENT_COLUMN_TYPES[name], columns.pop(name))
            for name in EVENT_COLUMN_TYPES
        }
        self.name: Codes = given["name"]
        self.category: Codes = given["category"]
        self.role: npt.NDArray[np.int8] = gathered.find_roles(self.category)
        self.lane: Codes = given["lane"]
        self.start_ns: Ints = given["start_ns"]
        self.duration_ns: Ints = given["duration_ns"]
        self.flow: Ints = given["flow"]
        np.maximum(self.flow, ABSENT, out=self.flow)
        self.kind: Codes = self._kinds()

    def _kinds(self) -> Codes:
        of_role = np.full(len(EventRole), KINDS.index(SpanKind.HOST), dtype=np.int32)
        of_role[EventRole.KERNEL] = KINDS.index(SpanKind.COMPUTE)
        of_role[EventRole.COPY] = KINDS.index(SpanKind.MEMORY_COPY)
        of_role[EventRole.SYNC] = KINDS.index(SpanKind.WAIT)
        kind = of_role[self.role]
        kernels = np.flatnonzero(self.role == EventRole.KERNEL)
        of_name = np.full(len(self.names), KINDS.index(SpanKind.COMPUTE), dtype=np.int32)
        for code in np.flatnonzero(np.bincount(self.name[kernels])).tolist():
            of_name[code] = KINDS.index(classify_kernel_kind(self.names[code]))
        kind[kernels] = of_name[self.name[kernels]]
        return kind


def classify_kernel_kind(name: str) -> SpanKind:
    """What a kernel does, by its name; MTIA records waits and copies as it does kernels."""
    if match_communication_rule(name) is not None:
        return SpanKind.COMMUNICATION
    if name == "event_wait":
        return SpanKind.WAIT
    return SpanKind.MEMORY_COPY if name == "dma_request" else SpanKind.COMPUTE


def build_kineto_spans(gathered: EventColumns, rank: int, base_ns: int) -> pa.Table:
    """The spans of a trace as a timeline's table."""
    columns = KinetoSpanColumns(gathered)
    count = columns.count
    arrays: dict[str, Any] = {"rank": to_number_array(np.full(count, rank, dtype=np.int32))}
    arrays["process"], arrays["lane"] = _places(columns, list(gathered.lanes))
    collective = match_collective_calls(columns, gathered)
    columns.start_ns += base_ns
    arrays["start_ns"] = to_number_array(columns.start_ns)
    arrays["duration_ns"] = to_number_array(columns.duration_ns)
    arrays["kind"] = to_dictionary_array(columns.kind, list(KINDS))
    arrays["name"] = to_dictionary_array(columns.name, columns.names)
    arrays["flow_out"], arrays["flow_in"] = _flows(columns)
    arrays["bytes"] = to_number_array(collective.num_bytes, nullable=True)
    arrays["collective"] = to_dictionary_array(*collective.collective)
    arrays["group"] = to_dictionary_array(*collective.group)
    arrays["dtype"] = to_dictionary_array(*collective.dtype)
    nameless = columns.categories.index("") if "" in columns.categories else -2
    columns.category[columns.category == nameless] = ABSENT
    arrays["category"] = to_dictionary_array(columns.category, columns.categories)
    extra = gathered.extra.column()
    if extra is not None:
        arrays["extra"] = extra
    return build_arrow_table(arrays, SPAN_COLUMNS_BY_NAME)


def _places(columns: KinetoSpanColumns, keys: list[tuple[bool, Any, Any]]) -> tuple[Any, Any]:
    """The process and lane of each span."""
    role, lane = columns.role, columns.lane
    own = (role == EventRole.LAUNCH) | (
        role == EventRole.OPERATOR
    )  # Only a real process does these.
    processes = {keys[code][1] for code in np.unique(lane[own]).tolist()}
    several = len(processes) > 1
    places: dict[tuple[str, str], int] = {}
    # A lane's spans may be of several roles; each pair is named once.
    pairs = lane * np.int32(len(EventRole)) + role
    used = np.flatnonzero(np.bincount(pairs)) if pairs.size else pairs
    final = np.zeros(int(used[-1]) + 1 if used.size else 0, dtype=np.int32)
    for pair in used.tolist():
        on_device, owner, line = keys[pair // len(EventRole)]
        which = EventRole(pair % len(EventRole))
        if on_device:
            stream = str(line).removeprefix("stream ")
            place = (f"gpu {owner}", f"stream {stream}{_LANE_ENDS.get(which, '')}")
        elif which is EventRole.PROFILER:
            place = ("profiler", str(line))
        else:
            process = f"host {owner}" if several and owner in processes else "host"
            place = (process, f"thread {line}")
        final[pair] = places.setdefault(place, len(places))
    place_codes = final[pairs]
    names: dict[str, int] = {}
    lanes: dict[str, int] = {}
    process_of = [names.setdefault(process, len(names)) for process, _ in places]
    lane_of = [lanes.setdefault(line, len(lanes)) for _, line in places]
    return (
        to_dictionary_array(np.array(process_of, dtype=np.int32)[place_codes], list(names)),
        to_dictionary_array(np.array(lane_of, dtype=np.int32)[place_codes], list(lanes)),
    )


def _flows(columns: KinetoSpanColumns) -> tuple[Any, Any]:
    """Flows from launches to what they launched; a launch that leads nowhere starts none."""
    flow, role = columns.flow, columns.role
    given = flow >= 0
    ends = np.flatnonzero((role <= EventRole.SYNC) & (role != EventRole.MARK) & given)
    starts = np.flatnonzero((role == EventRole.LAUNCH) & given)
    starts = starts[np.isin(flow[starts], flow[ends])]
    starts = starts[find_first_occurrences(flow[starts])]
    flow_out, flow_in = (np.full(columns.count, ABSENT, dtype=np.int64) for _ in range(2))
    flow_out[starts] = flow[starts]
    flow_in[ends] = flow[ends]
    return to_number_array(flow_out, nullable=True), to_number_array(flow_in, nullable=True)


def find_first_occurrences(flows: Ints) -> Ints:
    """Where each number stands first: one span starts a flow, later ones do not."""
    if not flows.size:
        return np.empty(0, dtype=np.int64)
    largest = int(flows.max())
    if largest < 8 * len(flows) + (1 << 20):
        # Where an index repeats, the last assignment stays: backwards, that is the first span.
        places = np.arange(len(flows), dtype=np.int32)
        first = np.empty(largest + 1, dtype=np.int32)
        first[flows[::-1]] = places[::-1]
        return np.flatnonzero(first[flows] == places)
    return np.sort(np.unique(flows, return_index=True)[1])
