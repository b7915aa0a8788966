"""In which order jobs go: each order is a key, the least first; ties go to who came first."""

from collections.abc import Callable
from typing import Final

from meshwright.policy.job_queue.job import QueuedJob

SortKey = Callable[[QueuedJob], float]


def by_arrival(job: QueuedJob) -> float:
    """First come, first served."""
    return job.request.submit_s


def by_estimate(job: QueuedJob) -> float:
    """Shortest job first."""
    return job.estimate_s


def by_service(job: QueuedJob) -> float:
    """Shortest service first: time × GPUs, as a quasi-shortest-service-first queue predicts it."""
    return job.estimate_s * job.gpus


def by_size(job: QueuedJob) -> float:
    """Smallest job first."""
    return job.gpus


def by_priority(job: QueuedJob) -> float:
    """Highest priority first."""
    return -job.request.priority


def by_deadline(job: QueuedJob) -> float:
    """Earliest deadline first; those without one come last."""
    return float("inf") if job.request.deadline_s is None else job.request.deadline_s


def by_remaining_time(job: QueuedJob) -> float:
    """Shortest remaining time first."""
    return job.remaining_s


def by_remaining_service(job: QueuedJob) -> float:
    """Shortest remaining service first."""
    return job.remaining_s * job.gpus


def by_attained_service(job: QueuedJob) -> float:
    """Least attained service first."""
    return job.served_gpu_s


SORT_KEYS: Final[dict[str, SortKey]] = {
    "arrival": by_arrival,
    "estimate": by_estimate,
    "service": by_service,
    "size": by_size,
    "priority": by_priority,
    "deadline": by_deadline,
    "time-left": by_remaining_time,
    "service-left": by_remaining_service,
    "attained": by_attained_service,
}
