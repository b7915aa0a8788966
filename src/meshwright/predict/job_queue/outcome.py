"""What a queue came to, in figures: completion times, waits, use of the cluster and fairness."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.predict.job_queue.replay import QueueReplay

Floats = NDArray[np.float64]
JOB_SIZE_CLASSES = ((0, 1), (1, 4), (4, 8), (8, 32), (32, float("inf")))
"""Classes of size: more GPUs than the first, no more than the second."""
_SHORT_S = 10.0
"""Slowdown of shorter jobs is counted as if they took so long (bounded slowdown)."""


class QueuePercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """How figures are spread. A percentile is a figure that occurred: nothing is interpolated."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class JobSizeClass(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of some size."""

    gpus: str
    jobs: int
    jct_s: QueuePercentiles
    wait_s: QueuePercentiles


class QueueFairness(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly jobs and teams are served."""

    jain_index: float
    """Jain's index of the teams' (or users') mean of run time over completion time; 1 is even."""
    num_groups: int
    """How many teams or users there are."""
    finish_time_ratio: QueuePercentiles
    """Completion time over what it would be alone on an even share of the cluster; above 1: worse
    off. The share is all GPUs over the mean number of jobs in the system."""
    unfair_fraction: float
    """Share of jobs with a ratio above 1."""


class QueueOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a queue came to."""

    jobs: int
    gpu_hours: float
    """Work of all jobs."""
    makespan_s: float
    """From the first arrival to the last end."""
    jct_s: QueuePercentiles
    """From arrival to end."""
    wait_s: QueuePercentiles
    """From arrival to first start."""
    queued_s: QueuePercentiles
    """Time without GPUs in all, also after a job was stopped."""
    slowdown: QueuePercentiles
    """Completion time over run time."""
    by_size: tuple[JobSizeClass, ...]
    allocated_fraction: float
    """Share of GPU-time that jobs held."""
    utilization: float
    """Share of GPU-time that was work of jobs, no restart and nothing done twice."""
    goodput: float
    """Work over what jobs held."""
    pending_while_idle_fraction: float
    """Share of the time in which jobs waited while GPUs were free."""
    pending_idle_gpu_hours: float
    """GPU-hours that were free while jobs waited."""
    mean_largest_free_block: float
    """Most free GPUs on one node, on average over the time; of all where nodes are not told."""
    mean_pending_jobs: float
    """Jobs that wait, on average over the time."""
    fairness: QueueFairness
    preemptions: int
    migrations: int
    failures: int
    paused_gpu_hours: float
    """GPU-hours that jobs held without progress: starts, saves, restores."""
    lost_gpu_hours: float
    """GPU-hours of work that no checkpoint kept."""
    jobs_with_deadline: int
    """Jobs that had one."""
    missed_deadlines: int
    """Those that were late."""


def summarize_run(run: QueueReplay) -> QueueOutcome:
    """Work out the figures of a run."""
    jct, wait = run.end_s - run.submit_s, run.first_s - run.submit_s
    makespan_s = float(run.end_s.max() - run.submit_s.min()) if len(jct) else 0.0
    work = run.durations_s * run.gpus
    sums = run.totals
    capacity = max(sums.capacity_gpu_s, 1e-12)
    held = max(float(run.served_gpu_s.sum()), 1e-12)
    due = [(ask.deadline_s, end) for ask, end in zip(run.requests, run.end_s, strict=True)]
    with_deadline = [(limit, end) for limit, end in due if limit is not None]
    queued = np.maximum(0.0, jct - run.served_gpu_s / np.maximum(run.gpus, 1e-12))
    return QueueOutcome(
        jobs=len(jct),
        gpu_hours=float(work.sum()) / 3600,
        makespan_s=makespan_s,
        jct_s=compute_percentiles(jct),
        wait_s=compute_percentiles(wait),
        queued_s=compute_percentiles(queued),
        slowdown=compute_percentiles(np.maximum(1.0, jct / np.maximum(run.durations_s, _SHORT_S))),
        by_size=_by_size(run.gpus, jct, wait),
        allocated_fraction=1 - sums.free_gpu_s / capacity,
        utilization=float(work.sum()) / capacity,
        goodput=float(work.sum()) / held,
        pending_while_idle_fraction=sums.pending_idle_s / makespan_s if makespan_s else 0.0,
        pending_idle_gpu_hours=sums.pending_idle_gpu_s / 3600,
        mean_largest_free_block=_over_time(run.state_samples[:, 0], run.state_samples[:, 3]),
        mean_pending_jobs=sums.pending_job_s / makespan_s if makespan_s else 0.0,
        fairness=_fairness(run, jct, makespan_s),
        preemptions=int(run.preempted.sum()),
        migrations=int(run.moved.sum()),
        failures=int(run.failed.sum()),
        paused_gpu_hours=float(run.paused_gpu_s.sum()) / 3600,
        lost_gpu_hours=float(run.lost_gpu_s.sum()) / 3600,
        jobs_with_deadline=len(with_deadline),
        missed_deadlines=sum(bool(end > limit) for limit, end in with_deadline),
    )


def compute_percentiles(values: Floats) -> QueuePercentiles:
    """Return how figures are spread; of none, nought."""
    if not len(values):
        return QueuePercentiles(mean=0.0, p50=0.0, p95=0.0, p99=0.0, max=0.0)
    order, count = np.sort(values), len(values)
    p50, p95, p99 = (float(order[min(count - 1, int(count * q))]) for q in (0.5, 0.95, 0.99))
    return QueuePercentiles(
        mean=float(values.mean()), p50=p50, p95=p95, p99=p99, max=float(order[-1])
    )


def _by_size(gpus: Floats, jct: Floats, wait: Floats) -> tuple[JobSizeClass, ...]:
    found = []
    for above, most in JOB_SIZE_CLASSES:
        these = (gpus > above) & (gpus <= most)
        if not these.any():
            continue
        name = f"{above + 1:g}-{most:g}" if most < float("inf") else f">{above:g}"
        found.append(
            JobSizeClass(
                gpus="1" if most == 1 else name,
                jobs=int(these.sum()),
                jct_s=compute_percentiles(jct[these]),
                wait_s=compute_percentiles(wait[these]),
            )
        )
    return tuple(found)


def _over_time(times: Floats, values: Floats) -> float:
    if len(times) < 2:
        return float(values.mean()) if len(values) else 0.0
    return float((values[:-1] * np.diff(times)).sum() / max(times[-1] - times[0], 1e-12))


def _fairness(run: QueueReplay, jct: Floats, makespan_s: float) -> QueueFairness:
    names = [ask.team or ask.user for ask in run.requests]
    groups, at = np.unique(np.array(names, dtype=str), return_inverse=True)
    served = np.minimum(1.0, run.durations_s / np.maximum(jct, 1e-12))
    served[jct <= 0] = 1.0
    means = np.bincount(at, weights=served) / np.maximum(np.bincount(at), 1)
    jain = float(means.sum() ** 2 / (len(means) * (means**2).sum())) if means.any() else 1.0
    inside = max(1.0, float(jct.sum()) / makespan_s) if makespan_s else 1.0
    total = run.totals.capacity_gpu_s / makespan_s if makespan_s else 1.0
    alone = np.maximum(run.durations_s, _SHORT_S) * np.maximum(
        1.0, run.gpus * inside / max(total, 1e-12)
    )
    ratio = np.maximum(jct, _SHORT_S) / alone
    return QueueFairness(
        jain_index=jain,
        num_groups=len(groups),
        finish_time_ratio=compute_percentiles(ratio),
        unfair_fraction=float((ratio > 1 + 1e-9).mean()) if len(ratio) else 0.0,
    )
