"""Queues that choose anew each time: whoever comes first runs, whoever ran before or not.

Shortest remaining time, shortest remaining service, least attained service and finish-time fairness
differ only in their key. A scan goes on past those who do not fit.
"""

from collections.abc import Callable
from typing import Any

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.pool import Pool


class Repick:
    """The first of all jobs in order run, as many as fit."""

    live = True

    def __init__(
        self,
        order: Callable[[Standing], Any],
        *,
        moving: bool = False,
        round_s: float | None = None,
    ) -> None:
        """Choose by `order`.

        With `moving` everything is placed anew each time, and jobs change places freely; otherwise
        those who stay chosen stay where they are. `round_s` asks again after so long.
        """
        self.order, self.moving, self.round_s = order, moving, round_s
        self.jobs: dict[int, Standing] = {}
        self.running = 0

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.jobs) - self.running

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait."""
        del now_s
        self.jobs[job.index] = job

    def ends(self, job: Standing, now_s: float) -> None:
        """Forget a job that ran."""
        del now_s
        del self.jobs[job.index]
        self.running -= 1

    def ranked(self, now_s: float) -> list[Standing]:
        """Return all jobs in order."""
        del now_s
        order = self.order
        keyed = sorted((order(job), job.index) for job in self.jobs.values())
        return [self.jobs[index] for _, index in keyed]

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Choose anew."""
        if not self.jobs:
            return NO_MOVES
        ranked = self.ranked(now_s)
        moves = self._placed(ranked, pool) if self.moving else self._kept(ranked, pool)
        self.running += len(moves.starts) - len(moves.stops)
        wake_s = float("inf") if self.round_s is None else now_s + self.round_s
        return moves._replace(wake_s=wake_s)

    @staticmethod
    def _placed(ranked: list[Standing], pool: Pool) -> Moves:
        """Place everybody anew."""
        before = {job.index: job.place for job in ranked if job.place is not None}
        pool.clear()
        starts, stops, moved = [], [], []
        for job in ranked:
            had = before.get(job.index)
            job.place, job.held = None, 0.0
            if job.gpus <= pool.free and pool.take(job):
                if had is None:
                    starts.append(job)
                elif had != job.place:
                    moved.append(job)
            elif had is not None:
                stops.append(job)
        return Moves(starts, stops, moved)

    @staticmethod
    def _kept(ranked: list[Standing], pool: Pool) -> Moves:
        """Choose by number, stop those not chosen, then place those who are new."""
        left = pool.total
        chosen, stops = [], []
        for job in ranked:
            if job.gpus <= left:
                left -= job.gpus
                if job.place is None:
                    chosen.append(job)
            elif job.place is not None:
                stops.append(job)
        before = [job.place for job in stops]
        for job in stops:
            pool.give(job)
        starts = [job for job in chosen if pool.take(job)]
        if len(starts) == len(chosen):
            return Moves(starts, stops)
        # Free GPUs are scattered: whoever would have been stopped for nothing goes on after all.
        moved, stopped = [], []
        for job, place in zip(stops, before, strict=True):
            if not pool.take(job):
                stopped.append(job)
            elif job.place != place:
                moved.append(job)
        return Moves(starts, stopped, moved)
