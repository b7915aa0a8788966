"""A message of any size is cut into chunks, by one rule for everyone who executes it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.collective import build
from meshwright.policy.collective.chunking import (
    LINE,
    cut,
    in_place_elements,
    message_elements,
    part_edges,
)


def lengths(elements: int, pieces: int) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(cut(elements, pieces))]


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_pieces_cover_everything_once_and_differ_little(elements: int, pieces: int) -> None:
    edges = cut(elements, pieces)
    assert (edges[0], edges[-1]) == (0, elements)
    found = lengths(elements, pieces)
    assert min(found) >= 0
    assert max(found) - min(found) <= (2 * LINE if elements >= 16 * LINE * pieces else 1)


@given(st.integers(0, 100_000), st.integers(1, 64))
def test_no_piece_outgrows_an_equal_share_in_whole_lines(elements: int, pieces: int) -> None:
    assert max(lengths(elements, pieces)) <= -(-elements // (pieces * LINE)) * LINE


@given(st.integers(16, 200), st.integers(1, 64))
def test_long_pieces_begin_at_whole_lines(lines: int, pieces: int) -> None:
    assert all(edge % LINE == 0 for edge in cut(lines * LINE * pieces + 3, pieces)[:-1])
    assert set(lengths(lines * LINE * pieces, pieces)) == {lines * LINE}


def test_short_messages_are_cut_to_the_element() -> None:
    assert lengths(10, 3) == [4, 3, 3]
    assert lengths(2, 4) == [1, 0, 1, 0]


def test_chunks_of_a_split_message_are_cut_within_the_part_of_a_rank() -> None:
    assert part_edges(build("ring", "all_gather", 3, channels=2), 21) == (0, 4, 7)


def test_message_that_is_not_equal_parts_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(InputError, match=r"10 elements on rank 1 .* such as 12"):
        in_place_elements(build("ring", "reduce_scatter", 3), 1, 10)


def test_chunks_of_an_uneven_exchange_have_one_size() -> None:
    uneven = build("pairwise", "all_to_all_v", 2, counts=[[1, 2], [0, 1]])
    assert message_elements(uneven, 0, given=12) == 4
    with pytest.raises(InputError, match="3 equal chunks"):
        message_elements(uneven, 0, given=11)


def test_rank_without_chunks_must_say_how_large_they_are() -> None:
    lonely = build("pairwise", "all_to_all_v", 2, counts=[[1, 0], [0, 0]])
    assert message_elements(lonely, 1, given=0, wanted=0, chunk=5) == 5
    with pytest.raises(InputError, match="chunk_elements"):
        message_elements(lonely, 1, given=0, wanted=0)
