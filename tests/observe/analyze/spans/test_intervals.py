"""Intervals follow the laws of sets, checked against sets of single moments."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import (
    COMMUNICATION,
    COMPUTE,
    Intervals,
    clip,
    find_gaps,
    intersect,
    measure_covered_ns,
    measure_total_ns,
    subtract,
    union,
)
from tests.observe.analyze.traces import collective, copy, host, kernel, timeline

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12)
Pairs = list[tuple[int, int]]


def _union(spans: Pairs) -> Intervals:
    start = np.array([first for first, _ in spans], dtype=np.int64)
    length = np.array([size for _, size in spans], dtype=np.int64)
    return union(start, start + length)


def _moments(intervals: Intervals) -> set[int]:
    pairs = zip(intervals.start.tolist(), intervals.end.tolist(), strict=True)
    return {moment for first, last in pairs for moment in range(first, last)}


def _is_tidy(intervals: Intervals) -> bool:
    return bool(
        np.all(intervals.end > intervals.start) and np.all(intervals.start[1:] > intervals.end[:-1])
    )


@given(SPANS)
def test_union_covers_exactly_what_any_span_covers(spans: Pairs) -> None:
    merged = _union(spans)
    assert _moments(merged) == {t for first, size in spans for t in range(first, first + size)}
    assert _is_tidy(merged)


@given(SPANS)
def test_measure_counts_each_moment_once(spans: Pairs) -> None:
    assert measure_total_ns(_union(spans)) == len(_moments(_union(spans)))


@given(SPANS, SPANS)
def test_intersect_is_what_both_cover(a: Pairs, b: Pairs) -> None:
    both = intersect(_union(a), _union(b))
    assert _moments(both) == _moments(_union(a)) & _moments(_union(b))
    assert _is_tidy(both)


@given(SPANS, SPANS)
def test_subtract_is_what_only_the_first_covers(a: Pairs, b: Pairs) -> None:
    rest = subtract(_union(a), _union(b))
    assert _moments(rest) == _moments(_union(a)) - _moments(_union(b))
    assert _is_tidy(rest)


@given(SPANS, SPANS)
def test_a_part_and_its_rest_add_up(a: Pairs, b: Pairs) -> None:
    whole, other = _union(a), _union(b)
    shared, rest = intersect(whole, other), subtract(whole, other)
    assert measure_total_ns(shared) + measure_total_ns(rest) == measure_total_ns(whole)


@given(SPANS, st.integers(0, 20), st.integers(20, 50))
def test_gaps_are_the_rest_of_the_window(spans: Pairs, low: int, high: int) -> None:
    merged = _union(spans)
    assert _moments(find_gaps(merged, (low, high))) == set(range(low, high)) - _moments(merged)


@given(SPANS, st.integers(0, 20), st.integers(20, 50))
def test_clip_keeps_what_is_inside_the_window(spans: Pairs, low: int, high: int) -> None:
    merged = _union(spans)
    assert _moments(clip(merged, (low, high))) == _moments(merged) & set(range(low, high))


@given(SPANS, SPANS)
def test_covered_counts_per_span(a: Pairs, b: Pairs) -> None:
    merged = _union(a)
    start = np.array([first for first, _ in b], dtype=np.int64)
    end = start + np.array([size for _, size in b], dtype=np.int64)
    expected = [len(_moments(merged) & set(range(f, f + s))) for f, s in b]
    assert measure_covered_ns(merged, start, end).tolist() == expected


def test_device_work_is_told_by_kind_and_process() -> None:
    spans = find_device_spans(
        timeline(
            host(0, 90, "aten::mm"),
            host(0, 9, "mark", process="gpu 0", lane="stream 7 marks"),
            kernel(30, 40),
            collective(10, 20),
            copy(5, 6),
        )
    )
    assert spans.start.tolist() == [5, 10, 30]
    assert spans.lanes == ("gpu 0 stream 7", "gpu 0 stream 20")
    assert measure_total_ns(spans.intervals_of(COMPUTE)) == 10
    assert measure_total_ns(spans.intervals_of(COMPUTE, COMMUNICATION)) == 20
    assert spans.window_ns == (5, 40)


def test_a_rank_without_gpu_works_on_its_other_processes() -> None:
    spans = find_device_spans(timeline(host(3, 8, "matmul", kind="compute")))
    assert spans.window_ns == (3, 8)
