"""With separate buffers, slots are read from the input until they are first written."""

from meshwright.policy.collective import Collective, build_algorithm
from meshwright.policy.collective.buffer_placement import BufferChunk, BufferPlacement
from meshwright.policy.collective.rank_program import build_rank_program, expand_slots


def places(collective: Collective, rank: int) -> BufferPlacement:
    actions = build_rank_program(collective, rank).actions
    written = {slot for action in actions for slot in expand_slots(action.writes)}
    return BufferPlacement(collective, rank, written)


def test_a_slot_lies_in_the_input_until_it_is_written() -> None:
    own = places(build_algorithm("ring", "all_reduce", 4), 0)
    assert own.get_read_location(3) == BufferChunk("input", 3)
    own.record_write(3)
    assert own.get_read_location(3) == BufferChunk("output", 3)


def test_partial_sums_of_a_reduce_scatter_lie_in_scratch_memory() -> None:
    own = places(build_algorithm("ring", "reduce_scatter", 4), 1)
    assert (len(own.input_slots), len(own.output_slots), len(own.scratch_index)) == (4, 1, 2)
    assert own.get_write_location(1) == BufferChunk("output", 0)
    assert {own.get_write_location(slot) for slot in own.scratch_index} == {
        BufferChunk("scratch", 0),
        BufferChunk("scratch", 1),
    }


def test_what_is_exchanged_has_slots_of_its_own() -> None:
    own = places(build_algorithm("pairwise", "all_to_all", 4), 2)
    assert own.get_write_location(4) == BufferChunk("output", 0)
    assert own.get_read_location(0) == BufferChunk("input", 0)


def test_a_chunk_that_stays_is_copied_from_input_to_output() -> None:
    own = places(build_algorithm("ring", "all_gather", 4), 2)
    assert own.list_copies() == ((BufferChunk("input", 0), BufferChunk("output", 2)),)
