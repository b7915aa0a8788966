"""In which order jobs go: each order is a key, the least first; ties go to who came first."""

from collections.abc import Callable
from typing import Final

from meshwright.policy.queue.ask import Standing

Key = Callable[[Standing], float]


def by_arrival(job: Standing) -> float:
    """First come, first served."""
    return job.ask.submit_s


def by_estimate(job: Standing) -> float:
    """Shortest job first."""
    return job.estimate_s


def by_service(job: Standing) -> float:
    """Shortest service first: time × GPUs, as a quasi-shortest-service-first queue predicts it."""
    return job.estimate_s * job.gpus


def by_size(job: Standing) -> float:
    """Smallest job first."""
    return job.gpus


def by_priority(job: Standing) -> float:
    """Highest priority first."""
    return -job.ask.priority


def by_deadline(job: Standing) -> float:
    """Earliest deadline first; those without one come last."""
    return float("inf") if job.ask.deadline_s is None else job.ask.deadline_s


def by_time_left(job: Standing) -> float:
    """Shortest remaining time first."""
    return job.left_s


def by_service_left(job: Standing) -> float:
    """Shortest remaining service first."""
    return job.left_s * job.gpus


def by_attained(job: Standing) -> float:
    """Least attained service first."""
    return job.served_gpu_s


ORDERS: Final[dict[str, Key]] = {
    "arrival": by_arrival,
    "estimate": by_estimate,
    "service": by_service,
    "size": by_size,
    "priority": by_priority,
    "deadline": by_deadline,
    "time-left": by_time_left,
    "service-left": by_service_left,
    "attained": by_attained,
}
