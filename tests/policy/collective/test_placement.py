"""With separate buffers, slots are read from the input until they are first written."""

from meshwright.policy.collective import Collective, build
from meshwright.policy.collective.lanes import program, slots_of
from meshwright.policy.collective.placement import Places, Spot


def places(collective: Collective, rank: int) -> Places:
    actions = program(collective, rank).actions
    written = {slot for action in actions for slot in slots_of(action.writes)}
    return Places(collective, rank, written)


def test_a_slot_lies_in_the_input_until_it_is_written() -> None:
    own = places(build("ring", "all_reduce", 4), 0)
    assert own.now(3) == Spot("input", 3)
    own.write(3)
    assert own.now(3) == Spot("output", 3)


def test_partial_sums_of_a_reduce_scatter_lie_in_scratch_memory() -> None:
    own = places(build("ring", "reduce_scatter", 4), 1)
    assert (len(own.given), len(own.wanted), len(own.scratch)) == (4, 1, 2)
    assert own.later(1) == Spot("output", 0)
    assert {own.later(slot) for slot in own.scratch} == {Spot("scratch", 0), Spot("scratch", 1)}


def test_what_is_exchanged_has_slots_of_its_own() -> None:
    own = places(build("pairwise", "all_to_all", 4), 2)
    assert own.later(4) == Spot("output", 0)
    assert own.now(0) == Spot("input", 0)


def test_a_chunk_that_stays_is_copied_from_input_to_output() -> None:
    own = places(build("ring", "all_gather", 4), 2)
    assert own.copies() == ((Spot("input", 0), Spot("output", 2)),)
