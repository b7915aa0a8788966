"""Queues that choose anew each time: whoever comes first runs, whoever ran before or not.

Shortest remaining time, shortest remaining service, least attained service and even progress differ
only in their key. A scan goes on past those who do not fit.
"""

from collections.abc import Callable
from typing import Any

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool


class PreemptiveOrderPolicy:
    """The first of all jobs in order run, as many as fit."""

    needs_job_progress = True

    def __init__(
        self,
        order: Callable[[QueuedJob], Any],
        *,
        moving: bool = False,
        round_s: float | None = None,
    ) -> None:
        """Choose by `order`.

        With `moving` everything is placed anew each time, and jobs change places freely; otherwise
        those who stay chosen stay where they are. `round_s` asks again after so long.
        """
        self.order, self.allow_migration, self.round_s = order, moving, round_s
        self.jobs: dict[int, QueuedJob] = {}
        self.running = 0

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.jobs) - self.running

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.jobs[job.index] = job

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Forget a job that ran."""
        del now_s
        del self.jobs[job.index]
        self.running -= 1

    def order_jobs(self, now_s: float) -> list[QueuedJob]:
        """Return all jobs in order."""
        del now_s
        order = self.order
        keyed = sorted((order(job), job.index) for job in self.jobs.values())
        return [self.jobs[index] for _, index in keyed]

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Choose anew."""
        if not self.jobs:
            return NO_DECISION
        ranked = self.order_jobs(now_s)
        moves = self._placed(ranked, pool) if self.allow_migration else self._kept(ranked, pool)
        self.running += len(moves.starts) - len(moves.preemptions)
        wake_s = float("inf") if self.round_s is None else now_s + self.round_s
        return moves._replace(wake_s=wake_s)

    @staticmethod
    def _placed(ranked: list[QueuedJob], pool: GpuPool) -> QueueDecision:
        """Place everybody anew."""
        before = {job.index: job.placement for job in ranked if job.placement is not None}
        pool.release_all()
        starts, stops, moved = [], [], []
        for job in ranked:
            had = before.get(job.index)
            job.placement, job.allocated_gpus = None, 0.0
            if job.gpus <= pool.free and pool.allocate(job):
                if had is None:
                    starts.append(job)
                elif had != job.placement:
                    moved.append(job)
            elif had is not None:
                stops.append(job)
        return QueueDecision(starts, stops, moved)

    @staticmethod
    def _kept(ranked: list[QueuedJob], pool: GpuPool) -> QueueDecision:
        """Choose by number, stop those not chosen, then place those who are new."""
        left = pool.total
        chosen, stops = [], []
        for job in ranked:
            if job.gpus <= left:
                left -= job.gpus
                if job.placement is None:
                    chosen.append(job)
            elif job.placement is not None:
                stops.append(job)
        before = [job.placement for job in stops]
        for job in stops:
            pool.release(job)
        starts = [job for job in chosen if pool.allocate(job)]
        if len(starts) == len(chosen):
            return QueueDecision(starts, stops)
        # Free GPUs are scattered: whoever would have been stopped for nothing goes on after all.
        moved, stopped = [], []
        for job, place in zip(stops, before, strict=True):
            if not pool.allocate(job):
                stopped.append(job)
            elif job.placement != place:
                moved.append(job)
        return QueueDecision(starts, stopped, moved)
