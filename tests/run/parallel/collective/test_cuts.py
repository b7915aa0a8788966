"""Where chunks lie in tensors of any size."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.collective import build
from meshwright.run.parallel.collective.cuts import (
    Cuts,
    cut,
    in_place_elements,
    message_elements,
)


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_parts_cover_everything_once_and_differ_little(elements: int, parts: int) -> None:
    edges = cut(elements, parts)
    assert edges[0] == 0
    assert edges[-1] == elements
    lengths = [end - begin for begin, end in itertools.pairwise(edges)]
    assert max(lengths) - min(lengths) <= (64 * 2 if elements >= 1024 * parts else 1)


def test_chunks_of_a_split_message_never_cross_from_one_rank_to_the_next() -> None:
    cuts = Cuts(build("ring", "all_gather", 3, channels=2), 21)
    assert [cuts.start(chunk) for chunk in range(6)] == [0, 3, 7, 10, 14, 17]
    assert [cuts.length(chunk) for chunk in range(6)] == [3, 4, 3, 4, 3, 4]


def test_message_that_is_not_equal_parts_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(InputError, match=r"10 elements on rank 1 .* such as 12"):
        in_place_elements(build("ring", "reduce_scatter", 3), 1, 10)


def test_chunks_of_an_uneven_exchange_have_one_size() -> None:
    uneven = build("pairwise", "all_to_all_v", 2, counts=[[1, 2], [0, 1]])
    assert message_elements(uneven, 0, 12, None, None) == 4
    with pytest.raises(InputError, match="3 equal chunks"):
        message_elements(uneven, 0, 11, None, None)


def test_rank_without_chunks_must_say_how_large_they_are() -> None:
    lonely = build("pairwise", "all_to_all_v", 2, counts=[[1, 0], [0, 0]])
    assert message_elements(lonely, 1, 0, 0, 5) == 5
    with pytest.raises(InputError, match="chunk_elements"):
        message_elements(lonely, 1, 0, 0, None)
