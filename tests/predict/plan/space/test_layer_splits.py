"""Layers over the chunks of a pipeline, against every way to cut them."""

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.plan.space.layer_splits import split_balanced, split_evenly

costs = st.lists(st.integers(1, 200), min_size=1, max_size=9)
"""As the planner rounds them: whole parts of a mean layer."""
ends = st.integers(0, 600)


def largest(row: list[int], split: tuple[int, ...], first: int, last: int) -> int:
    """Return the largest cost of a chunk."""
    cuts = [0, *accumulate(split)]
    sums = [sum(row[a:b]) for a, b in pairwise(cuts)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@given(costs, st.integers(1, 9), ends, ends)
def test_no_split_has_a_smaller_largest_chunk(
    row: list[int], chunks: int, first: int, last: int
) -> None:
    chunks = min(chunks, len(row))
    found = split_balanced(row, chunks, first, last)
    every = [
        tuple(b - a for a, b in pairwise((0, *cuts, len(row))))
        for cuts in combinations(range(1, len(row)), chunks - 1)
    ]
    assert found in every
    assert largest(row, found, first, last) == min(
        largest(row, split, first, last) for split in every
    )


@given(st.integers(1, 40), st.integers(1, 40))
def test_light_ends_are_as_even_as_layers_go(layers: int, chunks: int) -> None:
    chunks = min(chunks, layers)
    split = split_evenly(layers, chunks)
    assert sum(split) == layers
    assert len(split) == chunks
    assert max(split) - min(split) <= 1
    if layers % chunks:
        # The last chunk holds the head and is short before any other.
        assert split[-1] == min(split)


def test_llama_405b_is_divided_as_it_was_trained() -> None:
    assert split_evenly(126, 16) == (7, *14 * (8,), 7)
