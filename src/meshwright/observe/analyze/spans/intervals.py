"""Device work of one rank as arrays, and exact arithmetic on intervals of time.

Everything is int64 nanoseconds; nothing is rounded. Intervals are half-open, sorted, apart from
each other and never empty, so two sets of them are equal exactly where their arrays are. Knows
timelines; does not know profilers.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.timeline.columns import DictionaryColumn

Ints = npt.NDArray[Any]

Flags = npt.NDArray[np.bool_]

COMPUTE, COMMUNICATION, MEMORY_COPY = range(3)


class Intervals(NamedTuple):
    """Disjoint intervals of time in ns, sorted; they never touch and are never empty."""

    start: Ints
    """First moment in."""
    end: Ints
    """First moment out."""


class DeviceSpans(NamedTuple):
    """The device work of one rank, sorted by start and then by end."""

    row: Ints
    """Row in the rank's timeline."""
    start: Ints
    """Start, ns."""
    end: Ints
    """End, ns."""
    kind: Ints
    """Place in `DEVICE_KINDS`."""
    lane: Ints
    """Place in `lanes`: the stream."""
    name: Ints
    """Place in `names`."""
    flow: Ints
    """Number of the flow that ends here: the launch; -1 where it is not known."""
    lanes: tuple[str, ...]
    """Device and stream, such as `gpu 0 stream 7`."""
    names: Sequence[str]
    """Names of kernels and copies."""

    def intervals_of(self, *kinds: int) -> Intervals:
        """When work of these kinds ran, whatever the stream; of any kind where none is given."""
        keep = np.isin(self.kind, kinds) if kinds else slice(None)
        return union(self.start[keep], self.end[keep])

    def take(self, which: Ints | Flags) -> "DeviceSpans":
        """Only these spans, in the order given."""
        row, start, end, kind, lane, name, flow = (column[which] for column in self[:7])
        return DeviceSpans(row, start, end, kind, lane, name, flow, self.lanes, self.names)

    @property
    def window_ns(self) -> tuple[int, int]:
        """From the first start to the last end; (0, 0) where there is no work."""
        if not self.start.size:
            return (0, 0)
        return int(self.start[0]), int(self.end.max())


def sort_unique(values: Ints) -> Ints:
    """Each value once, sorted; numpy's own `unique` takes several times as long."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


def union(start: Ints, end: Ints) -> Intervals:
    """The moments that any of these spans covers; those that touch become one."""
    filled = end > start
    start, end = start[filled], end[filled]
    if not start.size:
        return Intervals(start.astype(np.int64), end.astype(np.int64))
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.flatnonzero(np.append(True, start[1:] > reach[:-1]))
    closes = np.append(opens[1:] - 1, start.size - 1)
    return Intervals(start[opens], reach[closes])


def measure_total_ns(intervals: Intervals) -> int:
    """How long they are together, in ns."""
    return int((intervals.end - intervals.start).sum())


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The moments in both."""
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(last - first, 0)
    of_a = np.repeat(np.arange(a.start.size), count)
    of_b = np.arange(of_a.size) - np.repeat(np.cumsum(count) - count, count) + first[of_a]
    return Intervals(np.maximum(a.start[of_a], b.start[of_b]), np.minimum(a.end[of_a], b.end[of_b]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The moments in `a` that are not in `b`."""
    if not a.start.size or not b.start.size:
        return a
    low = min(int(a.start[0]), int(b.start[0]))
    high = max(int(a.end[-1]), int(b.end[-1]))
    return intersect(a, find_gaps(b, (low, high)))


def find_gaps(intervals: Intervals, window_ns: tuple[int, int]) -> Intervals:
    """The moments of the window that the intervals leave out."""
    low, high = window_ns
    start = np.append(low, np.clip(intervals.end, low, high))
    end = np.append(np.clip(intervals.start, low, high), high)
    keep = end > start
    return Intervals(start[keep].astype(np.int64), end[keep].astype(np.int64))


def clip(intervals: Intervals, window_ns: tuple[int, int]) -> Intervals:
    """The moments inside the window."""
    low, high = window_ns
    start, end = np.maximum(intervals.start, low), np.minimum(intervals.end, high)
    keep = end > start
    return Intervals(start[keep], end[keep])


def measure_covered_ns(intervals: Intervals, start: Ints, end: Ints) -> Ints:
    """How many ns of each span [start, end) the intervals cover."""
    return _before(intervals, np.maximum(start, end)) - _before(intervals, start)


def _before(intervals: Intervals, moment: Ints) -> Ints:
    """How many covered ns lie before each moment."""
    total: Ints = np.append(0, np.cumsum(intervals.end - intervals.start))
    number = np.searchsorted(intervals.start, moment, side="right")
    if not intervals.end.size:
        return np.zeros(np.shape(moment), dtype=np.int64)
    beyond = np.maximum(intervals.end[np.maximum(number - 1, 0)] - moment, 0)
    before: Ints = total[number] - np.where(number > 0, beyond, 0)
    return before


def match_values(column: DictionaryColumn, test: Callable[[str], object]) -> Flags:
    """Which rows have a value that passes; each distinct value is tested once."""
    # Ranks have mostly the same names: what a pattern says of one is remembered.
    known = _tested(test) if isinstance(test, BuiltinMethodType) else _Tested(test)
    if len(known) > _MOST_REMEMBERED:
        known.clear()
    passes = np.zeros(len(column.values) + 1, dtype=np.bool_)
    passes[:-1] = list(map(known.__getitem__, column.values))
    rows: Flags = passes[column.codes]
    return rows


_MOST_REMEMBERED = 1 << 17


class _Tested(dict[str, bool]):
    """Whether values pass a test, each tested once."""

    def __init__(self, test: Callable[[str], object]) -> None:
        self.test = test

    def __missing__(self, value: str) -> bool:
        passes = self[value] = bool(self.test(value))
        return passes


@lru_cache(64)
def _tested(test: Callable[[str], object]) -> _Tested:
    return _Tested(test)
