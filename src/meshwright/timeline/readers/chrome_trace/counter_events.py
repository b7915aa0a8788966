"""What a trace says beside complete spans: memory, counters, and spans in two halves.

Memory is counted as `memory allocated gpu 0` and `memory reserved gpu 0`, in bytes; where an old
trace says only what each allocation added, the sum since its start stands in.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.timeline.readers.chrome_trace.event_types import (
    DECODE_ERRORS,
    BeginEvent,
    CompleteEvent,
    CounterEvent,
    EndEvent,
    MemoryArguments,
    decode_arguments,
)
from meshwright.timeline.readers.parsing.timestamps import Ints, to_integer_array

MEMORY_EVENT_NAME = "[memory]"
_SERIES = msgspec.json.Decoder(dict[str, Any])


class PointEvent(NamedTuple):
    """An event that is no complete span."""

    kind: type[msgspec.Struct]
    time_ns: int
    name: str
    category: str
    pid: int | str
    tid: int | str
    args: bytes


class CounterColumns(NamedTuple):
    """Values of counters, in the order of their kinds."""

    names: list[str]
    units: list[str]
    name_index: npt.NDArray[np.int32]
    """Index into the names, for each value."""
    time_ns: Ints
    value: npt.NDArray[np.float64]


class MemoryEvents:
    """The `[memory]` instants of a trace."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, ...]] = []

    def add(self, time_ns: Ints, texts: list[Any]) -> None:
        """Add instants by their arguments."""
        given: list[MemoryArguments] = decode_arguments(MemoryArguments, texts)
        kind = to_integer_array([item.device_type for item in given])
        device = to_integer_array([item.device for item in given])
        change = to_integer_array([item.change_bytes for item in given], least=-(2**63))
        allocated = to_integer_array([item.allocated_bytes for item in given])
        reserved = to_integer_array([item.reserved_bytes for item in given])
        self._parts.append((time_ns, kind, device, change, allocated, reserved))

    def build_series(self) -> list[tuple[str, Ints, Ints]]:
        """Each device's allocated and reserved bytes: name, times, values."""
        if not self._parts:
            return []
        columns = [np.concatenate(part) for part in zip(*self._parts, strict=True)]
        time, kind, device, change, allocated, reserved = columns
        found: list[tuple[str, Ints, Ints]] = []
        # Device type 0 is the host; all others are accelerators (c10/core/DeviceType.h).
        for is_host, number in sorted(set(zip((kind == 0).tolist(), device.tolist(), strict=True))):
            rows = np.flatnonzero(((kind == 0) == is_host) & (device == number))
            where = "host" if is_host else f"gpu {number}"
            total = allocated[rows]
            if (total < 0).all():
                total = np.cumsum(change[rows])
                found.append((f"memory allocated {where} since start", time[rows], total))
            else:
                found.append((f"memory allocated {where}", time[rows], total))
            if not is_host and (reserved[rows] > 0).any():
                found.append((f"memory reserved {where}", time[rows], reserved[rows]))
        return found


def collect_counters(moments: list[PointEvent], memory: MemoryEvents) -> CounterColumns:
    """All counters of a trace."""
    series: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {}
    for name, time, value in memory.build_series():
        series[name, "bytes"] = ([time], [value.astype(np.float64)])
    single: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for moment in moments:
        if moment.kind is CounterEvent:
            for name, number in _values(moment):
                times, values = single[name]
                times.append(moment.time_ns)
                values.append(number)
    for name, (times, values) in single.items():
        series[name, ""] = ([np.array(times, dtype=np.int64)], [np.array(values)])
    which = [np.full(len(s[0][0]), i, dtype=np.int32) for i, s in enumerate(series.values())]
    return CounterColumns(
        [name for name, _ in series],
        [unit for _, unit in series],
        np.concatenate([np.empty(0, np.int32), *which]),
        np.concatenate([np.empty(0, np.int64), *(s[0][0] for s in series.values())]),
        np.concatenate([np.empty(0), *(s[1][0] for s in series.values())]),
    )


def _values(moment: PointEvent) -> list[tuple[str, float]]:
    """The series of a counter event: its own name where there is one, else with the series'."""
    try:
        given = _SERIES.decode(moment.args)
    except DECODE_ERRORS:
        return []
    numbers = {
        key: float(value)
        for key, value in given.items()
        if isinstance(value, int | float) and abs(value) < 1e300
    }
    if len(given) == 1:
        return [(moment.name, value) for value in numbers.values()]
    return [(f"{moment.name}: {key}", value) for key, value in numbers.items()]


class PairedSpans(NamedTuple):
    """Spans made of their two halves, and what did not fit."""

    spans: list[CompleteEvent]
    """In the order of their starts in the file; `ts` and `dur` are nanoseconds."""
    missing_end: int
    missing_begin: int


def pair_begin_end(moments: list[PointEvent], last_ns: int) -> PairedSpans:
    """Join each end with the start before it on its thread; one without end lasts to the last."""
    opened: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    ended: dict[int, int] = {}
    unbegun = 0
    for at, moment in enumerate(moments):
        thread = (moment.pid, moment.tid)
        if moment.kind is BeginEvent:
            opened[thread].append(at)
        elif moment.kind is EndEvent:
            if opened[thread]:
                ended[opened[thread].pop()] = moment.time_ns
            else:
                unbegun += 1
    spans = []
    begun = [(at, moment) for at, moment in enumerate(moments) if moment.kind is BeginEvent]
    for at, moment in begun:
        length = ended.get(at, max(last_ns, moment.time_ns)) - moment.time_ns
        spans.append(to_complete_event(moment, length))
    return PairedSpans(spans, len(begun) - len(ended), unbegun)


def to_complete_event(moment: PointEvent, duration_ns: int) -> CompleteEvent:
    """A moment as a span of this length; its times are nanoseconds."""
    return CompleteEvent(
        ts=moment.time_ns,
        dur=duration_ns,
        name=moment.name,
        cat=moment.category,
        pid=moment.pid,
        tid=moment.tid,
        args=msgspec.Raw(moment.args),
    )
