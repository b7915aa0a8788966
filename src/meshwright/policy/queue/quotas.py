"""Quotas that teams may lend each other, as Kueue's cohorts do.

A team may always use its own quota, and beyond it what others leave unused. When an owner wants its
quota back, jobs that run on borrowed GPUs are stopped, the latest first.
"""

from collections.abc import Mapping

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.moves import NO_MOVES, Moves
from meshwright.policy.queue.pool import Pool


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What a team may use."""

    gpus: float
    """Its own."""
    borrows: float | None = None
    """The most it may use beyond that; None: whatever is left unused."""
    lends: float | None = None
    """The most of its own that others may use; None: all of it."""


class Quotas:
    """A queue for each team, all within quotas; oldest first among teams."""

    live = True

    def __init__(
        self, quotas: Mapping[str, Quota], *, reclaim: bool = True, strict: bool = False
    ) -> None:
        """Hold teams to `quotas`.

        `reclaim` stops borrowers for owners; `strict` lets nobody pass the head of a team's queue.
        """
        if not quotas:
            raise InputError([Problem("quotas", "no team has one", "give each team its quota")])
        self.quotas, self.reclaim, self.strict = dict(quotas), reclaim, strict
        self.used = dict.fromkeys(quotas, 0.0)
        self.waiting: dict[int, Standing] = {}
        self.running: dict[int, Standing] = {}

    def __len__(self) -> int:
        """Count the jobs that wait."""
        return len(self.waiting)

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait in the queue of its team."""
        del now_s
        if job.ask.team not in self.quotas:
            what = f"team {job.ask.team!r} has no quota"
            fix = f"add it to {', '.join(sorted(self.quotas))}"
            raise InputError([Problem(f"job {job.ask.job}", what, fix)])
        quota = self.quotas[job.ask.team]
        if quota.borrows is not None and job.gpus > quota.gpus + quota.borrows:
            most = quota.gpus + quota.borrows
            what = f"it asks for {job.gpus:g} GPUs and its team may use {most:g}"
            raise InputError([Problem(f"job {job.ask.job}", what, "raise the quota")])
        self.waiting[job.index] = job

    def ends(self, job: Standing, now_s: float) -> None:
        """Forget a job that ran."""
        del now_s
        del self.running[job.index]
        self.used[job.ask.team] -= job.gpus

    def lendable(self, team: str) -> float:
        """Return what all other teams leave to `team`."""
        found = 0.0
        for other, quota in self.quotas.items():
            unused = max(0.0, quota.gpus - self.used[other])
            if other != team:
                found += unused if quota.lends is None else min(unused, quota.lends)
        borrowed = sum(
            max(0.0, self.used[other] - quota.gpus)
            for other, quota in self.quotas.items()
            if other != team
        )
        return found - borrowed

    def admits(self, job: Standing) -> bool:
        """Return whether a job keeps within its quota, with what may be borrowed."""
        team, quota = job.ask.team, self.quotas[job.ask.team]
        beyond = self.used[team] + job.gpus - quota.gpus
        if beyond <= 0:
            return True
        return (quota.borrows is None or beyond <= quota.borrows) and beyond <= self.lendable(team)

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Start whom quotas admit, and give owners back what is theirs."""
        del now_s
        if not self.waiting:
            return NO_MOVES
        starts: list[Standing] = []
        stops: list[Standing] = []
        # Those who ask for their own go before those who would borrow.
        for borrowing in (False, True):
            self._start(borrowing, pool, starts, stops)
        for job in stops:
            self.waiting[job.index] = job
        return Moves(starts, stops)

    def _start(
        self, borrowing: bool, pool: Pool, starts: list[Standing], stops: list[Standing]
    ) -> None:
        barred: set[object] = set()
        for job in sorted(self.waiting.values(), key=lambda one: (-one.ask.priority, one.index)):
            team = job.ask.team
            # Whatever keeps one job back keeps back all of its team and shape.
            key = team if self.strict else (team, job.shape)
            if key in barred:
                continue
            own = self.used[team] + job.gpus <= self.quotas[team].gpus
            if (
                (own or borrowing)
                and self.admits(job)
                and (pool.take(job) or (own and self._reclaims(job, pool, starts, stops)))
            ):
                starts.append(job)
                self.used[team] += job.gpus
                self.running[job.index] = self.waiting.pop(job.index)
            else:
                barred.add(key)

    def _reclaims(
        self, job: Standing, pool: Pool, starts: list[Standing], stops: list[Standing]
    ) -> bool:
        """Stop borrowers until an owner has its own, or nobody."""
        team = job.ask.team
        if not self.reclaim:
            return False
        given: list[tuple[Standing, object, float]] = []
        spared = {one.index for one in starts}  # they have only just been given their place
        for victim in sorted(self.running.values(), key=lambda one: (-one.began_s, -one.index)):
            owner = victim.ask.team
            if owner == team or victim.index in spared:
                continue
            if self.used[owner] <= self.quotas[owner].gpus:
                continue
            given.append((victim, victim.place, victim.held))
            pool.give(victim)
            self.used[owner] -= victim.gpus
            if job.gpus <= pool.free and pool.take(job):
                for one, _, _ in given:
                    stops.append(one)
                    del self.running[one.index]
                return True
        for one, place, held in given:
            one.place, one.held = place, held
            pool.again(one)
            self.used[one.ask.team] += one.gpus
        return False
