"""Schedules that run the model down the ranks and back up: ZB-V, V-Half and V-Min.

Rank r holds chunk r of the way down and chunk 2p-1-r of the way up, so the first rank computes
the loss. V-Half and V-Min are written here as they repeat, six slots per microbatch;
`tune_schedule` closes the gaps at both ends.
"""

from collections import deque
from typing import Literal, NamedTuple, get_args

from meshwright.policy.pipeline.rank_writer import RankWriter, ScheduleParams
from meshwright.policy.pipeline.schedule import PipelineAction, PipelineOp

BuildingBlock = Literal["v-half", "v-min"]
BUILDING_BLOCKS: tuple[BuildingBlock, ...] = get_args(BuildingBlock)

PERIOD = 6
"""Slots of a building block: forward, backward-input and backward-weight of two chunks."""


def build_zb_v_actions(rank: int, asked: ScheduleParams) -> tuple[PipelineAction, ...]:
    """Write one rank's actions of ZB-V (Qi et al. 2024, arXiv 2401.10241, section 6).

    Every rank holds at most 2p chunk-microbatches, what 1F1B's first rank holds, and where
    forward, backward-input and backward-weight take equally long no rank ever waits.
    """
    p, microbatches = asked.ranks, asked.microbatches
    down, up = rank, 2 * p - 1 - rank
    # Drawn for 2p-1 microbatches at least; `RankWriter` leaves out those that do not exist.
    drawn = max(microbatches, 2 * p - 1)
    lane = RankWriter(dict.fromkeys((down, up), range(microbatches)))
    for _ in range(2 * (p - rank) - 1):
        lane.forward(down)
    for _ in range(rank):
        lane.forward(up)
        lane.forward(down)
    for _ in range(p - rank):
        lane.forward(up)
        _split(lane, up)
    # So far 2p-1-rank forwards went down and p came up; each round now runs one of either.
    for done in range(p, drawn):
        if done + p - 1 - rank < drawn:
            lane.forward(down)
        _split(lane, down)
        lane.forward(up)
        _split(lane, up)
    for _ in range(rank):
        lane.backward_input(down)
        lane.backward_input(up)
    for _ in range(p - rank):
        lane.backward_input(down)
        lane.backward_weight()
    lane.flush_backward_weights()
    return tuple(lane.actions)


def _split(lane: RankWriter, chunk: int) -> None:
    lane.backward_input(chunk)
    lane.backward_weight()


class _Offsets(NamedTuple):
    """Slots of a rank's four ordered passes of microbatch 0, in the order they depend."""

    down: int
    up: int
    back_up: int
    back_down: int


def _offsets(block: BuildingBlock, rank: int, p: int) -> _Offsets:
    """Where a building block stands (Qi et al. 2024, arXiv 2405.15362, and their repository).

    The slack keeps a rank's four passes in different slots of the period.
    """
    if block == "v-min":
        slack = 2 if p % 3 == 0 else 0
        return _Offsets(rank, 2 * p - 1 - rank, 2 * p + slack + rank, 4 * p + slack - 1 - rank)
    slack = 3 if p % 2 == 0 else 0
    return _Offsets(
        2 * rank, 3 * p - 2 - rank, 3 * p + slack - 1 + 2 * rank, 6 * p + slack - 2 - rank
    )


def build_repeated_block(
    block: BuildingBlock, rank: int, asked: ScheduleParams
) -> tuple[PipelineAction, ...]:
    """Write one rank's actions of a repeated building block, weights in the first free slots."""
    p, microbatches = asked.ranks, asked.microbatches
    down, up = rank, 2 * p - 1 - rank
    passes: tuple[tuple[PipelineOp, int], ...] = (("F", down), ("F", up), ("I", up), ("I", down))
    slots = {
        offset + PERIOD * microbatch: PipelineAction(op, chunk, microbatch)
        for offset, (op, chunk) in zip(_offsets(block, rank, p), passes, strict=True)
        for microbatch in range(microbatches)
    }
    lane: list[PipelineAction] = []
    waiting: deque[PipelineAction] = deque()
    for slot in range(max(slots) + 1):
        action = slots.get(slot)
        if action is not None:
            lane.append(action)
            if action.op == "I":
                waiting.append(action._replace(op="W"))
        elif waiting:
            lane.append(waiting.popleft())
    return (*lane, *waiting)
