"""Gathers the events of a trace as columns, piece by piece, without keeping them as objects.

Each distinct name, category and thread gets a number once; times become whole nanoseconds. What
the numbers mean for a timeline is `kineto_spans`' business.
"""

from array import array
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.timeline.readers.kineto_events import (
    FAULTS,
    QUIET,
    UNREAD,
    Complete,
    DeviceArguments,
    ExactComplete,
    Instant,
    LaunchArguments,
    OldInstant,
    decode_arguments,
    decode_events,
    decode_exact_events,
    decode_texts,
)
from meshwright.timeline.readers.kineto_loose import NO_TIME, left_out, understood
from meshwright.timeline.readers.kineto_moments import MEMORY, Memory, Moment
from meshwright.timeline.readers.kineto_roles import ROLES, Detail, Role
from meshwright.timeline.readers.kineto_texts import Texts, mended
from meshwright.timeline.readers.kineto_times import (
    LARGEST_NS,
    Ints,
    integers,
    nanoseconds,
    times_ns,
    times_of_texts_ns,
)

Codes = npt.NDArray[np.int32]
COLUMNS: dict[str, type[np.signedinteger[Any]]] = {
    "name": np.int32, "category": np.int32, "lane": np.int32, "start_ns": np.int64,
    "duration_ns": np.int64, "flow": np.int64,
}  # fmt: skip
COLLECTIVE_OPERATOR = "record_param_comms"
# Kineto's own marks: when a window was opened and closed.
_OWN_MARKS = ("Iteration Start: ", "Record Window End")
_INSTANTS = frozenset({Instant, OldInstant})
_SPANS_OR_QUIET = frozenset({Complete, *QUIET})


class Numbered(dict[Any, int]):
    """Numbers each distinct value in the order of appearance."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number

    def codes(self, values: Any, count: int) -> Codes:
        """The number of each value."""
        return np.fromiter(map(self.__getitem__, values), np.int32, count)


class Collective(NamedTuple):
    """What the arguments of one span say about communication."""

    row: int
    name: str
    elements: int
    dtype: str | None
    group: str | None


class Gathered:
    """The events of one trace as columns that grow."""

    def __init__(self, detail: Detail) -> None:
        self.detail = detail
        self.names = Numbered()
        self.categories = Numbered()
        self.lanes = Numbered()
        """Keys: (is on a device, device or process, stream or thread)."""
        self.columns = {name: bytearray() for name in COLUMNS}
        """Growing in place: pieces that are joined at the end would take the memory twice."""
        self.last_ns = 0
        """When the last complete span ends."""
        self.num_spans = 0
        self.sizes: list[tuple[Ints, Ints]] = []
        """Rows, and their bytes."""
        self.collectives: list[Collective] = []
        self.memory = Memory()
        self.moments: list[Moment] = []
        self.notes: Counter[str] = Counter()
        self.extra = Texts()
        self._exact = False
        self._roles: npt.NDArray[np.int8] = np.empty(0, dtype=np.int8)
        self._operator = self.names[COLLECTIVE_OPERATOR]

    def take(self, text: Any) -> None:
        """Take the text of a list of events; all of them, or none and one of `FAULTS`."""
        if not self._exact:
            try:
                events = decode_events(text)
                spans = [event for event in events if type(event) is Complete]
                start = times_ns([span.ts for span in spans])
            except FAULTS:
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
        except FAULTS:
            self._take_loosely(text)
            return
        spans = [event for event in events if type(event) is ExactComplete]
        start = times_of_texts_ns([span.ts for span in spans])
        if start is None or not self._add(spans, start):
            self._take_loosely(text)
            return
        self._exact = True
        self._add_others(_others(events))

    def _take_loosely(self, text: Any) -> None:
        """Take whatever events can be understood, one by one."""
        try:
            texts = decode_texts(text)
        except FAULTS:
            texts = decode_texts(mended(bytes(text)))
        spans, others = [], []
        for one in texts:
            event = understood(one)
            if isinstance(event, str):
                self.notes[event] += 1
            elif isinstance(event, Complete):
                spans.append(event)
            elif event is not None:
                others.append(event)
        self.add_in_ns(spans)
        self._add_others(others)

    def add_in_ns(self, spans: list[Complete]) -> None:
        """Add spans whose times are whole nanoseconds already."""
        if spans:
            start = np.array([span.ts for span in spans], dtype=np.int64)
            self._add(spans, start, in_ns=True)

    def _add(self, spans: list[Any], start_ns: Ints, *, in_ns: bool = False) -> bool:
        """Add complete spans; False where a number needs the slow way, and nothing was added."""
        count = len(spans)
        lengths = [span.dur for span in spans]
        duration = np.array(lengths, dtype=np.int64) if in_ns else times_ns(lengths)
        if duration is None:
            return False
        if count and duration.min() < 0:
            self.notes["negative durations count as 0"] += int((duration < 0).sum())
            np.maximum(duration, 0, out=duration)
        category = self.categories.codes([span.cat for span in spans], count)
        role = self._role_of(category)
        if self.detail is Detail.LEAN and (role == Role.PYTHON).any():
            kept = np.flatnonzero(role != Role.PYTHON)
            spans = [spans[row] for row in kept.tolist()]
            count, category, role = len(spans), category[kept], role[kept]
            start_ns, duration = start_ns[kept], duration[kept]
        name = self.names.codes([span.name for span in spans], count)
        flow = np.full(count, -1, dtype=np.int64)
        lane = np.empty(count, dtype=np.int32)
        host = np.flatnonzero(role > Role.SYNC)
        lane[host] = self._host_lanes(spans, host)
        self._add_device(spans, np.flatnonzero(role <= Role.SYNC), lane, flow)
        launches = np.flatnonzero(role == Role.LAUNCH)
        texts = [spans[row].args for row in launches.tolist()]
        given = decode_arguments(LaunchArguments, texts)
        flow[launches] = integers([item.correlation for item in given])
        self._add_operators(spans, np.flatnonzero(name == self._operator))
        self._add_texts(spans, role, name)
        for key, values in (
            ("name", name), ("category", category), ("lane", lane), ("start_ns", start_ns),
            ("duration_ns", duration), ("flow", flow),
        ):  # fmt: skip
            self.columns[key] += values.astype(COLUMNS[key], copy=False).data
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
        lane[rows] = self.lanes.codes(zip(on_device, device, stream, strict=True), len(chosen))
        flow[rows] = integers([item.correlation for item in given])
        size = integers([item.num_bytes for item in given])
        known = np.flatnonzero(size >= 0)
        if known.size:
            self.sizes.append((rows[known] + self.num_spans, size[known]))
        self._add_collectives(rows, given)

    def _add_operators(self, spans: list[Any], rows: Ints) -> None:
        texts = [spans[row].args for row in rows.tolist()]
        self._add_collectives(rows, decode_arguments(DeviceArguments, texts))

    def _add_texts(self, spans: list[Any], role: npt.NDArray[np.int8], name: Codes) -> None:
        """Keep the arguments that were asked for."""
        if self.detail is Detail.LEAN:
            return
        kept = (role <= Role.SYNC) | (name == self._operator)
        if self.detail is Detail.SHAPES:
            kept |= role == Role.OPERATOR
        elif self.detail is Detail.FULL:
            kept[:] = True
        rows = np.flatnonzero(kept)
        chosen = spans if rows.size == len(spans) else [spans[row] for row in rows.tolist()]
        self.extra.add(rows + self.num_spans, [span.args for span in chosen])

    def _add_collectives(self, rows: Ints, given: list[DeviceArguments]) -> None:
        for at, item in enumerate(given):
            if item.collective is not None:
                elements = max(item.elements_in, item.elements_out)
                row = int(rows[at]) + self.num_spans
                found = Collective(row, item.collective, elements, item.dtype, item.group)
                self.collectives.append(found)

    def _role_of(self, category: Codes) -> npt.NDArray[np.int8]:
        if len(self._roles) < len(self.categories):
            roles = [ROLES.get(name, Role.HOST) for name in self.categories]
            self._roles = np.array(roles, dtype=np.int8)
        return self._roles[category]

    def roles(self, category: Codes) -> npt.NDArray[np.int8]:
        """The role of each span by its category."""
        return self._role_of(category)

    def _host_lanes(self, spans: list[Any], rows: Ints) -> Codes:
        """The number of the thread of each of these rows; neighbours are mostly of the same."""
        pid, tid = [span.pid for span in spans], [span.tid for span in spans]
        try:
            pids, tids = (np.frombuffer(array("q", ids), np.int64)[rows] for ids in (pid, tid))
        except (TypeError, OverflowError):
            keys = [(False, pid[row], tid[row]) for row in rows.tolist()]
            return self.lanes.codes(keys, len(keys))
        changed = (pids[1:] != pids[:-1]) | (tids[1:] != tids[:-1])
        firsts = np.concatenate(([0], np.flatnonzero(changed) + 1))[: len(rows)]
        which = zip(pids[firsts].tolist(), tids[firsts].tolist(), strict=True)
        numbers = [self.lanes[False, process, thread] for process, thread in which]
        return np.repeat(np.array(numbers, dtype=np.int32), np.diff(firsts, append=len(rows)))

    def _add_others(self, events: list[Any]) -> None:
        memory = [e for e in events if type(e) in _INSTANTS and e.name == MEMORY]
        if memory:
            times = times_of_texts_ns([event.ts for event in memory])
            if times is not None:
                self.memory.add(times, [event.args for event in memory])
                events = [e for e in events if type(e) not in _INSTANTS or e.name != MEMORY]
        for event in events:
            kind = type(event)
            if kind in UNREAD:
                self.notes[left_out(UNREAD[kind])] += 1
                continue
            time = nanoseconds(bytes(event.ts))
            if time is None or abs(time) > LARGEST_NS:
                self.notes[NO_TIME] += 1
            elif kind not in _INSTANTS or not event.name.startswith(_OWN_MARKS):
                kind = Instant if kind in _INSTANTS else kind
                args = bytes(event.args)
                self.moments.append(
                    Moment(kind, time, event.name, event.cat, event.pid, event.tid, args)
                )


def _others(events: list[Any]) -> list[Any]:
    # Comparing one by one takes a third of the time of looking into a set: most are flows.
    names, start, finish, step = QUIET
    return [
        event
        for event in events
        if (kind := type(event)) is not Complete
        and kind is not finish
        and kind is not start
        and kind is not names
        and kind is not ExactComplete
        and kind is not step
    ]
