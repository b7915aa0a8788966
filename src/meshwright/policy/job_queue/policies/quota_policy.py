"""Quotas that teams may lend each other, as Kueue's cohorts do.

A team may always use its own quota, and beyond it what others leave unused. When an owner wants its
quota back, jobs that run on borrowed GPUs are stopped, the latest first.
"""

from collections.abc import Mapping

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policy import NO_DECISION, QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool


class TeamQuota(msgspec.Struct, frozen=True, kw_only=True):
    """What a team may use."""

    nominal_quota: float
    """Its own."""
    borrowing_limit: float | None = None
    """The most it may use beyond that; None: whatever is left unused."""
    lending_limit: float | None = None
    """The most of its own that others may use; None: all of it."""


class QuotaPolicy:
    """A queue for each team, all within quotas; oldest first among teams."""

    needs_job_progress = True

    def __init__(
        self, quotas: Mapping[str, TeamQuota], *, reclaim: bool = True, strict: bool = False
    ) -> None:
        """Hold teams to `quotas`.

        `reclaim` stops borrowers for owners; `strict` lets nobody pass the head of a team's queue.
        """
        if not quotas:
            raise InputError([Problem("quotas", "no team has one", "give each team its quota")])
        self.quotas, self.reclaim, self.strict = dict(quotas), reclaim, strict
        self.used_gpus = dict.fromkeys(quotas, 0.0)
        self.waiting: dict[int, QueuedJob] = {}
        self.running: dict[int, QueuedJob] = {}

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.waiting)

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait in the queue of its team."""
        del now_s
        if job.request.team not in self.quotas:
            what = f"team {job.request.team!r} has no quota"
            fix = f"add it to {', '.join(sorted(self.quotas))}"
            raise InputError([Problem(f"job {job.request.job_id}", what, fix)])
        quota = self.quotas[job.request.team]
        if (
            quota.borrowing_limit is not None
            and job.gpus > quota.nominal_quota + quota.borrowing_limit
        ):
            most = quota.nominal_quota + quota.borrowing_limit
            what = f"it asks for {job.gpus:g} GPUs and its team may use {most:g}"
            raise InputError([Problem(f"job {job.request.job_id}", what, "raise the quota")])
        self.waiting[job.index] = job

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Forget a job that ran."""
        del now_s
        del self.running[job.index]
        self.used_gpus[job.request.team] -= job.gpus

    def count_lendable_gpus(self, team: str) -> float:
        """Return what all other teams leave to `team`."""
        found = 0.0
        for other, quota in self.quotas.items():
            unused = max(0.0, quota.nominal_quota - self.used_gpus[other])
            if other != team:
                found += unused if quota.lending_limit is None else min(unused, quota.lending_limit)
        borrowed = sum(
            max(0.0, self.used_gpus[other] - quota.nominal_quota)
            for other, quota in self.quotas.items()
            if other != team
        )
        return found - borrowed

    def can_admit(self, job: QueuedJob) -> bool:
        """Return whether a job keeps within its quota, with what may be borrowed."""
        team, quota = job.request.team, self.quotas[job.request.team]
        beyond = self.used_gpus[team] + job.gpus - quota.nominal_quota
        if beyond <= 0:
            return True
        return (
            quota.borrowing_limit is None or beyond <= quota.borrowing_limit
        ) and beyond <= self.count_lendable_gpus(team)

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Start whom quotas admit, and give owners back what is theirs."""
        del now_s
        if not self.waiting:
            return NO_DECISION
        starts: list[QueuedJob] = []
        stops: list[QueuedJob] = []
        # Those who ask for their own go before those who would borrow.
        for borrowing in (False, True):
            self._start(borrowing, pool, starts, stops)
        for job in stops:
            self.waiting[job.index] = job
        return QueueDecision(starts, stops)

    def _start(
        self, borrowing: bool, pool: GpuPool, starts: list[QueuedJob], stops: list[QueuedJob]
    ) -> None:
        barred: set[object] = set()
        for job in sorted(
            self.waiting.values(), key=lambda one: (-one.request.priority, one.index)
        ):
            team = job.request.team
            # Whatever keeps one job back keeps back all of its team and shape.
            key = team if self.strict else (team, job.shape)
            if key in barred:
                continue
            own = self.used_gpus[team] + job.gpus <= self.quotas[team].nominal_quota
            if (
                (own or borrowing)
                and self.can_admit(job)
                and (pool.allocate(job) or (own and self._reclaims(job, pool, starts, stops)))
            ):
                starts.append(job)
                self.used_gpus[team] += job.gpus
                self.running[job.index] = self.waiting.pop(job.index)
            else:
                barred.add(key)

    def _reclaims(
        self, job: QueuedJob, pool: GpuPool, starts: list[QueuedJob], stops: list[QueuedJob]
    ) -> bool:
        """Stop borrowers until an owner has its own, or nobody."""
        team = job.request.team
        if not self.reclaim:
            return False
        given: list[tuple[QueuedJob, object, float]] = []
        spared = {one.index for one in starts}  # they have only just been given their place
        for victim in sorted(self.running.values(), key=lambda one: (-one.start_s, -one.index)):
            owner = victim.request.team
            if owner == team or victim.index in spared:
                continue
            if self.used_gpus[owner] <= self.quotas[owner].nominal_quota:
                continue
            given.append((victim, victim.placement, victim.allocated_gpus))
            pool.release(victim)
            self.used_gpus[owner] -= victim.gpus
            if job.gpus <= pool.free and pool.allocate(job):
                for one, _, _ in given:
                    stops.append(one)
                    del self.running[one.index]
                return True
        for one, place, held in given:
            one.placement, one.allocated_gpus = place, held
            pool.reallocate(one)
            self.used_gpus[one.request.team] += one.gpus
        return False
