"""EASY backfill: later jobs may pass, as long as the first that does not fit is not delayed by it.

It trusts estimates: a job that runs longer than it said delays who counted on it. Where GPUs have
places, the head's reservation is of places too.
"""

import math

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.expected import Expected, Expecting
from meshwright.policy.queue.lanes import Entry, Lane, Spot
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.pool import Counted, Pool


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


class Easy(Expecting):
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
