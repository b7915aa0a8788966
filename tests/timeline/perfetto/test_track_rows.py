"""Spans that share a row nest, and no more rows are used than needed."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.timeline.perfetto.track_rows import assign_rows, is_nested

spans_of_lanes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=25
)


def cross(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two spans overlap without one holding the other."""
    (_, end), (second, last) = sorted([a, b], key=lambda span: (span[0], -span[1]))
    return second < end < last


@given(spans_of_lanes)
def test_no_two_spans_of_a_row_cross(spans: list[tuple[int, int, int]]) -> None:
    lane, start, duration = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    placed = assign_rows(lane, start, duration)
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at, row in zip(placed.order, placed.row, strict=True):
        begin = int(start[at])
        rows.setdefault((int(lane[at]), int(row)), []).append((begin, begin + int(duration[at])))
    assert not any(cross(a, b) for row in rows.values() for a, b in combinations(row, 2))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=15))
def test_nests_says_whether_any_two_cross(spans: list[tuple[int, int]]) -> None:
    ordered = sorted(
        ((start, start + length) for start, length in spans), key=lambda s: (s[0], -s[1])
    )
    start, end = np.array(ordered, dtype=np.int64).reshape(-1, 2).T
    assert is_nested(start, end) == (not any(cross(a, b) for a, b in combinations(ordered, 2)))


def test_call_stack_stays_in_one_row() -> None:
    start, end = np.array([[0, 0, 2, 5, 12], [10, 4, 3, 9, 20]])
    placed = assign_rows(np.zeros(5, dtype=np.int64), start, end - start)
    assert placed.row.tolist() == [0, 0, 0, 0, 0]


def test_overlapping_span_gets_the_next_row_and_later_ones_return_to_the_first() -> None:
    start, end = np.array([[0, 5, 12], [10, 15, 20]])
    placed = assign_rows(np.zeros(3, dtype=np.int64), start, end - start)
    assert placed.row.tolist() == [0, 1, 0]


def test_parent_is_drawn_before_the_child_that_starts_with_it() -> None:
    placed = assign_rows(np.zeros(2, dtype=np.int64), np.array([0, 0]), np.array([3, 9]))
    assert placed.order.tolist() == [1, 0]
