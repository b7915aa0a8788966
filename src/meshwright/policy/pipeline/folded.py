"""Schedules that run the model down the ranks and back up: ZB-V, V-Half and V-Min.

Rank r holds chunk r of the way down and chunk 2p-1-r of the way up, so the first rank computes
the loss. V-Half and V-Min are written here as they repeat, six slots per microbatch; `tune`
closes the gaps at both ends.
"""

from collections import deque
from typing import Literal, NamedTuple, get_args

from meshwright.policy.pipeline.lane import Asked, Lane
from meshwright.policy.pipeline.schedule import Action, Op

Block = Literal["v-half", "v-min"]
BLOCKS: tuple[Block, ...] = get_args(Block)

PERIOD = 6
"""Slots of a building block: forward, backward-input and backward-weight of two chunks."""


def zb_v(rank: int, asked: Asked) -> tuple[Action, ...]:
    """Write one rank's actions of ZB-V (Qi et al. 2024, arXiv 2401.10241, section 6).

    Every rank holds at most 2p chunk-microbatches, what 1F1B's first rank holds, and where
    forward, backward-input and backward-weight take equally long no rank ever waits.
    """
    p, microbatches = asked.p, asked.microbatches
    down, up = rank, 2 * p - 1 - rank
    # Drawn for 2p-1 microbatches at least; `Lane` leaves out those that do not exist.
    drawn = max(microbatches, 2 * p - 1)
    lane = Lane(dict.fromkeys((down, up), range(microbatches)))
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
        lane.weight()
    lane.weights()
    return tuple(lane.actions)


def _split(lane: Lane, chunk: int) -> None:
    lane.backward_input(chunk)
    lane.weight()


class _Offsets(NamedTuple):
    """Slots of a rank's four ordered passes of microbatch 0, in the order they depend."""

    down: int
    up: int
    back_up: int
    back_down: int


def _offsets(block: Block, rank: int, p: int) -> _Offsets:
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


def repeated_block(block: Block, rank: int, asked: Asked) -> tuple[Action, ...]:
    """Write one rank's actions of a repeated building block, weights in the first free slots."""
    p, microbatches = asked.p, asked.microbatches
    down, up = rank, 2 * p - 1 - rank
    passes: tuple[tuple[Op, int], ...] = (("F", down), ("F", up), ("I", up), ("I", down))
    slots = {
        offset + PERIOD * microbatch: Action(op, chunk, microbatch)
        for offset, (op, chunk) in zip(_offsets(block, rank, p), passes, strict=True)
        for microbatch in range(microbatches)
    }
    lane: list[Action] = []
    waiting: deque[Action] = deque()
    for slot in range(max(slots) + 1):
        action = slots.get(slot)
        if action is not None:
            lane.append(action)
            if action.op == "I":
                waiting.append(action._replace(op="W"))
        elif waiting:
            lane.append(waiting.popleft())
    return (*lane, *waiting)
