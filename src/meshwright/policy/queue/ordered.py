"""Queues without preemption: an order, and what happens behind a job that does not fit yet.

Strict queues wait for their head; queues that skip start whatever fits, in order, which keeps GPUs
busy and lets large jobs starve. Backfill (in `backfill`) lies between the two.
"""

import heapq

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.lanes import Entry, Lanes
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.orders import Key, by_arrival
from meshwright.policy.queue.pool import Pool


class Strict:
    """Jobs in order; nobody passes a job that does not fit."""

    live = False

    def __init__(self, order: Key = by_arrival) -> None:
        """Queue by `order`."""
        self.order = order
        self.heap: list[Entry] = []

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.heap)

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        heapq.heappush(self.heap, (self.order(job), job.index, job))

    def ends(self, job: Standing, now_s: float) -> None:
        """Nothing is kept of running jobs."""

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start from the head as long as it fits."""
        del now_s
        heap = self.heap
        starts: list[Standing] = []
        while heap:
            job = heap[0][2]
            if job.gpus > pool.free or not pool.take(job):
                break
            starts.append(heapq.heappop(heap)[2])
        return Moves(starts) if starts else NO_MOVES


class InLanes:
    """Jobs that wait in order, by shape."""

    live = False

    def __init__(self, order: Key = by_arrival) -> None:
        """Queue by `order`."""
        self.order = order
        self.lanes = Lanes()

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return self.lanes.count

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.lanes.add(self.order(job), job)


class Skipping(InLanes):
    """Jobs in order; whoever fits may pass those who do not."""

    def ends(self, job: Standing, now_s: float) -> None:
        """Nothing is kept of running jobs."""

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start all that fit, in order."""
        del now_s
        lanes = self.lanes
        if not lanes.count:
            return NO_MOVES
        starts: list[Standing] = []
        unfit: dict[int, float] = {}
        while (lane := lanes.first(pool.free)) is not None:
            if pool.take(lane.blocks[0][0][2]):
                starts.append(lanes.take(lane))
            else:  # enough GPUs, but none that will do together: all of the shape fail alike
                unfit[id(lane)], lane.gpus = lane.gpus, float("inf")
        if unfit:
            for lane in lanes.lanes.values():
                lane.gpus = unfit.get(id(lane), lane.gpus)
        return Moves(starts) if starts else NO_MOVES
