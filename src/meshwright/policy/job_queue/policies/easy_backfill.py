"""EASY backfill: later jobs may pass, as long as the first that does not fit is not delayed by it.

It trusts estimates: a job that runs longer than it said delays who counted on it. Where GPUs have
places, the head's reservation is of places too.
"""

import math

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policies.ordered_queue import EstimateQueuePolicy, ExpectedEnds
from meshwright.policy.job_queue.policies.shape_queues import Entry, QueuePosition, ShapeQueue
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import CountedPool, GpuPool


class Reservation:
    """When and on what the head of a queue will start, if nobody is in its way."""

    def __init__(self, head_job: QueuedJob, expected: ExpectedEnds, pool: GpuPool) -> None:
        """Let running jobs end one after another, in thought, until `head_job` fits."""
        self.head_job, self.start_s = head_job, math.inf
        self.planned_pool = pool.copy()
        """What is free when the head starts, the head itself not counted."""
        ends = expected.ends
        if isinstance(self.planned_pool, CountedPool):
            self._count(self.planned_pool, ends)
            return
        for at, (end_s, _, job) in enumerate(ends):
            place, held = job.placement, job.allocated_gpus
            self.planned_pool.release(job)
            job.placement, job.allocated_gpus = place, held
            # Those who end together leave together.
            if at + 1 < len(ends) and ends[at + 1][0] == end_s:
                continue
            if self._fits():
                self.start_s = end_s
                return

    def _count(self, left: CountedPool, ends: list[tuple[float, int, QueuedJob]]) -> None:
        """Do the same where only numbers count."""
        free, needed, until_s = left.free, self.head_job.gpus, math.inf
        for end_s, _, job in ends:
            if end_s > until_s:  # all who end at that moment have been counted
                break
            free += job.allocated_gpus
            if free >= needed:
                until_s = end_s
        left.free, self.start_s = free, until_s

    def _fits(self) -> bool:
        """Return whether the head finds its place in what is left."""
        head = self.head_job
        if head.gpus > self.planned_pool.free or not self.planned_pool.allocate(head):
            return False
        self.planned_pool.release(head)
        return True

    def allows(self, job: QueuedJob, now_s: float) -> bool:
        """Return whether a job that has its place may keep it without delaying the head."""
        if now_s + job.remaining_s <= self.start_s:
            return True
        # It still runs when the head wants to start: is there room for both?
        self.planned_pool.reallocate(job)
        if self._fits():
            return True
        place, held = job.placement, job.allocated_gpus
        self.planned_pool.release(job)
        job.placement, job.allocated_gpus = place, held
        return False


class EasyBackfillPolicy(EstimateQueuePolicy):
    """Jobs in order, with EASY backfill (Lifka 1995)."""

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Start from the head as long as it fits, then whoever delays it not."""
        lanes = self.queues
        if not lanes.count:
            return NO_DECISION
        starts: list[QueuedJob] = []
        while (lane := lanes.find_first_fitting(math.inf)) is not None:
            job = lane.blocks[0][0][2]
            if job.gpus > pool.free or not pool.allocate(job):
                break
            self.expected.add(lanes.pop(lane), now_s)
            starts.append(job)
        if lane is not None and lanes.count > 1 and pool.free > 0:
            self._fill_behind(lane, now_s, pool, starts)
        return QueueDecision(starts) if starts else NO_DECISION

    def _fill_behind(
        self, head_lane: ShapeQueue, now_s: float, pool: GpuPool, starts: list[QueuedJob]
    ) -> None:
        candidates = [
            lane
            for lane in self.queues.queues.values()
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
        self, cursor: "_Cursor", reservation: Reservation, now_s: float, pool: GpuPool
    ) -> QueuedJob | None:
        """Start the job at a cursor, or move the cursor on."""
        lane, spot = cursor.lane, cursor.spot
        assert spot is not None
        job = lane.get(spot)[2]
        if not pool.allocate(job):
            cursor.spot = None
            return None
        if reservation.allows(job, now_s):
            self.queues.pop(lane, spot)
            cursor.move_to(spot, now_s)
            return job
        # There is no room beside the head for any of this shape: the rest has to be short.
        pool.release(job)
        cursor.by_s = reservation.start_s
        cursor.move_to((spot[0], spot[1] + 1), now_s)
        return None


class _Cursor:
    """How far a lane has been looked through."""

    __slots__ = ("by_s", "lane", "spot")

    def __init__(self, lane: ShapeQueue) -> None:
        self.lane = lane
        self.spot: QueuePosition | None = (0, 0)
        """Who is next; None: nobody."""
        self.by_s: float | None = None
        """By when jobs have to be done; None: that is not known to matter."""

    def entry(self) -> Entry:
        assert self.spot is not None
        return self.lane.get(self.spot)

    def move_to(self, spot: QueuePosition, now_s: float) -> None:
        """Go to the next job from a spot on that may start."""
        if self.by_s is None:
            self.spot = self.lane.resolve_position(spot)
        else:
            self.spot = self.lane.find_shorter(spot, self.by_s - now_s)
