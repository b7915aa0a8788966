"""The spans around a moment are found at every depth, against a search that looks at all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.analyze.spans.call_stacks import (
    build_call_stacks,
    find_enclosing,
    find_innermost,
)

Tree = list[tuple[int, int, int]]


@st.composite
def nested(draw: st.DrawFn) -> Tree:
    """Spans (thread, start, end) of two threads, each inside or apart from the others."""
    found: Tree = []

    def fill(thread: int, low: int, high: int, depth: int) -> None:
        while depth < 4 and high - low >= 2 and draw(st.booleans()):
            start = draw(st.integers(low, high - 1))
            end = draw(st.integers(start + 1, high))
            found.append((thread, start, end))
            fill(thread, start, end, depth + 1)
            low = end

    for thread in (0, 3):
        fill(thread, 0, 40, 0)
    return draw(st.permutations(found))


@given(nested(), st.lists(st.tuples(st.sampled_from([0, 1, 3]), st.integers(0, 40)), min_size=1))
def test_enclosing_spans_are_all_that_hold_the_moment(
    spans: Tree, asked: list[tuple[int, int]]
) -> None:
    lane, start, end = (np.array([s[i] for s in spans], dtype=np.int64) for i in range(3))
    threads, moments = (np.array([q[i] for q in asked], dtype=np.int64) for i in range(2))
    tree = build_call_stacks(lane, start, end)
    levels = find_enclosing(tree, threads, moments)
    inner = find_innermost(tree, threads, moments)
    for number, (thread, moment) in enumerate(asked):
        around = {i for i, (on, s, e) in enumerate(spans) if on == thread and s <= moment < e}
        found = [int(level[number]) for level in levels if level[number] >= 0]
        assert set(found) == around
        lengths = [end[i] - start[i] for i in found]
        assert lengths == sorted(lengths, reverse=True)
        assert inner[number] == (found[-1] if found else -1)
