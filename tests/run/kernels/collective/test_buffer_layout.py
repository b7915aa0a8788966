"""Where chunks lie: uneven messages, slots that kernels like, and what is refused."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import CollectiveBuilder, build_algorithm
from meshwright.run.kernels.collective.buffer_layout import (
    ALIGN,
    list_input_pieces,
    list_output_pieces,
    make_buffer_layout,
)


def test_chunks_differ_by_an_element_and_may_be_empty() -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    assert make_buffer_layout(ring, 10).chunk_elements.tolist() == [3, 2, 3, 2]
    assert make_buffer_layout(ring, 2).chunk_elements.tolist() == [1, 0, 1, 0]


def test_parts_of_ranks_are_equal_and_are_cut_each_for_itself() -> None:
    halves = CollectiveBuilder("halves", "reduce_scatter", ranks=2, chunks=4).build()
    assert make_buffer_layout(halves, 10).chunk_elements.tolist() == [3, 2, 3, 2]


def test_chunks_of_an_uneven_exchange_are_whole() -> None:
    uneven = build_algorithm("pairwise", "all_to_all_v", 2, counts=[[1, 2], [2, 1]])
    assert make_buffer_layout(uneven, 3 * 300).chunk_elements.tolist() == [300, 300, 300]


def test_slots_begin_at_full_width_accesses() -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    assert make_buffer_layout(ring, 4 * ALIGN).slot_elements == ALIGN
    assert make_buffer_layout(ring, 4 * ALIGN + 1).slot_elements == 2 * ALIGN


def test_pieces_of_a_message_cover_it_once() -> None:
    gather = build_algorithm("ring", "all_gather", 3)
    sizes = make_buffer_layout(gather, 300)
    assert [(each.rank, each.slot) for each in list_input_pieces(gather, sizes)] == [
        (rank, rank) for rank in range(3)
    ]
    for rank in range(3):
        mine = [each for each in list_output_pieces(gather, sizes) if each.rank == rank]
        assert [each.tensor_start for each in mine] == [0, 100, 200]
        assert sum(each.elements for each in mine) == 300


def test_elements_that_ranks_cannot_share_are_refused_with_a_number_that_works() -> None:
    scatter = build_algorithm("ring", "reduce_scatter", 4)
    with pytest.raises(InputError, match="such as 12"):
        make_buffer_layout(scatter, 10)


def test_message_without_elements_is_refused() -> None:
    with pytest.raises(InputError, match="1 or more"):
        make_buffer_layout(build_algorithm("ring", "all_reduce", 2), 0)


def test_slots_too_small_for_a_chunk_are_refused() -> None:
    with pytest.raises(InputError, match="use 32"):
        make_buffer_layout(build_algorithm("ring", "all_reduce", 2), 50, room=16)
