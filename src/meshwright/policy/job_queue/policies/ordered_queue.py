"""What a queue that trusts estimates knows: who waits, and when those that run should end."""

import heapq
from bisect import bisect_left, insort

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policies.shape_queues import Entry, ShapeQueues
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool
from meshwright.policy.job_queue.sort_keys import SortKey, by_arrival


class StrictOrderPolicy:
    """Jobs in strict order: a job that does not fit holds back those after it."""

    needs_job_progress = False

    def __init__(self, order: SortKey = by_arrival) -> None:
        """Queue by `order`."""
        self.order = order
        self.heap: list[Entry] = []

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.heap)

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        heapq.heappush(self.heap, (self.order(job), job.index, job))

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Nothing is kept of running jobs."""

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Start from the head as long as it fits."""
        del now_s
        heap = self.heap
        starts: list[QueuedJob] = []
        while heap:
            job = heap[0][2]
            if job.gpus > pool.free or not pool.allocate(job):
                break
            starts.append(heapq.heappop(heap)[2])
        return QueueDecision(starts) if starts else NO_DECISION


class ShapeQueuePolicy:
    """Jobs that wait in order, by shape."""

    needs_job_progress = False

    def __init__(self, order: SortKey = by_arrival) -> None:
        """Queue by `order`."""
        self.order = order
        self.queues = ShapeQueues()

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return self.queues.count

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.queues.add(self.order(job), job)


class GreedyOrderPolicy(ShapeQueuePolicy):
    """Jobs in order; jobs that fit may start before those that do not."""

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Nothing is kept of running jobs."""

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Start all that fit, in order."""
        del now_s
        lanes = self.queues
        if not lanes.count:
            return NO_DECISION
        starts: list[QueuedJob] = []
        unfit: dict[int, float] = {}
        while (lane := lanes.find_first_fitting(pool.free)) is not None:
            if pool.allocate(lane.blocks[0][0][2]):
                starts.append(lanes.pop(lane))
            else:  # enough GPUs, but none that will do together: all of the shape fail alike
                unfit[id(lane)], lane.gpus = lane.gpus, float("inf")
        if unfit:
            for lane in lanes.queues.values():
                lane.gpus = unfit.get(id(lane), lane.gpus)
        return QueueDecision(starts) if starts else NO_DECISION


class ExpectedEnds:
    """Running jobs by when they are expected to end."""

    def __init__(self) -> None:
        """Begin with none."""
        self.ends: list[tuple[float, int, QueuedJob]] = []

    def add(self, job: QueuedJob, now_s: float) -> None:
        """Count a job that starts now."""
        job.expected_end_s = now_s + job.remaining_s
        insort(self.ends, (job.expected_end_s, job.index, job))

    def remove(self, job: QueuedJob) -> None:
        """Forget a job."""
        del self.ends[bisect_left(self.ends, (job.expected_end_s, job.index, job))]


class EstimateQueuePolicy(ShapeQueuePolicy):
    """Jobs that wait in order, and when those that run are expected to end."""

    def __init__(self, order: SortKey = by_arrival) -> None:
        """Queue by `order`."""
        super().__init__(order)
        self.expected = ExpectedEnds()

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Expect a job no longer."""
        del now_s
        self.expected.remove(job)
