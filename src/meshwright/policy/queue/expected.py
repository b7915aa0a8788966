"""What a queue that trusts estimates knows: who waits, and when those that run should end."""

from bisect import bisect_left, insort

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.ordered import InLanes
from meshwright.policy.queue.orders import Key, by_arrival


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


class Expecting(InLanes):
    """Jobs that wait in order, and when those that run are expected to end."""

    def __init__(self, order: Key = by_arrival) -> None:
        """Queue by `order`."""
        super().__init__(order)
        self.expected = Expected()

    def ends(self, job: Standing, now_s: float) -> None:
        """Expect a job no longer."""
        del now_s
        self.expected.remove(job)
