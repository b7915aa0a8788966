"""What a queue that trusts estimates knows: who waits, and when those that run should end."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.lanes import Lanes
from meshwright.policy.queue.orders import by_arrival


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


class Expecting:
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
