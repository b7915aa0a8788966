"""`RankWriter`: writes the actions of one rank and numbers microbatches.

Every kind of schedule is a function that takes a rank and what was `ScheduleParams` and returns
that rank's actions.

It knows nothing of other ranks. A schedule drawn for more microbatches than there are is written
as drawn: what belongs to a microbatch that does not exist is left out, which keeps every remaining
order and so every dependency.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.policy.pipeline.schedule import PipelineAction, PipelineOp


class ScheduleParams(NamedTuple):
    """What a schedule is written from; every number is sound when a writer sees it."""

    ranks: int
    """Pipeline ranks."""
    microbatches: int
    """Microbatches in the step."""
    virtual_stages: int = 1
    """Chunks per rank."""
    microbatch_group_size: int = 1
    """Microbatches that pass a chunk in a row, for the interleaved schedule."""
    max_in_flight: int | None = None
    """The most chunk-microbatches a rank may hold."""


class RankWriter:
    """One rank's actions while they are being written."""

    def __init__(self, microbatches: Mapping[int, range]) -> None:
        """Start empty; `microbatches` gives those that pass each chunk of the rank."""
        self.actions: list[PipelineAction] = []
        self._forward = {chunk: iter(some) for chunk, some in microbatches.items()}
        self._backward = {chunk: iter(some) for chunk, some in microbatches.items()}
        self._weights: deque[tuple[int, int | None]] = deque()

    def forward(self, chunk: int) -> None:
        """Run the next microbatch forward."""
        self._put("F", chunk, next(self._forward[chunk], None))

    def backward(self, chunk: int) -> None:
        """Run the next microbatch backward, inputs and weights."""
        self._put("B", chunk, next(self._backward[chunk], None))

    def backward_input(self, chunk: int) -> None:
        """Run the next microbatch backward for the inputs; its weights join the queue."""
        microbatch = next(self._backward[chunk], None)
        self._put("I", chunk, microbatch)
        self._weights.append((chunk, microbatch))

    def backward_weight(self) -> None:
        """Run the weight backward that has waited longest."""
        self._put("W", *self._weights.popleft())

    def flush_backward_weights(self) -> None:
        """Run every weight backward that waits."""
        while self._weights:
            self.backward_weight()

    def overlap(self, forward_chunk: int, backward_chunk: int) -> None:
        """Run a forward and a full backward together."""
        before = len(self.actions)
        self.forward(forward_chunk)
        self._put(
            "B",
            backward_chunk,
            next(self._backward[backward_chunk], None),
            joined=len(self.actions) > before,
        )

    def _put(
        self, op: PipelineOp, chunk: int, microbatch: int | None, joined: bool = False
    ) -> None:
        if microbatch is not None:
            self.actions.append(PipelineAction(op, chunk, microbatch, joined))


def write_one_f_one_b(
    forwards: Sequence[PipelineAction],
    backwards: Sequence[PipelineAction],
    warm_up: int,
    weights: Sequence[PipelineAction] = (),
    delay: int = 0,
) -> tuple[PipelineAction, ...]:
    """Run `warm_up` forwards, then one forward and one backward in turn.

    Where the backward is split, the weight part follows `delay` backwards behind.
    """
    lane = list(forwards[:warm_up])
    for index, backward in enumerate(backwards):
        lane += forwards[warm_up + index : warm_up + index + 1]
        lane.append(backward)
        if index >= delay:
            lane += weights[index - delay : index - delay + 1]
    lane += weights[max(0, len(backwards) - delay) :]
    return tuple(lane)
