"""Lays overlapping spans of one lane into rows in which they nest.

Viewers draw a lane as a flame graph, so two spans of one row must be apart or one inside the
other; what only partly overlaps is dropped or moved by them. Pure arithmetic on numpy arrays.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]


class TrackLayout(NamedTuple):
    """Where each span goes, in drawing order: by lane, then start, a parent before its children."""

    order: Ints
    """Row numbers of the given arrays in drawing order."""
    lane: Ints
    """The lane of each placed span."""
    row: Ints
    """The row within its lane: 0 unless it overlaps what is there."""


def sort_for_drawing(lane: Ints, start_ns: Ints, duration_ns: Ints) -> Ints:
    """Sort spans by lane, then start, a parent before its children."""
    order: Ints = np.lexsort((-duration_ns, start_ns, lane))
    return order


def assign_rows(lane: Ints, start_ns: Ints, duration_ns: Ints) -> TrackLayout:
    """Give every span of every lane a row in which it nests."""
    order = sort_for_drawing(lane, start_ns, duration_ns)
    lanes, start = lane[order], start_ns[order]
    end = start + duration_ns[order]
    row = np.zeros(order.size, dtype=np.int32)
    cuts = (np.flatnonzero(lanes[1:] != lanes[:-1]) + 1).tolist()
    for first, last in pairwise([0, *cuts, order.size]):
        if not is_nested(start[first:last], end[first:last]):
            row[first:last] = _first_fit(start[first:last].tolist(), end[first:last].tolist())
    return TrackLayout(order, lanes, row)


def is_nested(start: Ints, end: Ints) -> bool:
    """Whether spans, sorted by start and then longest first, are apart or inside one another.

    Peels off one depth after another: a span that starts before the latest end so far lies inside
    that span, or crosses its end. Those inside are looked at again among themselves; children of
    different parents are apart, because their parents are.
    """
    while start.size > 1:
        reach = np.maximum.accumulate(end)
        inside = start[1:] < reach[:-1]
        if np.any(inside & (end[1:] > reach[:-1])):
            return False
        start, end = start[1:][inside], end[1:][inside]
    return True


def _first_fit(starts: list[int], ends: list[int]) -> list[int]:
    """The first row for each span in which it nests; spans come sorted as for `is_nested`."""
    rows: list[
        list[int]
    ] = []  # Per row, the ends of the spans that are still open, outermost first.
    chosen = []
    for start, end in zip(starts, ends, strict=True):
        for number, open_ends in enumerate(rows):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or open_ends[-1] >= end:
                open_ends.append(end)
                chosen.append(number)
                break
        else:
            rows.append([end])
            chosen.append(len(rows) - 1)
    return chosen
