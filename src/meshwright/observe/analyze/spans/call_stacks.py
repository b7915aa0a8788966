"""Which spans of a thread enclose a moment: the operator of a launch, the Python stack of a call.

Spans of one thread are apart or inside one another. Those of one depth are apart, so a search per
depth finds every enclosing span, without a loop over spans.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.intervals import Flags, Ints

NO_SPAN = -1


class CallStackIndex(NamedTuple):
    """Spans of threads, made ready for the search."""

    input_index: Ints
    """Place in the arrays that were given, by thread, depth and start."""
    lane: Ints
    depth: Ints
    start: Ints
    end: Ints


def build_call_stacks(lane: Ints, start: Ints, end: Ints) -> CallStackIndex:
    """Sort spans by thread, depth and start; spans without length enclose nothing."""
    filled = np.flatnonzero(end > start)
    order = filled[np.lexsort((-end[filled], start[filled], lane[filled]))]
    depth = np.zeros(order.size, dtype=np.int64)
    lanes = lane[order]
    cuts = [0, *(np.flatnonzero(lanes[1:] != lanes[:-1]) + 1).tolist(), order.size]
    for first, last in pairwise(cuts):
        own = order[first:last]
        ended = np.searchsorted(np.sort(end[own]), start[own], side="right")
        depth[first:last] = np.arange(own.size) - ended
    by_depth = np.lexsort((start[order], depth, lanes))
    place = order[by_depth]
    return CallStackIndex(place, lane[place], depth[by_depth], start[place], end[place])


def find_enclosing_rows(lane: Ints, start: Ints, end: Ints, asked: tuple[Ints, Ints]) -> Flags:
    """Which spans are around any of the moments asked for, given as threads and times.

    Where a few moments are asked of many spans, only these need be sorted.
    """
    held = np.zeros(start.size, dtype=np.bool_)
    for number in np.unique(asked[0]).tolist():
        moments = np.sort(asked[1][asked[0] == number])
        own = np.flatnonzero(lane == number)
        first = np.searchsorted(moments, start[own], side="left")
        held[own] = np.searchsorted(moments, end[own], side="left") > first
    return held


def find_innermost(spans: CallStackIndex, lane: Ints, moment: Ints) -> Ints:
    """The place of the innermost span around each moment of a thread; -1 where there is none."""
    found = np.full(moment.size, NO_SPAN, dtype=np.int64)
    for level in find_enclosing(spans, lane, moment):
        found = np.where(level != NO_SPAN, level, found)
    return found


def find_enclosing(spans: CallStackIndex, lane: Ints, moment: Ints) -> list[Ints]:
    """For each depth, outermost first, the place of the span around each moment, or -1."""
    levels: list[Ints] = []
    for number in np.unique(lane).tolist():
        asked = np.flatnonzero(lane == number)
        first, last = np.searchsorted(spans.lane, [number, number + 1])
        depth = spans.depth[first:last]
        for level in range(int(depth.max()) + 1 if depth.size else 0):
            low, high = first + np.searchsorted(depth, [level, level + 1])
            if level == len(levels):
                levels.append(np.full(moment.size, NO_SPAN, dtype=np.int64))
            if low == high:
                continue
            at = np.searchsorted(spans.start[low:high], moment[asked], side="right") - 1 + low
            hit = (at >= low) & (spans.end[np.maximum(at, low)] > moment[asked])
            levels[level][asked[hit]] = spans.input_index[at[hit]]
    return levels
