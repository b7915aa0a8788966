"""Where actions fall when each starts as early as it can, given how long they are.

Lengths are relative numbers from the caller: this orders actions, it predicts no seconds.
"""

from math import inf
from operator import itemgetter
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.dependency_walk import DependencyRules, walk_schedule
from meshwright.policy.pipeline.schedule import TRANSFER_OPS, PipelineAction, PipelineSchedule


class PipelinePassDurations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the passes of one chunk are, in any one unit."""

    forward: float = 1
    """A forward pass."""
    backward_input: float = 1
    """The part of a backward pass that the chunk before waits for."""
    backward_weight: float = 1
    """The part that nobody waits for."""
    transfer: float = 0
    """From the end of a pass to the moment another rank can use its result."""
    overlapped: float | None = None
    """A forward and a full backward run together; None means one after the other."""

    def __post_init__(self) -> None:
        problems = [
            Problem(f"lengths.{name}", f"{value!r} is not a length", "use a number from 0")
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None and not 0 <= value < inf
        ]
        if problems:
            raise InputError(problems)

    def get_duration(self, group: tuple[PipelineAction, ...]) -> float:
        """Return how long a group of compute actions takes."""
        if len(group) == 1:
            return self._single(group[0])
        if self.overlapped is not None:
            return self.overlapped
        return sum(self._single(action) for action in group)

    def _single(self, action: PipelineAction) -> float:
        if action.op == "F":
            return self.forward
        if action.op == "W":
            return self.backward_weight
        return self.backward_input + (self.backward_weight if action.op == "B" else 0)


UNIT_DURATIONS = PipelinePassDurations()
"""Forward, backward-input and backward-weight take one slot each, transfers none."""


class TimedAction(NamedTuple):
    """A group of compute actions with its place."""

    start: float
    end: float
    rank: int
    group: tuple[PipelineAction, ...]


def remove_transfers(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the same schedule with its compute actions only."""
    lanes = (tuple(a for a in lane if a.op not in TRANSFER_OPS) for lane in schedule.actions)
    return msgspec.structs.replace(schedule, actions=tuple(lanes))


def compute_action_times(
    schedule: PipelineSchedule, lengths: PipelinePassDurations = UNIT_DURATIONS
) -> list[TimedAction]:
    """Return every compute group of a sound schedule with its place, by start and rank."""
    if schedule.has_transfers:
        schedule = remove_transfers(schedule)
    rules = DependencyRules(schedule)
    walked = walk_schedule(rules)
    if walked.blocked:
        what = f"rank {min(walked.blocked)} waits for ever, so nothing can be placed"
        raise InputError([Problem("schedule", what, "see what verify says about it")])
    free = [0.0] * schedule.ranks
    came: dict[int, tuple[float, int]] = {}
    placed = []
    for rank, index in walked.order:
        group = rules.groups_by_rank[rank][index]
        _, needs, gives = rules.get_step_keys(group)
        start = free[rank]
        for key in needs:
            end, source = came[key]
            start = max(start, end + lengths.transfer if source != rank else end)
        free[rank] = end = start + lengths.get_duration(group)
        for key in gives:
            came[key] = (end, rank)
        placed.append(TimedAction(start, end, rank, group))
    placed.sort(key=itemgetter(0, 2))
    return placed
