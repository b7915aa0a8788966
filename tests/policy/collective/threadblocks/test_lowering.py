"""Every collective of the library becomes lanes that are proved, and run right in any order."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective import Collective, build, verify
from meshwright.policy.collective.threadblocks import LaneProgram, lifted, lowered, verify_lanes
from meshwright.policy.collective.threadblocks.lowering import Style
from meshwright.policy.collective.threadblocks.shape import LANE_OPS
from tests.policy.collective.gallery import gallery, label
from tests.policy.collective.threadblocks.lane_interpreter import right

GALLERY = [collective for collective in gallery((2, 3, 4, 8)) if collective.op in LANE_OPS]


def kinds(program: LaneProgram, rank: int) -> list[list[str]]:
    return [[step.kind for step in lane.steps] for lane in program.ranks[rank].lanes]


@pytest.mark.parametrize("style", ["fused", "apart"])
@pytest.mark.parametrize("collective", GALLERY, ids=label)
def test_lanes_are_sound_and_lift_to_a_sound_collective(
    collective: Collective, style: Style
) -> None:
    program = lowered(collective, style=style)
    assert verify_lanes(program).problems == ()
    assert verify(lifted(program)).problems == ()


@pytest.mark.parametrize("collective", GALLERY[::3], ids=label)
def test_lanes_run_right_in_any_order(collective: Collective) -> None:
    assert right(lowered(collective), seed=1)
    assert right(lowered(collective, style="apart"), seed=2)


def test_a_ring_is_one_fused_lane() -> None:
    program = lowered(build("ring", "all_reduce", 4))
    assert kinds(program, 0) == [["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"]]
    lane = program.ranks[0].lanes[0]
    assert (lane.send, lane.receive, lane.channel) == (1, 3, 0)


def test_lanes_apart_only_send_or_only_receive() -> None:
    program = lowered(build("ring", "all_reduce", 4), style="apart")
    assert all(min(lane.send, lane.receive) == -1 for own in program.ranks for lane in own.lanes)


def test_a_sum_that_is_only_passed_on_is_not_kept() -> None:
    program = lowered(build("chain", "all_reduce", 3, pieces=1))
    found = [kind for rank in range(3) for lane in kinds(program, rank) for kind in lane]
    assert found.count("rrs") == 1  # on the way, in the middle
    assert found.count("rrcs") == 1  # at the end, where all of it came together


def test_lanes_that_fused_would_hang_stay_apart() -> None:
    # Four chunks a step do not fit between two ranks, so nobody may send all of them first.
    ring = build("ring", "all_gather", 4, pieces=4)
    hold = lowered(ring)
    assert verify_lanes(hold).sound
    small = lowered(ring, max_bytes=1 << 20)
    assert small.at_once >= 4
    assert verify_lanes(small).sound


def test_long_lanes_spread_over_further_channels() -> None:
    ring = build("ring", "all_reduce", 8)
    program = lowered(ring, style="apart", most_steps=5)
    assert max(len(lane.steps) for own in program.ranks for lane in own.lanes) <= 5
    assert verify_lanes(program).sound


def test_buffers_of_a_reduce_scatter_have_their_own_sizes() -> None:
    program = lowered(build("ring", "reduce_scatter", 4))
    own = program.ranks[0]
    assert (own.input_chunks, own.output_chunks) == (4, 1)
    assert program.in_place
    assert program.out_of_place


def test_an_all_to_all_is_not_offered_in_place() -> None:
    assert not lowered(build("pairwise", "all_to_all", 4)).in_place


def test_operations_with_sizes_of_their_own_are_refused() -> None:
    exchange = build("pairwise", "all_to_all_v", 2, counts=[[1, 2], [3, 4]])
    with pytest.raises(InputError, match="plain file"):
        lowered(exchange)
