"""Gathers the events of a trace as columns, piece by piece, without keeping them as objects.

Each distinct name, category and thread gets a number once; times become whole nanoseconds. What
the numbers mean for a timeline is `kineto_spans`' business.
"""

from array import array
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.timeline.readers.chrome_trace.counter_events import (
    MEMORY_EVENT_NAME,
    MemoryEvents,
    PointEvent,
)
from meshwright.timeline.readers.chrome_trace.event_types import (
    DECODE_ERRORS,
    IGNORED_EVENT_TYPES,
    UNSUPPORTED_EVENT_TYPES,
    CompleteEvent,
    DeviceArguments,
    ExactCompleteEvent,
    InstantEvent,
    LaunchArguments,
    LegacyInstantEvent,
    decode_arguments,
    decode_events,
    decode_exact_events,
    decode_raw_events,
)
from meshwright.timeline.readers.chrome_trace.malformed_events import (
    NO_TIMESTAMP_NOTE,
    describe_unsupported_phase,
    parse_any_event,
)
from meshwright.timeline.readers.parsing.event_categories import (
    CATEGORY_ROLES,
    EventRole,
    TraceDetail,
)
from meshwright.timeline.readers.parsing.json_args import TextColumn, repair_json
from meshwright.timeline.readers.parsing.label_encoder import Codes, LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import (
    MAX_TIMESTAMP_NS,
    Ints,
    microseconds_to_ns,
    parse_ns,
    texts_to_ns,
    to_integer_array,
)

EVENT_COLUMN_TYPES: dict[str, type[np.signedinteger[Any]]] = {
    "name": np.int32, "category": np.int32, "lane": np.int32, "start_ns": np.int64,
    "duration_ns": np.int64, "flow": np.int64,
}  # fmt: skip

COLLECTIVE_OPERATOR = "record_param_comms"

# Kineto's own marks: when a window was opened and closed.
_OWN_MARKS = ("Iteration Start: ", "Record Window End")

_INSTANTS = frozenset({InstantEvent, LegacyInstantEvent})

_SPANS_OR_QUIET = frozenset({CompleteEvent, *IGNORED_EVENT_TYPES})


class CollectiveArguments(NamedTuple):
    """What the arguments of one span say about communication."""

    row: int
    name: str
    elements: int
    dtype: str | None
    group: str | None


class EventColumns:
    """The events of one trace as columns that grow."""

    def __init__(self, detail: TraceDetail) -> None:
        self.detail = detail
        self.names = LabelEncoder()
        self.categories = LabelEncoder()
        self.lanes = LabelEncoder()
        """Keys: (is on a device, device or process, stream or thread)."""
        self.columns = {name: bytearray() for name in EVENT_COLUMN_TYPES}
        """Growing in place: pieces that are joined at the end would take the memory twice."""
        self.last_ns = 0
        """When the last complete span ends."""
        self.num_spans = 0
        self.sizes: list[tuple[Ints, Ints]] = []
        """Rows, and their bytes."""
        self.collectives: list[CollectiveArguments] = []
        self.memory = MemoryEvents()
        self.point_events: list[PointEvent] = []
        self.notes: Counter[str] = Counter()
        self.extra = TextColumn()
        self._exact = False
        self._roles: npt.NDArray[np.int8] = np.empty(0, dtype=np.int8)
        self._operator = self.names[COLLECTIVE_OPERATOR]

    def add_events(self, text: Any) -> None:
        """Take the text of a list of events; all of them, or none and one of `DECODE_ERRORS`."""
        if not self._exact:
            try:
                events = decode_events(text)
                spans = [event for event in events if type(event) is CompleteEvent]
                start = microseconds_to_ns([span.ts for span in spans])
            except DECODE_ERRORS:
                start = None
                events = []
            if start is not None and self._add(spans, start):
                if not _SPANS_OR_QUIET.issuperset(map(type, events)):
                    self._add_others(_others(events))
                return
            del events
        self._take_exactly(text)

    def _take_exactly(self, text: Any) -> None:
        """Take events whose times have more digits than floats, or that have another form."""
        try:
            events = decode_exact_events(text)
        except DECODE_ERRORS:
            self._take_loosely(text)
            return
        spans = [event for event in events if type(event) is ExactCompleteEvent]
        start = texts_to_ns([span.ts for span in spans])
        if start is None or not self._add(spans, start):
            self._take_loosely(text)
            return
        self._exact = True
        self._add_others(_others(events))

    def _take_loosely(self, text: Any) -> None:
        """Take whatever events can be understood, one by one."""
        try:
            texts = decode_raw_events(text)
        except DECODE_ERRORS:
            texts = decode_raw_events(repair_json(bytes(text)))
        spans, others = [], []
        for one in texts:
            event = parse_any_event(one)
            if isinstance(event, str):
                self.notes[event] += 1
            elif isinstance(event, CompleteEvent):
                spans.append(event)
            elif event is not None:
                others.append(event)
        self.add_spans(spans)
        self._add_others(others)

    def add_spans(self, spans: list[CompleteEvent]) -> None:
        """Add spans whose times are whole nanoseconds already."""
        if spans:
            start = np.array([span.ts for span in spans], dtype=np.int64)
            self._add(spans, start, in_ns=True)

    def _add(self, spans: list[Any], start_ns: Ints, *, in_ns: bool = False) -> bool:
        """Add complete spans; False where a number needs the slow way, and nothing was added."""
        count = len(spans)
        lengths = [span.dur for span in spans]
        duration = np.array(lengths, dtype=np.int64) if in_ns else microseconds_to_ns(lengths)
        if duration is None:
            return False
        if count and duration.min() < 0:
            self.notes["negative durations count as 0"] += int((duration < 0).sum())
            np.maximum(duration, 0, out=duration)
        category = self.categories.encode([span.cat for span in spans], count)
        role = self._role_of(category)
        if self.detail is TraceDetail.LEAN and (role == EventRole.PYTHON).any():
            kept = np.flatnonzero(role != EventRole.PYTHON)
            spans = [spans[row] for row in kept.tolist()]
            count, category, role = len(spans), category[kept], role[kept]
            start_ns, duration = start_ns[kept], duration[kept]
        name = self.names.encode([span.name for span in spans], count)
        flow = np.full(count, -1, dtype=np.int64)
        lane = np.empty(count, dtype=np.int32)
        host = np.flatnonzero(role > EventRole.SYNC)
        lane[host] = self._host_lanes(spans, host)
        self._add_device(spans, np.flatnonzero(role <= EventRole.SYNC), lane, flow)
        launches = np.flatnonzero(role == EventRole.LAUNCH)
        texts = [spans[row].args for row in launches.tolist()]
        given = decode_arguments(LaunchArguments, texts)
        flow[launches] = to_integer_array([item.correlation for item in given])
        self._add_operators(spans, np.flatnonzero(name == self._operator))
        self._add_texts(spans, role, name)
        for key, values in (
            ("name", name), ("category", category), ("lane", lane), ("start_ns", start_ns),
            ("duration_ns", duration), ("flow", flow),
        ):  # fmt: skip
            self.columns[key] += values.astype(EVENT_COLUMN_TYPES[key], copy=False).data
        self.num_spans += count
        self.last_ns = max(self.last_ns, int((start_ns + duration).max(initial=0)))
        self.extra.grow_to(self.num_spans)
        return True

    def _add_device(self, spans: list[Any], rows: Ints, lane: Codes, flow: Ints) -> None:
        chosen = [spans[row] for row in rows.tolist()]
        texts = [span.args for span in chosen]
        given = decode_arguments(DeviceArguments, texts)
        device: list[Any] = [item.device for item in given]
        stream: list[Any] = [item.stream for item in given]
        if None in device:
            device = [s.pid if d is None else d for d, s in zip(device, chosen, strict=True)]
        if None in stream:
            stream = [s.tid if d is None else d for d, s in zip(stream, chosen, strict=True)]
        on_device = [True] * len(chosen)
        lane[rows] = self.lanes.encode(zip(on_device, device, stream, strict=True), len(chosen))
        flow[rows] = to_integer_array([item.correlation for item in given])
        size = to_integer_array([item.num_bytes for item in given])
        known = np.flatnonzero(size >= 0)
        if known.size:
            self.sizes.append((rows[known] + self.num_spans, size[known]))
        self._add_collectives(rows, given)

    def _add_operators(self, spans: list[Any], rows: Ints) -> None:
        texts = [spans[row].args for row in rows.tolist()]
        self._add_collectives(rows, decode_arguments(DeviceArguments, texts))

    def _add_texts(self, spans: list[Any], role: npt.NDArray[np.int8], name: Codes) -> None:
        """Keep the arguments that were asked for."""
        if self.detail is TraceDetail.LEAN:
            return
        kept = (role <= EventRole.SYNC) | (name == self._operator)
        if self.detail is TraceDetail.SHAPES:
            kept |= role == EventRole.OPERATOR
        elif self.detail is TraceDetail.FULL:
            kept[:] = True
        rows = np.flatnonzero(kept)
        chosen = spans if rows.size == len(spans) else [spans[row] for row in rows.tolist()]
        self.extra.add(rows + self.num_spans, [span.args for span in chosen])

    def _add_collectives(self, rows: Ints, given: list[DeviceArguments]) -> None:
        for at, item in enumerate(given):
            if item.collective is not None:
                elements = max(item.elements_in, item.elements_out)
                row = int(rows[at]) + self.num_spans
                found = CollectiveArguments(row, item.collective, elements, item.dtype, item.group)
                self.collectives.append(found)

    def _role_of(self, category: Codes) -> npt.NDArray[np.int8]:
        if len(self._roles) < len(self.categories):
            roles = [CATEGORY_ROLES.get(name, EventRole.HOST) for name in self.categories]
            self._roles = np.array(roles, dtype=np.int8)
        return self._roles[category]

    def find_roles(self, category: Codes) -> npt.NDArray[np.int8]:
        """The role of each span by its category."""
        return self._role_of(category)

    def _host_lanes(self, spans: list[Any], rows: Ints) -> Codes:
        """The number of the thread of each of these rows; neighbours are mostly of the same."""
        pid, tid = [span.pid for span in spans], [span.tid for span in spans]
        try:
            pids, tids = (np.frombuffer(array("q", ids), np.int64)[rows] for ids in (pid, tid))
        except (TypeError, OverflowError):
            keys = [(False, pid[row], tid[row]) for row in rows.tolist()]
            return self.lanes.encode(keys, len(keys))
        changed = (pids[1:] != pids[:-1]) | (tids[1:] != tids[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(changed) + 1))[: len(rows)]
        which = zip(pids[firsts].tolist(), tids[firsts].tolist(), strict=True)
        numbers = [self.lanes[False, process, thread] for process, thread in which]
        return np.repeat(np.array(numbers, dtype=np.int32), np.diff(firsts, append=len(rows)))

    def _add_others(self, events: list[Any]) -> None:
        memory = [e for e in events if type(e) in _INSTANTS and e.name == MEMORY_EVENT_NAME]
        if memory:
            times = texts_to_ns([event.ts for event in memory])
            if times is not None:
                self.memory.add(times, [event.args for event in memory])
                events = [
                    e for e in events if type(e) not in _INSTANTS or e.name != MEMORY_EVENT_NAME
                ]
        for event in events:
            kind = type(event)
            if kind in UNSUPPORTED_EVENT_TYPES:
                self.notes[describe_unsupported_phase(UNSUPPORTED_EVENT_TYPES[kind])] += 1
                continue
            time = parse_ns(bytes(event.ts))
            if time is None or abs(time) > MAX_TIMESTAMP_NS:
                self.notes[NO_TIMESTAMP_NOTE] += 1
            elif kind not in _INSTANTS or not event.name.startswith(_OWN_MARKS):
                kind = InstantEvent if kind in _INSTANTS else kind
                args = bytes(event.args)
                self.point_events.append(
                    PointEvent(kind, time, event.name, event.cat, event.pid, event.tid, args)
                )


def _others(events: list[Any]) -> list[Any]:
    # Comparing one by one takes a third of the time of looking into a set: most are flows.
    names, start, finish, step = IGNORED_EVENT_TYPES
    return [
        event
        for event in events
        if (kind := type(event)) is not CompleteEvent
        and kind is not finish
        and kind is not start
        and kind is not names
        and kind is not ExactCompleteEvent
        and kind is not step
    ]
