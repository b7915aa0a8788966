"""Lowering: which tasks a step becomes, and how many elements they move."""

import numpy as np

from meshwright.policy.collective import Collective, CollectiveBuilder, build_algorithm
from meshwright.run.kernels.collective.buffer_layout import make_buffer_layout
from meshwright.run.kernels.collective.kernel_program import (
    ELEMENTS,
    FIRST_TILE,
    MORE,
    SECOND_SOURCE,
    SOURCE,
    SOURCES,
    TARGET,
    TARGETS,
    KernelProgram,
    lower_to_kernel,
)


def _lowered(collective: Collective, elements: int, tile: int = 16) -> KernelProgram:
    return lower_to_kernel(collective, make_buffer_layout(collective, elements), tile=tile)


def _through_a_switch(ranks: int, chunks: int) -> Collective:
    builder = CollectiveBuilder(
        "switch", "all_reduce", ranks=ranks, chunks=chunks, switches=("nvswitch0",)
    )
    with builder.step():
        for rank in range(ranks):
            builder.add(rank, ranks, chunk=0, count=chunks)
    with builder.step():
        for rank in range(ranks):
            builder.copy(ranks, rank, chunk=0, count=chunks)
    return builder.build()


def test_an_add_reads_two_places_and_writes_one_of_them() -> None:
    program = _lowered(build_algorithm("ring", "reduce_scatter", 2), 32)
    assert program.steps == 1
    assert program.tasks[:, SOURCES].tolist() == [2, 2]
    assert program.tasks[:, SOURCE].tolist() == program.tasks[:, TARGET].tolist()
    assert set(program.tasks[:, SECOND_SOURCE].tolist()).isdisjoint(program.tasks[:, TARGET])
    assert (program.step_reads.tolist(), program.step_writes.tolist()) == ([64], [32])


def test_a_copy_reads_and_writes_each_element_once() -> None:
    program = _lowered(build_algorithm("ring", "all_gather", 2), 32)
    assert program.tasks[:, SOURCES].tolist() == [1, 1]
    assert program.elements_moved == 2 * 32


def test_what_a_switch_adds_up_is_one_task_and_its_old_content_counts_for_nothing() -> None:
    program = _lowered(_through_a_switch(ranks=5, chunks=1), 16)
    reduction, multicast = program.tasks
    assert (reduction[SOURCES], reduction[TARGETS]) == (5, 1)
    assert reduction[TARGET] not in [reduction[SOURCE], reduction[SECOND_SOURCE]]
    first = int(reduction[MORE])
    assert program.more[first : first + 3].tolist() == [32, 48, 64]
    assert (multicast[SOURCES], multicast[TARGETS]) == (1, 5)
    assert program.step_reads.tolist() == [5 * 16, 16]
    assert program.step_writes.tolist() == [16, 5 * 16]


def test_full_slots_in_a_row_are_moved_as_one() -> None:
    program = _lowered(_through_a_switch(ranks=2, chunks=4), 4 * 16)
    assert program.tasks[:, ELEMENTS].tolist() == [64, 64]
    assert program.task_of_tile.tolist() == [0] * 4 + [1] * 4


def test_slots_with_gaps_are_moved_one_by_one() -> None:
    program = _lowered(_through_a_switch(ranks=2, chunks=4), 4 * 15)
    assert len(program.tasks) == 2 * 4
    assert program.step_writes.tolist() == [60, 120]


def test_slots_of_two_places_are_never_joined() -> None:
    builder = CollectiveBuilder("swap", "send_recv", ranks=2, chunks=1, peers=(1, 0))
    with builder.step():
        builder.copy(0, 1, chunk=0, to=1)
        builder.copy(1, 0, chunk=0, to=1)
    assert len(_lowered(builder.build(), 16).tasks) == 2


def test_empty_chunks_move_nothing() -> None:
    program = _lowered(build_algorithm("ring", "all_reduce", 4), 2)
    assert program.step_writes.sum() == 2 * 3 * 2


def test_every_tile_lies_in_its_task_and_every_element_in_one_tile() -> None:
    collective = build_algorithm("double_tree", "all_reduce", 6, pieces=3)
    program = _lowered(collective, 1000, tile=32)
    tiles = np.arange(len(program.task_of_tile))
    inside = tiles - program.tasks[program.task_of_tile, FIRST_TILE]
    assert inside.min() == 0
    assert (inside * 32 < program.tasks[program.task_of_tile, ELEMENTS]).all()
    counts = np.bincount(program.task_of_tile)
    assert (counts * 32 >= program.tasks[:, ELEMENTS]).all()
    assert program.step_tiles[-1] == len(tiles)


def test_traffic_of_a_ring_is_the_textbook_one() -> None:
    # Each rank receives 2(n − 1)/n of the message: half of that is added (2 reads, 1 write), half
    # copied (1 read, 1 write).
    ranks, elements = 8, 8 * 64
    program = _lowered(build_algorithm("ring", "all_reduce", ranks), elements)
    assert program.elements_moved == ranks * (ranks - 1) * elements // ranks * (3 + 2)
