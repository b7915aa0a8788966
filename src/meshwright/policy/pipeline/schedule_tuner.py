"""Fits a schedule to how long its passes are, within a limit on what each rank may hold.

Every rank keeps its order of forwards and its order of backwards, and picks at each moment which
of the two, or a weight backward, goes next: list scheduling, as Qi et al. 2024 (arXiv 2401.10241,
section 3.1) start their search. It cannot deadlock within what the given schedule itself holds:
whichever unfinished action comes first in the given order has all it needs.
"""

import heapq
from collections import deque
from itertools import count
from typing import Literal, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline.action_times import PipelinePassDurations, compute_action_times
from meshwright.policy.pipeline.dependency_walk import DependencyRules, Keys
from meshwright.policy.pipeline.in_flight_activations import count_in_flight
from meshwright.policy.pipeline.schedule import TRANSFER_OPS, PipelineAction, PipelineSchedule


class PriorityRule(NamedTuple):
    """How a rank picks where several actions could go next."""

    weight_fill: Literal["eager", "patient"]
    """Whether a weight backward may start though something urgent arrives before it ends."""
    tie_break: Literal["backward", "given"]
    """Whether backwards go before forwards, or whichever the given schedule has first."""


PRIORITY_RULES = (
    PriorityRule("eager", "backward"),
    PriorityRule("eager", "given"),
    PriorityRule("patient", "backward"),
    PriorityRule("patient", "given"),
)


EAGER_RULES = PRIORITY_RULES[:2]
"""Enough where all passes are equally long: no arrival then falls inside a weight backward."""


def tune_schedule(
    schedule: PipelineSchedule,
    lengths: PipelinePassDurations,
    max_in_flight: int | None = None,
    tastes: tuple[PriorityRule, ...] = PRIORITY_RULES,
) -> PipelineSchedule:
    """Return a sound schedule re-ordered for these lengths, or itself where nothing is shorter.

    `max_in_flight` is the most chunk-microbatches a rank may hold; None allows what the fullest
    rank of the given schedule holds. Every taste is tried, the shortest outcome kept.
    """
    most = max(count_in_flight(schedule))
    limit = most if max_in_flight is None else max_in_flight
    problems = []
    if limit < most:
        what = f"{limit} is below the {most} that the given schedule holds"
        problems.append(Problem("max_in_flight", what, f"use {most}"))
    if any(action.is_concurrent for lane in schedule.actions for action in lane):
        what = f"{schedule.kind} joins actions, which tuning would tear apart"
        problems.append(Problem("schedule", what))
    if any(action.op in TRANSFER_OPS for lane in schedule.actions for action in lane):
        what = "has transfers, which follow from the order of its passes"
        problems.append(Problem("schedule", what, "tune first, then write out the transfers"))
    if problems:
        raise InputError(problems)
    tries = [schedule, *(_Greedy(schedule, lengths, limit, taste).run() for taste in tastes)]
    return min(tries, key=lambda one: compute_makespan(one, lengths))


def compute_makespan(
    schedule: PipelineSchedule, lengths: PipelinePassDurations
) -> tuple[float, float]:
    """Return when the last rank ends, and the longest any rank takes from start to end."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for one in compute_action_times(schedule, lengths):
        first.setdefault(one.rank, one.start)
        last[one.rank] = one.end
    return max(last.values()), max(last[rank] - first[rank] for rank in last)


class _Waiting(NamedTuple):
    """An action that has not run."""

    at: int
    action: PipelineAction
    needs: Keys
    gives: Keys


class _Greedy:
    """One run of the list scheduler."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        lengths: PipelinePassDurations,
        limit: int,
        taste: PriorityRule,
    ) -> None:
        self.schedule, self.lengths, self.limit, self.taste = schedule, lengths, limit, taste
        rules = DependencyRules(schedule)
        lanes = [
            [
                _Waiting(index, action, *rules.get_step_keys((action,))[1:])
                for index, action in enumerate(lane)
            ]
            for lane in schedule.actions
        ]
        self.forwards = [deque(one for one in lane if one.action.op == "F") for lane in lanes]
        self.backwards = [
            deque(one for one in lane if one.action.op in ("B", "I")) for lane in lanes
        ]
        self.weights: list[deque[PipelineAction]] = [deque() for _ in lanes]
        self.held = [0] * len(lanes)
        self.free = [0.0] * len(lanes)
        self.came: dict[int, tuple[float, int]] = {}
        self.asleep: dict[int, set[int]] = {}
        self.written: list[list[PipelineAction]] = [[] for _ in lanes]
        self.number = count()
        self.events = [(0.0, next(self.number), rank) for rank in range(len(lanes))]

    def run(self) -> PipelineSchedule:
        """Let every rank pick until nothing is left."""
        while self.events:
            now, _, rank = heapq.heappop(self.events)
            if now >= self.free[rank]:
                self._pick(rank, now)
        actions = tuple(tuple(lane) for lane in self.written)
        return msgspec.structs.replace(self.schedule, actions=actions)

    def _pick(self, rank: int, now: float) -> None:
        queues = [self.backwards[rank]]
        if self.held[rank] < self.limit:
            queues.append(self.forwards[rank])
        if self.taste.tie_break == "given":
            queues.sort(key=lambda queue: queue[0].at if queue else 0)
        arrivals = [self._arrival(rank, queue) for queue in queues]
        for queue, arrival in zip(queues, arrivals, strict=True):
            if arrival is not None and arrival <= now:
                one = queue.popleft()
                self._start(rank, now, one.action, one.gives)
                return
        soon = min((arrival for arrival in arrivals if arrival is not None), default=None)
        late = now + self.lengths.backward_weight
        fits = self.taste.weight_fill == "eager" or soon is None or soon >= late
        if self.weights[rank] and fits:
            self._start(rank, now, self.weights[rank].popleft(), ())
        elif soon is not None:
            self._wake(rank, soon)

    def _arrival(self, rank: int, queue: deque[_Waiting]) -> float | None:
        """When the next of a queue can start, as far as that is known."""
        if not queue:
            return None
        arrival = 0.0
        for key in queue[0].needs:
            if key not in self.came:
                self.asleep.setdefault(key, set()).add(rank)
                return None
            end, source = self.came[key]
            arrival = max(arrival, end + self.lengths.transfer if source != rank else end)
        return arrival

    def _start(self, rank: int, now: float, action: PipelineAction, gives: Keys) -> None:
        end = now + self.lengths.get_duration((action,))
        self.written[rank].append(action)
        self.free[rank] = end
        if action.op == "F":
            self.held[rank] += 1
        elif action.op == "I":
            self.weights[rank].append(action._replace(op="W"))
        else:
            self.held[rank] -= 1
        self._wake(rank, end)
        for key in gives:
            self.came[key] = (end, rank)
            for other in sorted(self.asleep.pop(key, ())):
                self._wake(other, end + self.lengths.transfer if other != rank else end)

    def _wake(self, rank: int, time: float) -> None:
        heapq.heappush(self.events, (max(time, self.free[rank]), next(self.number), rank))
