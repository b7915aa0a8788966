"""A collective is sweeps of moves; a sweep is one step repeated with what changes."""

import pickle

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import (
    ChunkMoves,
    Collective,
    CollectiveBuilder,
    SweepShift,
    build_algorithm,
)
from meshwright.policy.collective.builder import check_ring_order


def slots_by_step(collective: Collective) -> list[list[tuple[int, int]]]:
    """Return (source slot, target slot) of the moves of every step."""
    return [
        list(zip(moves.src_slot.tolist(), moves.dst_slot.tolist(), strict=True))
        for _, moves in collective.iterate_steps()
    ]


def test_slots_go_around_in_blocks() -> None:
    flow = CollectiveBuilder("mine", "all_reduce", ranks=2, chunks=6)
    with flow.sweep(4, shift=-1, wrap=3):
        flow.add(0, 1, chunk=1)
        flow.add(1, 0, chunk=4)
    assert slots_by_step(flow.build()) == [
        [(1, 1), (4, 4)],
        [(0, 0), (3, 3)],
        [(2, 2), (5, 5)],
        [(1, 1), (4, 4)],
    ]


def test_receivers_go_around_in_blocks() -> None:
    flow = CollectiveBuilder("mine", "all_gather", ranks=6, chunks=6)
    with flow.sweep(3, dst_shift=1, dst_wrap=3):
        flow.copy(4, 5, chunk=4)
    assert [moves.dst.tolist() for _, moves in flow.build().iterate_steps()] == [[5], [3], [4]]


def test_the_slot_that_is_written_may_change_otherwise() -> None:
    flow = CollectiveBuilder("mine", "all_to_all", ranks=3, chunks=3)
    with flow.sweep(2, shift=1, arrival_shift=0):
        flow.copy(0, 1, chunk=1, to=flow.output)
    assert slots_by_step(flow.build()) == [[(1, 3)], [(2, 3)]]


def test_rows_join_in_their_phase_and_are_made_as_often_as_the_others() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=3, chunks=2)
    with flow.sweep(2, shift=1, wrap=0):
        flow.copy(0, 1, chunk=0)
        flow.copy(1, 2, chunk=0, phase=1)
    stream = flow.build()
    assert stream.steps == 3
    assert stream.moves == 4
    sent = [
        [(s, int(c)) for s, c in zip(m.src, m.src_slot, strict=True)]
        for _, m in stream.iterate_steps()
    ]
    assert sent == [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]


def test_slots_are_numbered_along_an_order() -> None:
    flow = CollectiveBuilder("mine", "all_gather", ranks=4, chunks=4)
    with flow.sweep(3, shift=1, order=[2, 0, 3, 1]):
        flow.copy(0, 1, chunk=1)
    assert slots_by_step(flow.build()) == [[(0, 0)], [(3, 3)], [(1, 1)]]


def test_runs_of_slots_go_along_the_order_and_end_beyond_it() -> None:
    flow = CollectiveBuilder("mine", "all_gather", ranks=4, chunks=4)
    room = flow.allocate_scratch(3)
    with flow.step_in_order([2, 0, 3, 1]):
        flow.copy(0, 1, chunk=1, to=room, count=3)
    assert slots_by_step(flow.build()) == [[(0, 4), (3, 5), (1, 6)]]


def test_a_shift_names_the_slots_of_rows() -> None:
    rows = ChunkMoves(np.array([[0, 1, 0, 1, 2, 0, 0, 0]], dtype=np.int32))
    named = SweepShift(slot_order=(5, 3, 4)).resolve_slot_order(rows)
    assert named.table[:, 2:5].tolist() == [[5, 3, 1], [3, 4, 1]]
    assert SweepShift().resolve_slot_order(rows) == rows


def test_one_step_is_what_the_walk_gives() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=3, chunks=4)
    with flow.sweep(4, shift=1, order=[3, 1, 0, 2]):
        flow.copy(0, 1, chunk=0)
        flow.copy(1, 2, chunk=0, phase=2)
    sweep = flow.build().sweeps[0]
    assert [sweep.get_moves(step) for step in range(sweep.steps)] == list(sweep.iterate_steps())


def test_a_step_cannot_be_opened_inside_another() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=3, chunks=1)
    with flow.step():
        flow.copy(0, 1, chunk=0)
        with pytest.raises(ValueError, match="inside another"):
            flow.step().__enter__()


def test_an_order_that_leaves_a_rank_out_is_refused() -> None:
    with pytest.raises(InputError, match="name the ranks 0 to 2"):
        check_ring_order([0, 1, 1], 3)


def test_moves_of_a_finished_collective_cannot_be_changed() -> None:
    ring = build_algorithm("ring", "all_reduce", 4)
    for made in (ring, pickle.loads(pickle.dumps(ring))):
        with pytest.raises(ValueError, match="read-only"):
            made.sweeps[0].moves.table[0, 0] = 1


def test_a_value_of_too_many_moves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.policy.collective.builder.MAX_ROWS", 2)
    flow = CollectiveBuilder("mine", "broadcast", ranks=4, chunks=1)
    with flow.step():
        flow.copy(0, 1, chunk=0)
        flow.copy(0, 2, chunk=0)
    with pytest.raises(InputError, match="mine over 4 ranks takes more than 2"), flow.step():
        flow.copy(0, 3, chunk=0)


def test_a_slot_beyond_32_bits_is_refused() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=2, chunks=1)
    with pytest.raises(InputError, match="which 32 bits do not hold"), flow.step():
        flow.copy(0, 1, chunk=2**31)


def test_a_move_outside_a_step_is_refused() -> None:
    builder = CollectiveBuilder("mine", "all_reduce", ranks=2, chunks=1)
    with pytest.raises(ValueError, match="belong to a step"):
        builder.add(1, 0, chunk=0)
