"""`QueueReplay`: what became of each job, as columns, and of the cluster as sums over time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.job_queue.job import JobRequest
from meshwright.policy.job_queue.pool.pool import GpuPool

_LOOKS = 512


class ReplayTotals:
    """Sums over all the time from the first arrival to the last end."""

    __slots__ = (
        "capacity_gpu_s",
        "free_gpu_s",
        "pending_idle_gpu_s",
        "pending_idle_s",
        "pending_job_s",
        "pending_s",
    )  # fmt: skip

    def __init__(self) -> None:
        """Begin with nothing."""
        self.capacity_gpu_s = self.free_gpu_s = 0.0
        """GPUs that worked, and those of them that nobody had."""
        self.pending_s = self.pending_idle_s = self.pending_idle_gpu_s = 0.0
        """Time in which jobs waited; in which they waited while GPUs were free; and those GPUs."""
        self.pending_job_s = 0.0


class StateSamples:
    """How the cluster stood at some hundred moments, evenly spread."""

    def __init__(self, asks: Sequence[JobRequest]) -> None:
        """Look from the first arrival on."""
        self.next_s = self.start_s = asks[0].submit_s if asks else 0.0
        self.interval_s = max(1e-9, (asks[-1].submit_s - self.start_s) / _LOOKS) if asks else 1.0
        self.rows: list[tuple[float, float, float, float, int]] = []

    def sample(self, now_s: float, pool: GpuPool, waiting: int) -> None:
        """Note what is free and who waits; look half as often where the run lasts longer."""
        block = pool.largest_free_block() if hasattr(pool, "largest_free_block") else pool.free
        self.rows.append((now_s, pool.total, pool.free, block, waiting))
        if len(self.rows) >= 2 * _LOOKS:
            del self.rows[::2]
            self.interval_s *= 2
        self.next_s = now_s + self.interval_s


class QueueReplay:
    """Columns with one entry for each job, in the order in which they were handed in."""

    def __init__(self, count: int) -> None:
        """Make room for `count` jobs."""
        self.submit_s: Any = None
        self.durations_s: Any = None
        self.gpus: Any = None
        self.first_s: Any = [float("nan")] * count
        """When it first started."""
        self.end_s: Any = [float("nan")] * count
        self.served_gpu_s: Any = [0.0] * count
        """GPU-seconds it held."""
        self.paused_gpu_s: Any = [0.0] * count
        """Of these, those without progress: starting, saving, restoring."""
        self.lost_gpu_s: Any = [0.0] * count
        """And those whose work no checkpoint kept."""
        self.preempted: Any = [0] * count
        self.moved: Any = [0] * count
        self.failed: Any = [0] * count
        """How often it was stopped for others, moved or resized, and lost its node."""
        self.totals = ReplayTotals()
        self.state_samples: NDArray[np.float64] = np.zeros((0, 5))
        """Moments: time, GPUs, free ones, the largest block of them, jobs that wait."""
        self.requests: Sequence[JobRequest] = ()

    def finalize(
        self,
        order: Sequence[int],
        asks: Sequence[JobRequest],
        run_s: Sequence[float],
        sums: ReplayTotals,
        looks: StateSamples,
    ) -> "QueueReplay":
        """Turn lists in order of arrival into columns in the order that was given."""
        back = np.empty(len(order), dtype=np.int64)
        back[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
        self.submit_s = np.array([ask.submit_s for ask in asks])[back]
        self.gpus = np.array([ask.gpus for ask in asks])[back]
        self.durations_s = np.asarray(run_s, dtype=np.float64)[back]
        for name in ("first_s", "end_s", "served_gpu_s", "paused_gpu_s", "lost_gpu_s"):
            setattr(self, name, np.asarray(getattr(self, name), dtype=np.float64)[back])
        for name in ("preempted", "moved", "failed"):
            setattr(self, name, np.asarray(getattr(self, name), dtype=np.int64)[back])
        self.requests = [asks[int(at)] for at in back]
        self.totals = sums
        self.state_samples = np.asarray(looks.rows, dtype=np.float64).reshape(-1, 5)
        return self
