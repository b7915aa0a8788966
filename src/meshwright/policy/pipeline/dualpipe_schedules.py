"""DualPipe and DualPipeV: forward and backward of different microbatches overlap.

DeepSeek-V3 report (arXiv 2412.19437), section 3.2.1, and the eight steps of DeepSeek's `DualPipe`
repository. A rank works on two chunks: a *near* one, whose microbatches come early, and a *far*
one. Folding makes them the two arms of a V; DualPipe holds the model twice and feeds both ends, so
that ranks r and p-1-r see the same order from opposite sides.
"""

from meshwright.policy.pipeline.rank_writer import RankWriter, ScheduleParams
from meshwright.policy.pipeline.schedule import PipelineAction


def build_dualpipe_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """Write one rank's actions where microbatches enter at both ends."""
    p, microbatches = asked.ranks, asked.microbatches
    depth = min(rank, p - 1 - rank)
    near, far = depth, p - 1 - depth
    half = (microbatches + 1) // 2
    runs = [range(half), range(half, microbatches)]
    if rank >= p // 2:
        runs.reverse()
    lane = RankWriter({near: runs[0], far: runs[1]})
    _eight_steps(lane, (near, far), depth, p // 2, half)
    return tuple(lane.actions)


def build_dualpipe_v_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """Write one rank's actions where the model is folded."""
    p, microbatches = asked.ranks, asked.microbatches
    near, far = rank, 2 * p - 1 - rank
    lane = RankWriter(dict.fromkeys((near, far), range(microbatches)))
    _eight_steps(lane, (near, far), rank, p, microbatches)
    return tuple(lane.actions)


def _eight_steps(
    lane: RankWriter, held: tuple[int, int], depth: int, ranks: int, microbatches: int
) -> None:
    """Write the steps of the rank that stands `depth` ranks behind the entry, of `ranks`."""
    near, far = held
    above = ranks - 1 - depth
    for _ in range(2 * above):
        lane.forward(near)
    for _ in range(depth + 1):
        lane.forward(near)
        lane.forward(far)
    for _ in range(above):
        lane.backward_input(far)
        lane.backward_weight()
        lane.forward(far)
    # Drawn for two microbatches per rank at least; `RankWriter` leaves out those that do not exist.
    for index in range(max(microbatches - 2 * ranks, 0) + depth + 1):
        if index == 0 and above == 0:
            # At the turn the chunk behind waits for this forward: overlapping would delay it.
            lane.forward(near)
            lane.backward(far)
        else:
            lane.overlap(near, far)
        lane.overlap(far, near)
    for _ in range(above):
        lane.backward(far)
        lane.overlap(far, near)
    _drain(lane, near, far, depth, above)


def _drain(lane: RankWriter, near: int, far: int, depth: int, above: int) -> None:
    # Half of the last backwards run whole, the other half put their weights off to fill the end.
    for index in range(2 * (depth + 1)):
        chunk = near if index % 2 else far
        if index <= depth:
            lane.backward(chunk)
        else:
            lane.backward_input(chunk)
    for _ in range(above):
        lane.backward_weight()
        lane.backward_input(near)
    lane.flush_backward_weights()
