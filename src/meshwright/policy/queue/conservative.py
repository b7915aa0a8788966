"""Conservative backfill: every job that waits has a reservation, which later ones respect.

It trusts estimates, as EASY does (in `backfill`). Where GPUs have places it reserves numbers
of them all the same.
"""

import heapq
import math
from itertools import islice
from typing import Any

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.expected import Expected, Expecting
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.orders import Key, by_arrival
from meshwright.policy.queue.pool import Pool
from meshwright.policy.queue.profile import Profile


class Conservative(Expecting):
    """Jobs in order, each with a reservation that later ones respect.

    Whoever waits gets the earliest time that those before it leave. As long as jobs end when they
    should, that time stays the same, so a plan is kept from one decision to the next.
    """

    def __init__(self, order: Key = by_arrival, *, depth: int | None = 100) -> None:
        """Queue by `order`; only the first `depth` are looked at each time."""
        super().__init__(order)
        self.depth = depth
        self._plan: _Plan | None = None
        self._all_whole = True

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait; where it comes before others, their times are no longer right."""
        super().arrives(job, now_s)
        plan = self._plan
        if plan is not None and plan.behind and (self.order(job), job.index) < plan.behind:
            self._plan = None
        # Sums of parts of GPUs depend on the order in which they are added up.
        self._all_whole &= float(job.gpus).is_integer()

    def ends(self, job: Standing, now_s: float) -> None:
        """Expect a job no longer; where it ends at another time, the plan has changed."""
        super().ends(job, now_s)
        if now_s != job.ends_s:
            self._plan = None

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start from the head as long as it fits, then whoever delays nobody."""
        lanes = self.lanes
        starts: list[Standing] = []
        ends = self.expected.ends
        is_late = bool(ends) and ends[0][0] <= now_s
        if self._plan is not None and (is_late or not self._plan.holds(now_s, pool.free)):
            self._plan = None
        # Without reservations more and more becomes free: the head starts now or has to wait.
        while (lane := lanes.first(math.inf)) is not None and pool.take(lane.blocks[0][0][2]):
            starts.append(lanes.take(lane))
            self.expected.add(starts[-1], now_s)
            if self._plan is not None and not self._plan.start(starts[-1], now_s):
                self._plan = None
        if lane is not None and lanes.first(pool.free) is not None:
            starts += self._fill(now_s, pool)
        return Moves(starts) if starts else NO_MOVES

    def _fill(self, now_s: float, pool: Pool) -> list[Standing]:
        """Give everybody the earliest time that is left, and start those whose time is now."""
        lanes = self.lanes
        plan = self._plan or _Plan(now_s, pool.free, self.expected)
        room = None if self.depth is None else max(0, self.depth - len(plan.times_s))
        due = plan.due(now_s)
        found = [job for job in due if pool.take(job)]
        fits = len(found) == len(due)
        window = list(islice(lanes.in_order(plan.behind), room))
        last = len(window) - 1
        for at, job in enumerate(window):
            # Behind the last who could start now nobody's time matters.
            while last >= at and window[last].gpus > pool.free:
                last -= 1
            if at > last:
                break
            if plan.place(self.order(job), job) <= now_s:
                if pool.take(job):
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

    def __init__(self, now_s: float, free: float, expected: Expected) -> None:
        self.profile = Profile(now_s, free, expected)
        self.times_s: dict[int, float] = {}
        """When each is to start."""
        self.heap: list[tuple[float, Any, int, Standing]] = []
        """The same by time, and those who have started since."""
        self.behind: Any = None
        """Where in the queue those begin who have no time yet; None: at its head."""

    def holds(self, now_s: float, free: float) -> bool:
        """Go on to a moment; return whether all is as was planned."""
        self._forget()
        self.profile.move_to(now_s)
        in_time = not self.heap or self.heap[0][0] >= now_s
        return in_time and self.profile.free[0] == free

    def start(self, job: Standing, now_s: float) -> bool:
        """Let the head of the queue start; return whether that was planned or can be."""
        if job.ends_s <= now_s:
            return False
        planned_s = self.times_s.pop(job.index, None)
        if planned_s is None:
            self.profile.reserve(now_s, job.left_s, job.gpus)
        return planned_s in (None, now_s)

    def due(self, now_s: float) -> list[Standing]:
        """Return those whose time has come, in the order of the queue."""
        found = []
        while self.heap and self.heap[0][0] <= now_s:
            _, key, index, job = heapq.heappop(self.heap)
            if index in self.times_s:
                found.append((key, index, job))
        return [job for _, _, job in sorted(found)]

    def place(self, key: Any, job: Standing) -> float:
        """Reserve the earliest time that is left for the next in the queue."""
        start_s = self.profile.earliest(job.gpus, job.left_s)
        self.profile.reserve(start_s, job.left_s, job.gpus)
        self.times_s[job.index] = start_s
        heapq.heappush(self.heap, (start_s, key, job.index, job))
        self.behind = (key, job.index + 1)
        return start_s

    def _forget(self) -> None:
        """Forget those who have started."""
        while self.heap and self.heap[0][2] not in self.times_s:
            heapq.heappop(self.heap)
