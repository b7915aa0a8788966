"""`GpuPool`: what GPUs there are and which are free. `CountedPool` knows only their number."""

from typing import Protocol, Self

from meshwright.policy.job_queue.job import QueuedJob


class GpuPool(Protocol):
    """GPUs to give away, whole jobs at a time."""

    total: float
    """GPUs that work."""
    free: float
    """Those of them that nobody has."""

    def allocate(self, job: QueuedJob, gpus: float | None = None) -> bool:
        """Give a job all it asks for (or `gpus`) and note its place; False changes nothing."""

    def release(self, job: QueuedJob) -> None:
        """Take back what a job has."""

    def reallocate(self, job: QueuedJob) -> None:
        """Give a job the place it still has written down, as on a copy or after `release_all`."""

    def release_all(self) -> None:
        """Take everything back; places of jobs are left as they are written down."""

    def copy(self) -> Self:
        """Return the same pool, to try things on."""


class CountedPool:
    """GPUs that are all alike and all near each other: only their number counts."""

    def __init__(self, gpus: float) -> None:
        """Begin with all GPUs free."""
        self.total = self.free = gpus

    def allocate(self, job: QueuedJob, gpus: float | None = None) -> bool:
        """Give a job all it asks for, or `gpus`."""
        size = job.gpus if gpus is None else gpus
        if size > self.free:
            return False
        self.free -= size
        job.placement = job.allocated_gpus = size
        return True

    def release(self, job: QueuedJob) -> None:
        """Take back what a job has."""
        self.free += job.allocated_gpus
        job.placement, job.allocated_gpus = None, 0.0

    def reallocate(self, job: QueuedJob) -> None:
        """Give a job the place it still has."""
        self.free -= job.allocated_gpus

    def release_all(self) -> None:
        """Take everything back."""
        self.free = self.total

    def copy(self) -> "CountedPool":
        """Return the same pool, to try things on."""
        other = CountedPool(self.total)
        other.free = self.free
        return other
