"""Backfill: later jobs may pass, as long as nobody who has a reservation is delayed by them.

EASY reserves for the first job that does not fit; conservative backfill for every job that waits.
Both trust estimates: a job that runs longer than it said delays those who counted on it. Where GPUs
have places, EASY reserves places too; conservative backfill reserves numbers of GPUs only.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from itertools import islice
from typing import Any

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.lanes import Entry, Lane, Lanes, Spot
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.orders import by_arrival
from meshwright.policy.queue.pool import Counted, Pool


class Expected:
    """Running jobs by when they are expected to end."""

    def __init__(self) -> None:
        """Begin with none."""
        self.ends: list[tuple[float, int, Standing]] = []

    def add(self, job: Standing, now_s: float) -> None:
        """Count a job that starts now."""
        job.ends_s = now_s + job.left_s
        insort(self.ends, (job.ends_s, job.index, job))

    def remove(self, job: Standing) -> None:
        """Forget a job."""
        del self.ends[bisect_left(self.ends, (job.ends_s, job.index, job))]


class Reservation:
    """When and on what the head of a queue will start, if nobody is in its way."""

    def __init__(self, head: Standing, expected: Expected, pool: Pool) -> None:
        """Let running jobs end one after another, in thought, until `head` fits."""
        self.head, self.start_s = head, math.inf
        self.left = pool.copy()
        """What is free when the head starts, the head itself not counted."""
        ends = expected.ends
        if isinstance(self.left, Counted):
            self._count(self.left, ends)
            return
        for at, (end_s, _, job) in enumerate(ends):
            place, held = job.place, job.held
            self.left.give(job)
            job.place, job.held = place, held
            # Those who end together leave together.
            if at + 1 < len(ends) and ends[at + 1][0] == end_s:
                continue
            if self._fits():
                self.start_s = end_s
                return

    def _count(self, left: Counted, ends: list[tuple[float, int, Standing]]) -> None:
        """Do the same where only numbers count."""
        free, needed, until_s = left.free, self.head.gpus, math.inf
        for end_s, _, job in ends:
            if end_s > until_s:  # all who end at that moment have been counted
                break
            free += job.held
            if free >= needed:
                until_s = end_s
        left.free, self.start_s = free, until_s

    def _fits(self) -> bool:
        """Return whether the head finds its place in what is left."""
        head = self.head
        if head.gpus > self.left.free or not self.left.take(head):
            return False
        self.left.give(head)
        return True

    def allows(self, job: Standing, now_s: float) -> bool:
        """Return whether a job that has its place may keep it without delaying the head."""
        if now_s + job.left_s <= self.start_s:
            return True
        # It still runs when the head wants to start: is there room for both?
        self.left.again(job)
        if self._fits():
            return True
        place, held = job.place, job.held
        self.left.give(job)
        job.place, job.held = place, held
        return False


class _Ordered:
    """Jobs that wait in order, and when those that run are expected to end."""

    live = False

    def __init__(self, order: Callable[[Standing], Any] = by_arrival) -> None:
        """Queue by `order`."""
        self.order = order
        self.lanes, self.expected = Lanes(), Expected()

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return self.lanes.count

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.lanes.add(self.order(job), job)

    def ends(self, job: Standing, now_s: float) -> None:
        """Expect a job no longer."""
        del now_s
        self.expected.remove(job)


class Easy(_Ordered):
    """Jobs in order, with EASY backfill (Lifka 1995)."""

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start from the head as long as it fits, then whoever delays it not."""
        lanes = self.lanes
        if not lanes.count:
            return NO_MOVES
        starts: list[Standing] = []
        while (lane := lanes.first(math.inf)) is not None:
            job = lane.blocks[0][0][2]
            if job.gpus > pool.free or not pool.take(job):
                break
            self.expected.add(lanes.take(lane), now_s)
            starts.append(job)
        if lane is not None and lanes.count > 1 and pool.free > 0:
            self._fill_behind(lane, now_s, pool, starts)
        return Moves(starts) if starts else NO_MOVES

    def _fill_behind(
        self, head_lane: Lane, now_s: float, pool: Pool, starts: list[Standing]
    ) -> None:
        candidates = [
            lane
            for lane in self.lanes.lanes.values()
            if lane.gpus <= pool.free and lane.blocks and lane is not head_lane
        ]
        if not candidates:
            return
        head = head_lane.blocks[0][0][2]
        reservation = Reservation(head, self.expected, pool)
        cursors = [_Cursor(lane) for lane in candidates]
        while cursors:
            cursor = min(cursors, key=_Cursor.entry) if len(cursors) > 1 else cursors[0]
            if (found := self._try(cursor, reservation, now_s, pool)) is not None:
                self.expected.add(found, now_s)
                starts.append(found)
            cursors = [one for one in cursors if one.spot and one.lane.gpus <= pool.free]

    def _try(
        self, cursor: "_Cursor", reservation: Reservation, now_s: float, pool: Pool
    ) -> Standing | None:
        """Start the job at a cursor, or move the cursor on."""
        lane, spot = cursor.lane, cursor.spot
        assert spot is not None
        job = lane.at(spot)[2]
        if not pool.take(job):
            cursor.spot = None
            return None
        if reservation.allows(job, now_s):
            self.lanes.take(lane, spot)
            cursor.move_to(spot, now_s)
            return job
        # There is no room beside the head for any of this shape: the rest has to be short.
        pool.give(job)
        cursor.by_s = reservation.start_s
        cursor.move_to((spot[0], spot[1] + 1), now_s)
        return None


class _Cursor:
    """How far a lane has been looked through."""

    __slots__ = ("by_s", "lane", "spot")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.spot: Spot | None = (0, 0)
        """Who is next; None: nobody."""
        self.by_s: float | None = None
        """By when jobs have to be done; None: that is not known to matter."""

    def entry(self) -> Entry:
        assert self.spot is not None
        return self.lane.at(self.spot)

    def move_to(self, spot: Spot, now_s: float) -> None:
        """Go to the next job from a spot on that may start."""
        if self.by_s is None:
            self.spot = self.lane.from_spot(spot)
        else:
            self.spot = self.lane.seek(spot, self.by_s - now_s)


class Conservative(_Ordered):
    """Jobs in order, each with a reservation that later ones respect."""

    def __init__(
        self, order: Callable[[Standing], Any] = by_arrival, *, depth: int | None = 100
    ) -> None:
        """Queue by `order`; only the first `depth` are looked at each time."""
        super().__init__(order)
        self.depth = depth

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start from the head as long as it fits, then whoever delays nobody."""
        lanes = self.lanes
        starts: list[Standing] = []
        # Without reservations more and more becomes free: the head starts now or has to wait.
        while (lane := lanes.first(math.inf)) is not None and pool.take(lane.blocks[0][0][2]):
            starts.append(lanes.take(lane))
            self.expected.add(starts[-1], now_s)
        if lane is not None and lanes.first(pool.free) is not None:
            self._fill(now_s, pool, starts)
        return Moves(starts) if starts else NO_MOVES

    def _fill(self, now_s: float, pool: Pool, starts: list[Standing]) -> None:
        """Give everybody the earliest time that is left, and start those whose time is now."""
        lanes, found = self.lanes, []
        profile = Profile(now_s, pool.free, self.expected)
        least = min(lane.gpus for lane in lanes.lanes.values() if lane.blocks)
        for job in islice(lanes.in_order(), self.depth):
            start_s = profile.earliest(job.gpus, job.left_s)
            if start_s <= now_s and pool.take(job):
                found.append(job)
                if pool.free < least:
                    break
            profile.reserve(start_s, job.left_s, job.gpus)
        for job in found:
            lanes.remove(self.order(job), job)
            self.expected.add(job, now_s)
        starts += found


class Profile:
    """How many GPUs are free from when on, as far as is expected."""

    def __init__(self, now_s: float, free: float, expected: Expected) -> None:
        """Begin with what is free now, and what running jobs leave when they end."""
        self.times, self.free = [now_s], [free]
        # Whoever is over its time may end at any moment, but not now.
        soon_s = math.nextafter(now_s, math.inf)
        for end_s, _, job in expected.ends:
            at_s = max(end_s, soon_s)
            if at_s > self.times[-1]:
                self.times.append(at_s)
                self.free.append(self.free[-1])
            self.free[-1] += job.held

    def earliest(self, gpus: float, lasts_s: float) -> float:
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
        for at in range(first, last):
            self.free[at] -= gpus

    def _cut(self, at_s: float) -> int:
        if at_s == math.inf:
            return len(self.times)
        at = bisect_right(self.times, at_s)
        if self.times[at - 1] == at_s:
            return at - 1
        self.times.insert(at, at_s)
        self.free.insert(at, self.free[at - 1])
        return at
