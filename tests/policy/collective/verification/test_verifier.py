"""`verify_collective` proves correct collectives, and names rank, step and chunk of a fault."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.collective import (
    ChunkMoves,
    Collective,
    CollectiveBuilder,
    CollectiveOp,
    Sweep,
    build_algorithm,
    verify_collective,
)
from meshwright.policy.collective.collective import (
    ADDS,
    COUNT,
    DST,
    DST_SLOT,
    SRC_SLOT,
    Ints,
)
from tests.policy.collective.counting import sound

Tables = list[Ints]


def steps_of(collective: Collective) -> Tables:
    """Return the moves of every step."""
    return [moves.table.copy() for _, moves in collective.iterate_steps()]


def with_steps(collective: Collective, tables: Tables) -> Collective:
    """Return a collective with other moves."""
    sweeps = []
    for table in tables:
        plain = np.array(table, dtype=np.int32).reshape(-1, 8)
        plain[:, 7] = 0
        sweeps.append(Sweep(moves=ChunkMoves(plain)))
    return msgspec.structs.replace(collective, sweeps=tuple(sweeps))


def refused(collective: Collective, tables: Tables) -> str:
    """Return why a changed collective is refused."""
    proof = verify_collective(with_steps(collective, tables))
    assert not proof.is_correct
    assert len(proof.problems) == 1
    return str(proof.problems[0])


@pytest.fixture
def ring() -> Collective:
    """Four ranks: steps 0 to 2 reduce, steps 3 to 5 gather; rank r sends chunk r first."""
    return build_algorithm("ring", "all_reduce", 4)


def test_a_sound_collective_has_no_problems(ring: Collective) -> None:
    proof = verify_collective(ring)
    assert proof.is_correct
    assert proof.problems == ()
    assert (proof.steps, proof.moves) == (6, 24)
    assert proof.same_on_all_ranks


def test_a_dropped_addition_leaves_a_contribution_out(ring: Collective) -> None:
    tables = steps_of(ring)
    tables[0] = tables[0][1:]
    why = refused(ring, tables)
    assert re.match(r"rank \d, after step 5, chunk 0: ", why)
    assert "lacks chunk 0 of rank 0" in why


def test_a_dropped_copy_leaves_a_partial_sum(ring: Collective) -> None:
    tables = steps_of(ring)
    gone = tables[5][0]
    tables[5] = tables[5][1:]
    why = refused(ring, tables)
    assert why.startswith(f"rank {gone[DST]}, after step 5, chunk {gone[DST_SLOT]}: ")
    assert "lacks" in why


def test_a_repeated_addition_counts_twice(ring: Collective) -> None:
    tables = steps_of(ring)
    tables.insert(1, tables[0][:1])
    assert "counts chunk 0 of rank 0 more than once" in refused(ring, tables)


def test_a_swapped_slot_adds_different_chunks(ring: Collective) -> None:
    tables = steps_of(ring)
    tables[1][2, DST_SLOT] = 0
    why = refused(ring, tables)
    assert why.startswith("rank 3, step 1: adds chunk 1 of rank 2 to chunk 0")


def test_a_copy_into_the_wrong_slot_is_found_at_the_end() -> None:
    gather = build_algorithm("ring", "all_gather", 3)
    tables = steps_of(gather)
    again = tables[1][:1].copy()
    again[0, DST_SLOT] = 1
    why = refused(gather, [*tables, again])
    assert "rank 1, after step 2, chunk 1" in why
    assert "holds chunk 2 of rank 2, which belongs elsewhere" in why


def test_a_shifted_receiver_is_refused(ring: Collective) -> None:
    tables = steps_of(ring)
    tables[2][0, DST] = 2
    why = refused(ring, tables)
    assert re.match(r"rank \d, after step 5, chunk 2: slot 2 lacks chunk 2 of rank 0$", why)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        (DST_SLOT, 9, "rank 1, step 0: writes slot 9 of a buffer of 4 (fix: use 0 to 3)"),
        (SRC_SLOT, -1, "rank 0, step 0: reads slot -1 of a buffer of 4 (fix: use 0 to 3)"),
        (DST, 4, "step 0: a move writes place 4, but there are 4 (fix: use 0 to 3)"),
        (DST, -1, "step 0: a move writes place -1, but there are 4 (fix: use 0 to 3)"),
    ],
)
def test_nothing_is_read_or_written_outside(
    ring: Collective, column: int, value: int, says: str
) -> None:
    tables = steps_of(ring)
    tables[0][0, column] = value
    assert refused(ring, tables) == says


def test_a_run_of_slots_that_ends_outside_is_refused() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=2, chunks=4)
    with flow.step():
        flow.copy(0, 1, chunk=2, count=3)
    why = str(verify_collective(flow.build()).problems[0])
    assert why == "rank 0, step 0: reads slot 4 of a buffer of 4 (fix: use 0 to 3)"


def test_a_move_of_no_slots_is_refused(ring: Collective) -> None:
    tables = steps_of(ring)
    tables[1][0, COUNT] = 0
    assert refused(ring, tables).startswith("sweeps[1].moves[0]: count 0")


def test_a_slot_is_not_read_and_written_in_one_step(ring: Collective) -> None:
    tables = steps_of(ring)
    joined = [np.concatenate(tables[:2]), *tables[2:]]
    why = refused(ring, joined)
    assert "step 0" in why
    assert "in the same step, so it can be overwritten before it is read" in why


def test_a_slot_is_not_written_twice_in_one_step() -> None:
    flow = CollectiveBuilder("mine", "reduce", ranks=3, chunks=1)
    with flow.step():
        flow.add(1, 0, chunk=0)
        flow.add(2, 0, chunk=0)
    why = str(verify_collective(flow.build()).problems[0])
    assert why.startswith("rank 0, step 0: slot 0 is written by rank 1 and by rank 2 in the same")


def test_a_switch_adds_what_arrives_together() -> None:
    flow = CollectiveBuilder("mine", "reduce", ranks=3, chunks=1, switches=["nvswitch0"])
    with flow.step():
        for rank in range(3):
            flow.add(rank, 3, chunk=0)
    with flow.step():
        flow.copy(3, 0, chunk=0)
    assert verify_collective(flow.build()).is_correct


def test_a_switch_does_not_hold_two_copies() -> None:
    flow = CollectiveBuilder("mine", "reduce", ranks=2, chunks=1, switches=["nvswitch0"])
    with flow.step():
        flow.add(0, 2, chunk=0)
        flow.copy(1, 2, chunk=0)
    why = str(verify_collective(flow.build()).problems[0])
    assert why.startswith("nvswitch0, step 0: slot 0 is written by rank 0 and by rank 1")


def test_a_slot_that_holds_nothing_is_not_sent() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=3, chunks=1)
    with flow.step():
        flow.copy(1, 2, chunk=0)
    why = str(verify_collective(flow.build()).problems[0])
    assert why == "rank 1, step 0: sends slot 0 to rank 2, but the slot holds nothing yet"


def test_nothing_is_added_to_a_slot_that_holds_nothing() -> None:
    flow = CollectiveBuilder("mine", "all_reduce", ranks=2, chunks=1)
    room = flow.allocate_scratch(1)
    with flow.step():
        flow.add(0, 1, chunk=0, to=room)
    why = str(verify_collective(flow.build()).problems[0])
    assert why.startswith("rank 1, step 0: adds to slot 1, which holds nothing yet")


def test_a_rank_that_got_nothing_is_named() -> None:
    flow = CollectiveBuilder("mine", "broadcast", ranks=3, chunks=1)
    with flow.step():
        flow.copy(0, 1, chunk=0)
    assert (
        str(verify_collective(flow.build()).problems[0])
        == "rank 2, after step 0, chunk 0: slot 0 holds nothing"
    )


def test_sums_in_another_order_are_sound_but_not_the_same() -> None:
    """Floating-point sums depend on the order, so ranks would differ in the last bits."""
    flow = CollectiveBuilder("mine", "all_reduce", ranks=3, chunks=1)
    table = flow.allocate_scratch(3)
    with flow.step():
        for src in range(3):
            for dst in range(3):
                flow.copy(src, dst, chunk=0, to=table + src)
    with flow.step():
        for rank in range(3):
            flow.copy(rank, rank, chunk=table + rank, to=0)
    for ahead in (1, 2):
        with flow.step():
            for rank in range(3):
                flow.add(rank, rank, chunk=table + (rank + ahead) % 3, to=0)
    proof = verify_collective(flow.build())
    assert proof.is_correct
    assert not proof.same_on_all_ranks


def test_chunks_of_one_rank_in_the_wrong_order_are_refused() -> None:
    """Nothing is added here, so all values are inputs: they still have to be the right ones."""
    flow = CollectiveBuilder("mine", "all_reduce", ranks=1, chunks=2)
    room = flow.allocate_scratch(2)
    with flow.step():
        flow.copy(0, 0, chunk=0, to=room + 1)
        flow.copy(0, 0, chunk=1, to=room)
    with flow.step():
        flow.copy(0, 0, chunk=room, to=0, count=2)
    why = str(verify_collective(flow.build()).problems[0])
    assert why == (
        "rank 0, after step 1, chunk 0: slot 0 lacks chunk 0 of rank 0; holds chunk 1 of rank 0, "
        "which belongs elsewhere"
    )


def _through_switches(ranks: int, *, switches: int, at_once: bool) -> Collective:
    """Every switch adds up all ranks, and gives its sum to the ranks whose turn it is."""
    names = [f"nvswitch{number}" for number in range(switches)]
    flow = CollectiveBuilder("mine", "all_reduce", ranks=ranks, chunks=1, switches=names)
    for group in [range(ranks)] if at_once else [[rank] for rank in range(ranks)]:
        with flow.step():
            for rank in group:
                for switch in range(switches):
                    flow.add(rank, ranks + switch, chunk=0)
    with flow.step():
        for rank in range(ranks):
            flow.copy(ranks + rank % switches, rank, chunk=0)
    return flow.build()


@pytest.mark.parametrize(
    ("ranks", "switches", "at_once", "same"),
    [
        (3, 1, True, True),  # one sum, sent to all
        (3, 2, True, False),  # each switch adds in the order in which values come
        (2, 2, True, True),  # a + b is b + a
        (3, 2, False, True),  # one after the other: the order is known
    ],
)
def test_sums_of_two_switches_are_not_shown_to_be_the_same(
    ranks: int, switches: int, at_once: bool, same: bool
) -> None:
    proof = verify_collective(_through_switches(ranks, switches=switches, at_once=at_once))
    assert proof.is_correct
    assert proof.same_on_all_ranks == same


def test_a_message_that_cannot_be_cut_is_refused_before_any_move_is_looked_at() -> None:
    odd = msgspec.structs.replace(build_algorithm("ring", "all_gather", 4), chunks=6)
    assert verify_collective(odd).problems[0].where == "chunks"


def _drop(tables: Tables, step: int, row: int, value: int) -> None:
    tables[step] = np.delete(tables[step], row, axis=0)


def _repeat(tables: Tables, step: int, row: int, value: int) -> None:
    tables.insert(value % (len(tables) + 1), tables[step][row : row + 1].copy())


def _set(column: int) -> Callable[[Tables, int, int, int], None]:
    def change(tables: Tables, step: int, row: int, value: int) -> None:
        tables[step][row, column] = value

    return change


def _flip(tables: Tables, step: int, row: int, value: int) -> None:
    tables[step][row, ADDS] ^= 1


def _join(tables: Tables, step: int, row: int, value: int) -> None:
    if step + 1 < len(tables):
        tables[step : step + 2] = [np.concatenate(tables[step : step + 2])]


def _exchange(tables: Tables, step: int, row: int, value: int) -> None:
    other = value % len(tables)
    tables[step], tables[other] = tables[other], tables[step]


MUTATIONS = (_drop, _repeat, *(_set(column) for column in range(5)), _flip, _join, _exchange)
VICTIMS: tuple[tuple[str, CollectiveOp, dict[str, Any]], ...] = (
    ("ring", "all_reduce", {}),
    ("ring", "reduce_scatter", {"per_node": 2}),
    ("ring", "all_gather", {"channels": 2}),
    ("double_tree", "all_reduce", {"pieces": 2}),
    ("binary_tree", "reduce", {"pieces": 2}),
    ("halving_doubling", "all_reduce", {}),
    ("recursive_doubling", "all_reduce", {}),
    ("one_shot", "all_reduce", {}),
    ("two_shot", "all_reduce", {}),
    ("bruck", "all_to_all", {}),
    ("pat", "reduce_scatter", {}),
    ("pairwise", "all_to_all", {}),
    ("nvls", "all_reduce", {}),
    ("sharp", "all_reduce", {}),
    ("binomial", "scatter", {}),
    ("binomial", "gather", {}),
    ("scatter_all_gather", "broadcast", {}),
)


@given(data=st.data())
def test_verify_agrees_with_counting_on_damaged_collectives(data: st.DataObject) -> None:
    name, op, options = data.draw(st.sampled_from(VICTIMS))
    whole = build_algorithm(name, op, data.draw(st.integers(2, 6)), **options)
    tables = steps_of(whole)
    for _ in range(data.draw(st.integers(0, 3))):
        step = data.draw(st.integers(0, len(tables) - 1))
        if len(tables[step]):
            row = data.draw(st.integers(0, len(tables[step]) - 1))
            value = data.draw(st.integers(0, whole.slots))
            data.draw(st.sampled_from(MUTATIONS))(tables, step, row, value)
    damaged = with_steps(whole, tables)
    assert verify_collective(damaged).is_correct == sound(damaged)
