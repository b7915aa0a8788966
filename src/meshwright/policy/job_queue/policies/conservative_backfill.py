"""Conservative backfill: every job that waits has a reservation, which later ones respect.

It trusts estimates, as EASY does (in `backfill`). Where GPUs have places it reserves numbers
of them all the same.
"""

import heapq
import math
from bisect import bisect_right
from itertools import islice
from typing import Any

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policies.ordered_queue import EstimateQueuePolicy, ExpectedEnds
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool
from meshwright.policy.job_queue.sort_keys import SortKey, by_arrival


class AvailabilityProfile:
    """How many GPUs are free from each of some times on."""

    def __init__(self, now_s: float, free: float, expected: ExpectedEnds) -> None:
        """Begin with what is free now, and what running jobs leave when they end."""
        self.times, self.free = [now_s], [free]
        # Whoever is over its time may end at any moment, but not now.
        soon_s = math.nextafter(now_s, math.inf)
        for end_s, _, job in expected.ends:
            at_s = max(end_s, soon_s)
            if at_s > self.times[-1]:
                self.times.append(at_s)
                self.free.append(self.free[-1])
            self.free[-1] += job.allocated_gpus

    def find_earliest_start(self, gpus: float, lasts_s: float) -> float:
        """Return the first time from which so many are free for so long."""
        times, free = self.times, self.free
        at = 0
        while at < len(times):
            if free[at] < gpus:
                at += 1
                continue
            end_s, ahead = times[at] + lasts_s, at + 1
            while ahead < len(times) and times[ahead] < end_s and free[ahead] >= gpus:
                ahead += 1
            if ahead == len(times) or times[ahead] >= end_s:
                return times[at]
            at = ahead
        return math.inf

    def reserve(self, start_s: float, lasts_s: float, gpus: float) -> None:
        """Take so many for so long."""
        if start_s == math.inf:
            return
        first, last = self._cut(start_s), self._cut(start_s + lasts_s)
        self.free[first:last] = [free - gpus for free in self.free[first:last]]

    def advance_to(self, now_s: float) -> None:
        """Forget what was before now."""
        at = bisect_right(self.times, now_s) - 1
        del self.times[:at], self.free[:at]
        self.times[0] = now_s

    def _cut(self, at_s: float) -> int:
        if at_s == math.inf:
            return len(self.times)
        at = bisect_right(self.times, at_s)
        if self.times[at - 1] == at_s:
            return at - 1
        self.times.insert(at, at_s)
        self.free.insert(at, self.free[at - 1])
        return at


class ConservativeBackfillPolicy(EstimateQueuePolicy):
    """Jobs in order, each with a reservation that later ones respect.

    Whoever waits gets the earliest time that those before it leave. As long as jobs end when they
    should, that time stays the same, so a plan is kept from one decision to the next.
    """

    def __init__(self, order: SortKey = by_arrival, *, depth: int | None = 100) -> None:
        """Queue by `order`; only the first `depth` are looked at each time."""
        super().__init__(order)
        self.depth = depth
        self._plan: _Plan | None = None
        self._all_whole = True

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait; where it comes before others, their times are no longer right."""
        super().on_submit(job, now_s)
        plan = self._plan
        if plan is not None and plan.behind and (self.order(job), job.index) < plan.behind:
            self._plan = None
        # Sums of parts of GPUs depend on the order in which they are added up.
        self._all_whole &= float(job.gpus).is_integer()

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Expect a job no longer; where it ends at another time, the plan has changed."""
        super().on_end(job, now_s)
        if now_s != job.expected_end_s:
            self._plan = None

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Start from the head as long as it fits, then jobs that delay no reservation."""
        lanes = self.queues
        starts: list[QueuedJob] = []
        ends = self.expected.ends
        is_late = bool(ends) and ends[0][0] <= now_s
        if self._plan is not None and (is_late or not self._plan.holds(now_s, pool.free)):
            self._plan = None
        # Without reservations more and more becomes free: the head starts now or has to wait.
        while (lane := lanes.find_first_fitting(math.inf)) is not None and pool.allocate(
            lane.blocks[0][0][2]
        ):
            starts.append(lanes.pop(lane))
            self.expected.add(starts[-1], now_s)
            if self._plan is not None and not self._plan.start(starts[-1], now_s):
                self._plan = None
        if lane is not None and lanes.find_first_fitting(pool.free) is not None:
            starts += self._fill(now_s, pool)
        return QueueDecision(starts) if starts else NO_DECISION

    def _fill(self, now_s: float, pool: GpuPool) -> list[QueuedJob]:
        """Give everybody the earliest time that is left, and start those whose time is now."""
        lanes = self.queues
        plan = self._plan or _Plan(now_s, pool.free, self.expected)
        room = None if self.depth is None else max(0, self.depth - len(plan.times_s))
        due = plan.due(now_s)
        found = [job for job in due if pool.allocate(job)]
        fits = len(found) == len(due)
        window = list(islice(lanes.iter_ordered(plan.behind), room))
        last = len(window) - 1
        for at, job in enumerate(window):
            # Behind the last who could start now nobody's time matters.
            while last >= at and window[last].gpus > pool.free:
                last -= 1
            if at > last:
                break
            if plan.place(self.order(job), job) <= now_s:
                if pool.allocate(job):
                    found.append(job)
                else:
                    fits = False
        for job in found:
            lanes.remove(self.order(job), job)
            self.expected.add(job, now_s)
            del plan.times_s[job.index]
        # Who finds no place though there are GPUs enough waits for longer than was planned.
        self._plan = plan if fits and self._all_whole else None
        return found


class _Plan:
    """When those who wait are to start, for the first of them."""

    def __init__(self, now_s: float, free: float, expected: ExpectedEnds) -> None:
        self.profile = AvailabilityProfile(now_s, free, expected)
        self.times_s: dict[int, float] = {}
        """When each is to start."""
        self.heap: list[tuple[float, Any, int, QueuedJob]] = []
        """The same by time, and those who have started since."""
        self.behind: Any = None
        """Where in the queue those begin who have no time yet; None: at its head."""

    def holds(self, now_s: float, free: float) -> bool:
        """Go on to a moment; return whether all is as was planned."""
        self._forget()
        self.profile.advance_to(now_s)
        in_time = not self.heap or self.heap[0][0] >= now_s
        return in_time and self.profile.free[0] == free

    def start(self, job: QueuedJob, now_s: float) -> bool:
        """Let the head of the queue start; return whether that was planned or can be."""
        if job.expected_end_s <= now_s:
            return False
        planned_s = self.times_s.pop(job.index, None)
        if planned_s is None:
            self.profile.reserve(now_s, job.remaining_s, job.gpus)
        return planned_s in (None, now_s)

    def due(self, now_s: float) -> list[QueuedJob]:
        """Return those whose time has come, in the order of the queue."""
        found = []
        while self.heap and self.heap[0][0] <= now_s:
            _, key, index, job = heapq.heappop(self.heap)
            if index in self.times_s:
                found.append((key, index, job))
        return [job for _, _, job in sorted(found)]

    def place(self, key: Any, job: QueuedJob) -> float:
        """Reserve the earliest time that is left for the next in the queue."""
        start_s = self.profile.find_earliest_start(job.gpus, job.remaining_s)
        self.profile.reserve(start_s, job.remaining_s, job.gpus)
        self.times_s[job.index] = start_s
        heapq.heappush(self.heap, (start_s, key, job.index, job))
        self.behind = (key, job.index + 1)
        return start_s

    def _forget(self) -> None:
        """Forget those who have started."""
        while self.heap and self.heap[0][2] not in self.times_s:
            heapq.heappop(self.heap)
