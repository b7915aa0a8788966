"""Every collective of the library becomes lanes that are proved, and run right in any order."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, build_algorithm, verify_collective
from meshwright.policy.collective.msccl import (
    ThreadBlockProgram,
    lift_program,
    lower_collective,
    verify_program,
)
from meshwright.policy.collective.msccl.lowering import LoweringStyle
from meshwright.policy.collective.msccl.program_checks import PROGRAM_OPS
from tests.policy.collective.gallery import gallery, label
from tests.policy.collective.msccl.lane_interpreter import right

GALLERY = [collective for collective in gallery((2, 3, 4, 8)) if collective.op in PROGRAM_OPS]


def kinds(program: ThreadBlockProgram, rank: int) -> list[list[str]]:
    return [[step.kind for step in lane.steps] for lane in program.ranks[rank].thread_blocks]


@pytest.mark.parametrize("style", ["fused", "apart"])
@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_lanes_are_sound_and_lift_to_a_sound_collective(
    collective: Collective, style: LoweringStyle
) -> None:
    program = lower_collective(collective, style=style)
    assert verify_program(program).problems == ()
    assert verify_collective(lift_program(program)).problems == ()


@pytest.mark.parametrize("collective", GALLERY[::3], ids=label)
def test_lanes_run_right_in_any_order(collective: Collective) -> None:
    assert right(lower_collective(collective), seed=1)
    assert right(lower_collective(collective, style="apart"), seed=2)


def test_a_ring_is_one_fused_lane() -> None:
    program = lower_collective(build_algorithm("ring", "all_reduce", 4))
    assert kinds(program, 0) == [["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"]]
    lane = program.ranks[0].thread_blocks[0]
    assert (lane.send_peer, lane.recv_peer, lane.channel) == (1, 3, 0)


def test_lanes_apart_only_send_or_only_receive() -> None:
    program = lower_collective(build_algorithm("ring", "all_reduce", 4), style="apart")
    assert all(
        min(lane.send_peer, lane.recv_peer) == -1
        for own in program.ranks
        for lane in own.thread_blocks
    )


def test_a_sum_that_is_only_passed_on_is_not_kept() -> None:
    program = lower_collective(build_algorithm("chain", "all_reduce", 3, pieces=1))
    found = [kind for rank in range(3) for lane in kinds(program, rank) for kind in lane]
    assert found.count("rrs") == 1  # on the way, in the middle
    assert found.count("rrcs") == 1  # at the end, where all of it came together


def test_lanes_that_fused_would_hang_stay_apart() -> None:
    # Four chunks a step do not fit between two ranks, so nobody may send all of them first.
    ring = build_algorithm("ring", "all_gather", 4, pieces=4)
    hold = lower_collective(ring)
    assert verify_program(hold).is_correct
    small = lower_collective(ring, max_bytes=1 << 20)
    assert small.chunks_per_piece >= 4
    assert verify_program(small).is_correct


def test_long_lanes_spread_over_further_channels() -> None:
    ring = build_algorithm("ring", "all_reduce", 8)
    program = lower_collective(ring, style="apart", most_steps=5)
    assert max(len(lane.steps) for own in program.ranks for lane in own.thread_blocks) <= 5
    assert verify_program(program).is_correct


def test_buffers_of_a_reduce_scatter_have_their_own_sizes() -> None:
    program = lower_collective(build_algorithm("ring", "reduce_scatter", 4))
    own = program.ranks[0]
    assert (own.input_chunks, own.output_chunks) == (4, 1)
    assert program.in_place
    assert program.out_of_place


def test_an_all_to_all_is_not_offered_in_place() -> None:
    assert not lower_collective(build_algorithm("pairwise", "all_to_all", 4)).in_place


def test_operations_with_sizes_of_their_own_are_refused() -> None:
    exchange = build_algorithm("pairwise", "all_to_all_v", 2, counts=[[1, 2], [3, 4]])
    with pytest.raises(InputError, match="plain file"):
        lower_collective(exchange)
