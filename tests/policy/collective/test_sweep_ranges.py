"""Numbers that mean nothing, or that leave 32 bits, are refused before a step is made."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.collective import (
    ChunkMoves,
    Collective,
    Sweep,
    build_algorithm,
    verify_collective,
)
from meshwright.policy.collective.collective import SweepShift
from meshwright.policy.collective.contract import find_shape_problems
from meshwright.policy.collective.rank_program import list_moves
from meshwright.policy.collective.sweep_ranges import MAX_COLUMN_VALUE, is_within_bounds
from meshwright.policy.collective.verification.step_hazards import (
    find_first_out_of_bounds,
    find_out_of_bounds,
)

FINE = (0, 1, 0, 0, 1, 0, 0, 0)


def broadcast(*rows: tuple[int, ...], span: int = 1, slots: int = 3, **shift: Any) -> Collective:
    """Two ranks and three chunks; rows as in `COLUMNS`."""
    table = np.array(rows, dtype=np.int32).reshape(-1, 8)
    sweep = Sweep(moves=ChunkMoves(table), span=span, shift=SweepShift(**shift))
    return Collective(name="mine", op="broadcast", ranks=2, chunks=3, slots=slots, sweeps=(sweep,))


@pytest.mark.parametrize(
    ("collective", "where", "what"),
    [
        (broadcast(FINE, span=0), "sweeps[0].span", "0 repetitions"),
        (broadcast(FINE, span=-3), "sweeps[0].span", "-3 repetitions"),
        (broadcast(FINE, span=10**9), "sweeps[0].span", "1000000000 repetitions"),
        (broadcast(FINE, (0, 1, 0, 0, 0, 0, 0, 0)), "sweeps[0].moves[1]", "count 0"),
        (broadcast((0, 1, 0, 0, -1, 0, 0, 0), slot_order=(1, 0)), "sweeps[0].moves[0]", "count -1"),
        (
            broadcast((0, 1, 0, 0, MAX_COLUMN_VALUE, 0, 0, 0), slot_order=(1, 0)),
            "sweeps[0].moves[0]",
            "count",
        ),
        (
            broadcast((0, 1, 1, 1, MAX_COLUMN_VALUE, 0, 0, 0)),
            "sweeps[0].moves[0]",
            f"count {MAX_COLUMN_VALUE}",
        ),
        (broadcast((0, 1, 0, 0, 1, 2, 0, 0)), "sweeps[0].moves[0]", "adds 2"),
        (broadcast((0, 1, 0, 0, 1, 0, -3, 0)), "sweeps[0].moves[0]", "channel -3"),
        (broadcast((0, 1, 0, 0, 1, 0, 0, -1)), "sweeps[0].moves[0]", "phase -1"),
        (broadcast((0, 1, 0, 0, 1, 0, 0, 10**7)), "sweeps[0].moves[0]", "phase 10000000"),
        (broadcast(FINE, slot_wrap=-1), "sweeps[0].shift.slot_wrap", "-1 is out of range"),
        (broadcast(FINE, dst=1, dst_wrap=-2), "sweeps[0].shift.dst_wrap", "-2 is out of range"),
        (broadcast(FINE, src_slot=10**30), "sweeps[0].shift.src_slot", "is out of range"),
        (broadcast(FINE, slot_order=(0, -1)), "sweeps[0].shift.slot_order", "no slot -1"),
        (
            broadcast(FINE, span=3, src_slot=2**30),
            "sweeps[0].shift",
            "src_slot comes to 2147483648",
        ),
        (broadcast(FINE, span=9, dst=-(2**30)), "sweeps[0].shift", "dst comes to -8589934591"),
        (broadcast(FINE, slots=10**30), "slots", "too large"),
        (msgspec.structs.replace(broadcast(FINE), ranks=10**12), "ranks", "too large"),
    ],
)
def test_strange_numbers_are_refused_with_their_place(
    collective: Collective, where: str, what: str
) -> None:
    proof = verify_collective(collective)
    assert not proof.is_correct
    assert proof.problems[0].where == where
    assert what in proof.problems[0].what
    assert proof.problems[0].fix


def test_steps_of_all_sweeps_are_bounded_together() -> None:
    one = broadcast(FINE, span=600_000)
    both = msgspec.structs.replace(one, sweeps=one.sweeps * 2)
    assert find_shape_problems(one) == []
    assert find_shape_problems(both)[0].what == "1,200,000 steps in all"


def test_a_slot_at_the_end_of_the_numbers_is_named() -> None:
    for row, said in (
        ((0, 1, MAX_COLUMN_VALUE, 0, 1, 0, 0, 0), f"rank 0, step 0: reads slot {MAX_COLUMN_VALUE}"),
        (
            (0, 1, 0, MAX_COLUMN_VALUE, 1, 0, 0, 0),
            f"rank 1, step 0: writes slot {MAX_COLUMN_VALUE}",
        ),
    ):
        assert str(verify_collective(broadcast(row)).problems[0]).startswith(said)


def test_counts_beyond_the_numbers_are_refused() -> None:
    many = Collective(
        name="mine",
        op="all_to_all_v",
        ranks=2,
        chunks=1,
        slots=MAX_COLUMN_VALUE,
        sweeps=(),
        counts=((0, 2**31), (0, 0)),
    )
    assert "2147483648 chunks in all" in verify_collective(many).problems[0].what


def test_what_cannot_be_numbered_is_neither_sound_nor_unsound() -> None:
    large = broadcast(FINE, slots=2**30)
    with pytest.raises(InputError, match="2,147,483,648 slots are more than can be told apart"):
        verify_collective(large)


@pytest.mark.parametrize("shift", [2**30, 2**30 + 2, 2**31 - 1, -(2**30) - 1, -(2**31) + 1])
def test_a_large_shift_goes_around_a_block_as_what_is_left_of_it(shift: int) -> None:
    large = broadcast(FINE, span=7, src_slot=shift, dst_slot=shift, slot_wrap=3)
    small = broadcast(FINE, span=7, src_slot=shift % 3, dst_slot=shift % 3, slot_wrap=3)
    assert [moves for _, moves in large.iterate_steps()] == [
        moves for _, moves in small.iterate_steps()
    ]
    assert (
        verify_collective(large).is_correct
        == verify_collective(small).is_correct
        == (shift % 3 != 0)
    )
    # What is proved is what ranks are told to do.
    _, told = list_moves(large, 1)
    assert told.tolist() == [
        row for _, moves in large.iterate_steps() for row in moves.table.tolist()
    ]


numbers = st.integers(-2, 7)


@given(data=st.data())
def test_what_is_said_to_stay_inside_does(data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.integers(0, 2),
                numbers,
                numbers,
                st.integers(1, 3),
                st.just(0),
                st.just(0),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=3,
        )
    )
    shift = {name: data.draw(st.integers(-5, 5)) for name in ("src_slot", "dst_slot", "dst")}
    wraps = {name: data.draw(st.integers(0, 6)) for name in ("slot_wrap", "dst_wrap")}
    order = data.draw(st.sampled_from([(), (1, 0), (3, 1, 4, 0, 2), (0, 5)]))
    span = data.draw(st.integers(1, 5))
    flow = broadcast(*rows, span=span, slots=5, slot_order=order, **shift, **wraps)
    seen = [
        find_out_of_bounds(flow, step, moves) for step, moves in flow.iterate_steps() if len(moves)
    ]
    first = next((problem for problem in seen if problem is not None), None)
    assert find_first_out_of_bounds(flow) == first
    assert first is None or not is_within_bounds(flow)


def test_a_ring_is_known_to_stay_inside_without_being_walked() -> None:
    assert is_within_bounds(build_algorithm("ring", "all_reduce", 64, channels=4))
    assert is_within_bounds(build_algorithm("two_level", "all_reduce", 64, per_node=8))
