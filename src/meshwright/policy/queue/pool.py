"""`Pool`: what GPUs there are and which are free. `Counted` knows only their number."""

from typing import Protocol, Self

from meshwright.policy.queue.ask import Standing


class Pool(Protocol):
    """GPUs to give away, whole jobs at a time."""

    total: float
    """GPUs that work."""
    free: float
    """Those of them that nobody has."""

    def take(self, job: Standing, gpus: float | None = None) -> bool:
        """Give a job all it asks for (or `gpus`) and note its place; False changes nothing."""

    def give(self, job: Standing) -> None:
        """Take back what a job has."""

    def again(self, job: Standing) -> None:
        """Give a job the place it still has written down, as on a copy or after `clear`."""

    def clear(self) -> None:
        """Take everything back; places of jobs are left as they are written down."""

    def copy(self) -> Self:
        """Return the same pool, to try things on."""


class Counted:
    """GPUs that are all alike and all near each other: only their number counts."""

    def __init__(self, gpus: float) -> None:
        """Begin with all GPUs free."""
        self.total = self.free = gpus

    def take(self, job: Standing, gpus: float | None = None) -> bool:
        """Give a job all it asks for, or `gpus`."""
        size = job.gpus if gpus is None else gpus
        if size > self.free:
            return False
        self.free -= size
        job.place = job.held = size
        return True

    def give(self, job: Standing) -> None:
        """Take back what a job has."""
        self.free += job.held
        job.place, job.held = None, 0.0

    def again(self, job: Standing) -> None:
        """Give a job the place it still has."""
        self.free -= job.held

    def clear(self) -> None:
        """Take everything back."""
        self.free = self.total

    def copy(self) -> "Counted":
        """Return the same pool, to try things on."""
        other = Counted(self.total)
        other.free = self.free
        return other
