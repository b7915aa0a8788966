"""Priorities of many factors, as Slurm's `priority/multifactor` adds them up.

Age, size, fair share and a priority of the job itself each lie between 0 and 1 and count with their
weight. The fair share of a team is 2^(-usage/shares), both as parts of the whole, where usage fades
with a half-life. Priorities are worked out anew every few minutes, as in Slurm, not at each event.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.policy.job_queue.job import QueuedJob
from meshwright.policy.job_queue.policies.easy_backfill import EasyBackfillPolicy
from meshwright.policy.job_queue.policy import QueueDecision
from meshwright.policy.job_queue.pool.pool import GpuPool


class PriorityWeights(msgspec.Struct, frozen=True, kw_only=True):
    """How much each factor counts, and over which times."""

    age: float = 1000.0
    fair_share: float = 10000.0
    size: float = 0.0
    priority: float = 1000.0
    """Of the job's own priority, over the largest seen."""
    max_age_s: float = 7 * 86400.0
    """Age at which waiting counts in full."""
    decay_half_life_s: float = 7 * 86400.0
    """Time in which usage counts half."""
    calc_period_s: float = 300.0
    """How often priorities are worked out."""
    favor_small: bool = False
    """Whether small jobs get the factor of size, rather than large ones."""


class TeamUsage:
    """GPU-seconds that each team has had, fading."""

    def __init__(self, half_life_s: float) -> None:
        """Begin with none."""
        self.decay_rate = math.log(2) / half_life_s
        self.used_gpu_s: dict[str, float] = {}
        self.allocated_gpus: dict[str, float] = {}
        """GPUs each has now."""
        self.updated_s = -math.inf

    def decay_to(self, now_s: float) -> None:
        """Fade what was used, and add what was used since."""
        past_s = now_s - self.updated_s
        if past_s > 0:
            if self.updated_s > -math.inf:
                fade = math.exp(-self.decay_rate * past_s)
                # What is used at a steady rate while it fades comes to (1 - fade) / rate.
                grown = (1 - fade) / self.decay_rate
                for team in self.used_gpu_s:
                    self.used_gpu_s[team] = (
                        self.used_gpu_s[team] * fade + self.allocated_gpus.get(team, 0.0) * grown
                    )
            self.updated_s = now_s

    def add_gpus(self, team: str, gpus: float, now_s: float) -> None:
        """Note that a team has more GPUs from now on, or fewer."""
        self.decay_to(now_s)
        self.used_gpu_s.setdefault(team, 0.0)
        self.allocated_gpus[team] = self.allocated_gpus.get(team, 0.0) + gpus

    def usage_share(self, team: str) -> float:
        """Return a team's part of all that was used."""
        total = sum(self.used_gpu_s.values())
        return self.used_gpu_s.get(team, 0.0) / total if total else 0.0


class MultifactorPolicy(EasyBackfillPolicy):
    """EASY backfill in the order of priorities that change with time."""

    def __init__(
        self,
        shares: Mapping[str, float] | None = None,
        weights: PriorityWeights | None = None,
    ) -> None:
        """Share between teams as `shares` says; those that are not named have one share each."""
        super().__init__(self._key)
        self.shares = dict(shares or {})
        self.weights = weights or PriorityWeights()
        self.usage = TeamUsage(self.weights.decay_half_life_s)
        self.largest_priority, self.total = 1.0, 1.0
        self.ranked_s, self.now_s = -math.inf, 0.0
        self.factors: dict[str, float] = {}

    def on_submit(self, job: QueuedJob, now_s: float) -> None:
        """Let a job wait; its team is known from now on."""
        self.shares.setdefault(job.request.team, 1.0)
        self.largest_priority = max(self.largest_priority, job.request.priority)
        self.now_s = now_s
        super().on_submit(job, now_s)

    def on_end(self, job: QueuedJob, now_s: float) -> None:
        """Expect a job no longer, and count what it used."""
        super().on_end(job, now_s)
        self.usage.add_gpus(job.request.team, -job.gpus, now_s)

    def decide(self, now_s: float, pool: GpuPool) -> QueueDecision:
        """Work out priorities where it is time to, and start whoever may."""
        self.total, self.now_s = pool.total, now_s
        if now_s - self.ranked_s >= self.weights.calc_period_s and self.queues.count:
            self._rank_again(now_s)
        moves = super().decide(now_s, pool)
        for job in moves.starts:
            self.usage.add_gpus(job.request.team, job.gpus, now_s)
        return moves

    def fair_share_factor(self, team: str) -> float:
        """Return a team's fair-share factor, between 0 and 1, as of the last ranking."""
        found = self.factors.get(team)
        if found is None:
            whole = sum(self.shares.values())
            share = self.shares.get(team, 1.0) / whole if whole else 0.0
            found = 2.0 ** (-self.usage.usage_share(team) / share) if share else 0.0
            self.factors[team] = found
        return found

    def _rank_again(self, now_s: float) -> None:
        self.usage.decay_to(now_s)
        self.ranked_s = now_s
        self.factors.clear()
        ranked = sorted((self._key(job), job.index, job) for job in self.queues.iter_ordered())
        self.queues.clear()
        for key, _, job in ranked:
            self.queues.add(key, job)

    def _key(self, job: QueuedJob) -> Any:
        """Return the negative priority, so that the highest comes first."""
        weights, ask = self.weights, job.request
        age = min(1.0, (self.now_s - ask.submit_s) / weights.max_age_s)
        size = min(1.0, job.gpus / self.total)
        size = 1 - size if weights.favor_small else size
        own = ask.priority / self.largest_priority
        return -(
            weights.age * age
            + weights.fair_share * self.fair_share_factor(ask.team)
            + weights.size * size
            + weights.priority * own
        )
