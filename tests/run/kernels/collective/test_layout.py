"""Where chunks lie: uneven messages, slots that kernels like, and what is refused."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Builder, build
from meshwright.run.kernels.collective.layout import ALIGN, given_pieces, layout, wanted_pieces


def test_chunks_differ_by_an_element_and_may_be_empty() -> None:
    ring = build("ring", "all_reduce", 4)
    assert layout(ring, 10).part_elements.tolist() == [3, 2, 3, 2]
    assert layout(ring, 2).part_elements.tolist() == [1, 0, 1, 0]


def test_parts_of_ranks_are_equal_and_are_cut_each_for_itself() -> None:
    halves = Builder("halves", "reduce_scatter", ranks=2, chunks=4).done()
    assert layout(halves, 10).part_elements.tolist() == [3, 2, 3, 2]


def test_chunks_of_an_uneven_exchange_are_whole() -> None:
    uneven = build("pairwise", "all_to_all_v", 2, counts=[[1, 2], [2, 1]])
    assert layout(uneven, 3 * 300).part_elements.tolist() == [300, 300, 300]


def test_slots_begin_at_full_width_accesses() -> None:
    ring = build("ring", "all_reduce", 4)
    assert layout(ring, 4 * ALIGN).room == ALIGN
    assert layout(ring, 4 * ALIGN + 1).room == 2 * ALIGN


def test_pieces_of_a_message_cover_it_once() -> None:
    gather = build("ring", "all_gather", 3)
    sizes = layout(gather, 300)
    assert [(each.rank, each.slot) for each in given_pieces(gather, sizes)] == [
        (rank, rank) for rank in range(3)
    ]
    for rank in range(3):
        mine = [each for each in wanted_pieces(gather, sizes) if each.rank == rank]
        assert [each.tensor_start for each in mine] == [0, 100, 200]
        assert sum(each.elements for each in mine) == 300


def test_elements_that_ranks_cannot_share_are_refused_with_a_number_that_works() -> None:
    scatter = build("ring", "reduce_scatter", 4)
    with pytest.raises(InputError, match="such as 12"):
        layout(scatter, 10)


def test_message_without_elements_is_refused() -> None:
    with pytest.raises(InputError, match="1 or more"):
        layout(build("ring", "all_reduce", 2), 0)


def test_slots_too_small_for_a_chunk_are_refused() -> None:
    with pytest.raises(InputError, match="use 32"):
        layout(build("ring", "all_reduce", 2), 50, room=16)
