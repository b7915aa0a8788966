"""A message of any size is cut into chunks, by one rule for everyone who executes it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.collective import build_algorithm
from meshwright.policy.collective.chunk_edges import (
    ALIGNMENT_ELEMENTS,
    count_in_place_elements,
    count_message_elements,
    list_chunk_edges,
    split_evenly,
)


def lengths(elements: int, pieces: int) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(split_evenly(elements, pieces))]


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_pieces_cover_everything_once_and_differ_little(elements: int, pieces: int) -> None:
    edges = split_evenly(elements, pieces)
    assert (edges[0], edges[-1]) == (0, elements)
    found = lengths(elements, pieces)
    assert min(found) >= 0
    assert max(found) - min(found) <= (
        2 * ALIGNMENT_ELEMENTS if elements >= 16 * ALIGNMENT_ELEMENTS * pieces else 1
    )


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_no_piece_outgrows_an_equal_share_in_whole_lines(elements: int, pieces: int) -> None:
    assert (
        max(lengths(elements, pieces))
        <= -(-elements // (pieces * ALIGNMENT_ELEMENTS)) * ALIGNMENT_ELEMENTS
    )


@given(st.integers(16, 200), st.integers(1, 64))
def test_long_pieces_begin_at_whole_lines(lines: int, pieces: int) -> None:
    assert all(
        edge % ALIGNMENT_ELEMENTS == 0
        for edge in split_evenly(lines * ALIGNMENT_ELEMENTS * pieces + 3, pieces)[:-1]
    )
    assert set(lengths(lines * ALIGNMENT_ELEMENTS * pieces, pieces)) == {lines * ALIGNMENT_ELEMENTS}


def test_short_messages_are_cut_to_the_element() -> None:
    assert lengths(10, 3) == [4, 3, 3]
    assert lengths(2, 4) == [1, 0, 1, 0]


def test_chunks_of_a_split_message_are_cut_within_the_part_of_a_rank() -> None:
    assert list_chunk_edges(build_algorithm("ring", "all_gather", 3, channels=2), 21) == (0, 4, 7)


def test_message_that_is_not_equal_parts_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(InputError, match=r"10 elements on rank 1 .* such as 12"):
        count_in_place_elements(build_algorithm("ring", "reduce_scatter", 3), 1, 10)


def test_chunks_of_an_uneven_exchange_have_one_size() -> None:
    uneven = build_algorithm("pairwise", "all_to_all_v", 2, counts=[[1, 2], [0, 1]])
    assert count_message_elements(uneven, 0, given=12) == 4
    with pytest.raises(InputError, match="3 equal chunks"):
        count_message_elements(uneven, 0, given=11)


def test_rank_without_chunks_must_say_how_large_they_are() -> None:
    lonely = build_algorithm("pairwise", "all_to_all_v", 2, counts=[[1, 0], [0, 0]])
    assert count_message_elements(lonely, 1, given=0, wanted=0, chunk=5) == 5
    with pytest.raises(InputError, match="chunk_elements"):
        count_message_elements(lonely, 1, given=0, wanted=0)
