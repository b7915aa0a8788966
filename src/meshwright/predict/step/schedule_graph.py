"""A pipeline schedule as a flat list of what runs after what, and the clock that runs it.

The schedule's own rules say what depends on what; here that is worked out once, so that the same
order can be given durations many times: event by event, for many replicas, or for a search. How
long anything takes is the caller's.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.dependency_walk import DependencyRules, walk_schedule
from meshwright.policy.pipeline.schedule import PipelineAction, PipelineSchedule
from meshwright.predict.step.pass_time import LAST_BACKWARD, PassGroup

Time = TypeVar("Time", float, npt.NDArray[np.float64])
"""Seconds of one replica, or of many at once."""

ActionRow = tuple[int, int, int, int, int, int, int]
"""Rank, index into `ScheduleGraph.groups`, place of its first action among all actions rank by
rank, two messages it waits for and two it sends. Most groups have one of each: `NOTHING` is always
there, `NOWHERE` takes what nobody needs."""

NOTHING, NOWHERE = 0, 1
_FIRST_MESSAGE = 2
_MOST_TOGETHER = 2


class StageTransfer(NamedTuple):
    """A result that changes ranks."""

    sender: int
    receiver: int
    chunk: int
    """The chunk that made it."""
    microbatch: int
    forward: bool
    """Activations for the next chunk, or gradients for the one before."""


class ScheduleGraph(NamedTuple):
    """A schedule in an order that respects every dependency."""

    ranks: int
    rows: list[ActionRow]
    groups: tuple[PassGroup, ...]
    """The different groups of passes that occur."""
    transfers: list[StageTransfer]
    """What is sent; a row names message i as i + 2."""
    num_actions: int
    """Actions of all ranks."""


def build_schedule_graph(schedule: PipelineSchedule) -> ScheduleGraph:
    """Work out the order of a schedule without transfers.

    Raises:
        InputError: where the ranks wait for each other for ever.
    """
    rules = DependencyRules(schedule)
    walked = walk_schedule(rules)
    if walked.blocked:
        what = f"rank {min(walked.blocked)} waits for ever, so nothing can be simulated"
        raise InputError([Problem("schedule", what, "see what verify says about it")])
    post = _Post(schedule)
    groups = _groups(rules)
    at = [0, *accumulate(len(lane) for lane in schedule.actions)]
    rows: list[ActionRow] = []
    for rank, index in walked.order:
        group = rules.groups_by_rank[rank][index]
        kind = groups[tuple([(one.op, one.chunk) for one in group])]
        needs = [key for one in group if (key := post.taken(one, rank))]
        gives = [key for one in group if (key := post.sent(one, rank))]
        needs += [NOTHING] * (2 - len(needs))
        gives += [NOWHERE] * (2 - len(gives))
        rows.append((rank, kind, at[rank], needs[0], needs[1], gives[0], gives[1]))
        at[rank] += len(group)
    return ScheduleGraph(schedule.ranks, rows, tuple(groups), post.messages, at[-1])


def split_last_backward(plan: ScheduleGraph) -> ScheduleGraph:
    """Return the plan with the backward that ends a rank's work on a chunk as a kind of its own."""
    last: dict[tuple[int, int], int] = {}
    for index, row in enumerate(plan.rows):
        last |= {(row[0], chunk): index for op, chunk in plan.groups[row[1]] if op in LAST_BACKWARD}
    groups = {group: index for index, group in enumerate(plan.groups)}
    rows = list(plan.rows)
    for index in sorted(set(last.values())):
        rank, kind, place, need, other_need, give, other_give = plan.rows[index]
        marked = tuple(
            (LAST_BACKWARD[op] if op in LAST_BACKWARD and last[rank, chunk] == index else op, chunk)
            for op, chunk in plan.groups[kind]
        )
        kind = groups.setdefault(marked, len(groups))
        rows[index] = (rank, kind, place, need, other_need, give, other_give)
    return plan._replace(rows=rows, groups=tuple(groups))


def _groups(rules: DependencyRules) -> dict[PassGroup, int]:
    """Number the different groups of a schedule, in an order that does not depend on its length."""
    every = {
        tuple([(one.op, one.chunk) for one in group])
        for lane in rules.groups_by_rank
        for group in lane
    }
    most = max(map(len, every))
    if most > _MOST_TOGETHER:
        what = f"{most} passes start together"
        raise InputError([Problem("schedule", what, "join one F with one B or I")])
    return {group: index for index, group in enumerate(sorted(every))}


class _Post:
    """Numbers the messages of a schedule."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.messages: list[StageTransfer] = []
        self._keys: dict[tuple[bool, int, int], int] = {}
        self._routes = schedule.route_by_microbatch()
        self._last = schedule.chunks - 1

    def taken(self, action: PipelineAction, rank: int) -> int:
        """The message an action waits for; 0 where its input is on the rank already."""
        op, chunk, microbatch, _ = action
        source = chunk - 1 if op == "F" else chunk + 1
        if op == "W" or not 0 <= source <= self._last:
            return NOTHING
        if self._routes[microbatch][source] == rank:
            return NOTHING  # the rank ran it before, because it runs one thing at a time
        return self._keys[op == "F", source, microbatch]

    def sent(self, action: PipelineAction, rank: int) -> int:
        """The message that takes an action's result to another rank; 0 where none does."""
        op, chunk, microbatch, _ = action
        target = chunk + 1 if op == "F" else chunk - 1
        if op == "W" or not 0 <= target <= self._last:
            return 0
        to = self._routes[microbatch][target]
        if to == rank:
            return 0
        self.messages.append(StageTransfer(rank, to, chunk, microbatch, op == "F"))
        key = len(self.messages) - 1 + _FIRST_MESSAGE
        self._keys[op == "F", chunk, microbatch] = key
        return key


class ActionTimes(NamedTuple, Generic[Time]):
    """When everything in a plan happened."""

    start_s: list[Time]
    """By action, rank by rank; actions that run together share theirs."""
    end_s: list[Time]
    departure_s: list[Time]
    """By message."""
    arrival_s: list[Time]


def run_schedule(
    plan: ScheduleGraph,
    lengths_s: Sequence[Time],
    hop_s: float,
    *,
    blocking: bool,
    not_before_s: Mapping[int, float],
    zero: Time,
    later: Callable[[Time, Time], Time],
) -> ActionTimes[Time]:
    """Run every rank's actions in order, each as soon as the rank is free and its input there.

    Args:
        plan: What runs after what.
        lengths_s: How long each action takes, by its place; of a group, the first one's counts.
        hop_s: How long a transfer takes. A rank's transfers leave one after the other.
        blocking: Whether a rank computes on only when what it sent has arrived.
        not_before_s: Earliest starts of single actions, by place.
        zero: The time at which all begin.
        later: The later of two times.
    """
    starts, ends = [zero] * plan.num_actions, [zero] * plan.num_actions
    leaves, comes = ([zero] * (len(plan.transfers) + _FIRST_MESSAGE) for _ in range(2))
    free, line = [zero] * plan.ranks, [zero] * plan.ranks
    for rank, kind, place, need, other_need, give, other_give in plan.rows:
        start = later(free[rank], comes[need])
        if other_need:
            start = later(start, comes[other_need])
        if place in not_before_s:
            start = later(start, zero + not_before_s[place])
        starts[place], end = start, start + lengths_s[place]
        ends[place] = free[rank] = end
        if len(plan.groups[kind]) > 1:
            starts[place + 1], ends[place + 1] = start, end
        for key in (give, other_give):
            if key == NOWHERE:
                break
            leaves[key] = later(end, line[rank])
            comes[key] = line[rank] = leaves[key] + hop_s
            if blocking:
                free[rank] = comes[key]
    return ActionTimes(starts, ends, leaves[_FIRST_MESSAGE:], comes[_FIRST_MESSAGE:])
