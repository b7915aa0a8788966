"""Priorities of many factors, as Slurm's `priority/multifactor` adds them up.

Age, size, fair share and a priority of the job itself each lie between 0 and 1 and count with their
weight. The fair share of a team is 2^(-usage/shares), both as parts of the whole, where usage fades
with a half-life. Priorities are worked out anew every few minutes, as in Slurm, not at each event.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.backfill import Easy
from meshwright.policy.queue.moves import Moves
from meshwright.policy.queue.pool import Pool


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How much each factor counts, and over which times."""

    age: float = 1000.0
    fair_share: float = 10000.0
    size: float = 0.0
    priority: float = 1000.0
    """Of the job's own priority, over the largest seen."""
    oldest_s: float = 7 * 86400.0
    """Age at which waiting counts in full."""
    half_life_s: float = 7 * 86400.0
    """Time in which usage counts half."""
    every_s: float = 300.0
    """How often priorities are worked out."""
    favour_small: bool = False
    """Whether small jobs get the factor of size, rather than large ones."""


class Usage:
    """GPU-seconds that each team has had, fading."""

    def __init__(self, half_life_s: float) -> None:
        """Begin with none."""
        self.rate = math.log(2) / half_life_s
        self.used: dict[str, float] = {}
        self.held: dict[str, float] = {}
        """GPUs each has now."""
        self.seen_s = -math.inf

    def pass_to(self, now_s: float) -> None:
        """Fade what was used, and add what was used since."""
        past_s = now_s - self.seen_s
        if past_s > 0:
            if self.seen_s > -math.inf:
                fade = math.exp(-self.rate * past_s)
                # What is used at a steady rate while it fades comes to (1 - fade) / rate.
                grown = (1 - fade) / self.rate
                for team in self.used:
                    self.used[team] = self.used[team] * fade + self.held.get(team, 0.0) * grown
            self.seen_s = now_s

    def change(self, team: str, gpus: float, now_s: float) -> None:
        """Note that a team has more GPUs from now on, or fewer."""
        self.pass_to(now_s)
        self.used.setdefault(team, 0.0)
        self.held[team] = self.held.get(team, 0.0) + gpus

    def share(self, team: str) -> float:
        """Return a team's part of all that was used."""
        total = sum(self.used.values())
        return self.used.get(team, 0.0) / total if total else 0.0


class FairShare(Easy):
    """EASY backfill in the order of priorities that change with time."""

    def __init__(
        self,
        shares: Mapping[str, float] | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Share between teams as `shares` says; those that are not named have one share each."""
        super().__init__(self._key)
        self.shares = dict(shares or {})
        self.weights = weights or Weights()
        self.usage = Usage(self.weights.half_life_s)
        self.largest_priority, self.total = 1.0, 1.0
        self.ranked_s, self.now_s = -math.inf, 0.0
        self.factors: dict[str, float] = {}

    def arrives(self, job: Standing, now_s: float) -> None:
        """Let a job wait; its team is known from now on."""
        self.shares.setdefault(job.ask.team, 1.0)
        self.largest_priority = max(self.largest_priority, job.ask.priority)
        self.now_s = now_s
        super().arrives(job, now_s)

    def ends(self, job: Standing, now_s: float) -> None:
        """Expect a job no longer, and count what it used."""
        super().ends(job, now_s)
        self.usage.change(job.ask.team, -job.gpus, now_s)

    def decide(self, now_s: float, pool: Pool) -> Moves:
        """Work out priorities where it is time to, and start whoever may."""
        self.total, self.now_s = pool.total, now_s
        if now_s - self.ranked_s >= self.weights.every_s and self.lanes.count:
            self._rank_again(now_s)
        moves = super().decide(now_s, pool)
        for job in moves.starts:
            self.usage.change(job.ask.team, job.gpus, now_s)
        return moves

    def factor(self, team: str) -> float:
        """Return a team's fair-share factor, between 0 and 1, as of the last ranking."""
        found = self.factors.get(team)
        if found is None:
            whole = sum(self.shares.values())
            share = self.shares.get(team, 1.0) / whole if whole else 0.0
            found = 2.0 ** (-self.usage.share(team) / share) if share else 0.0
            self.factors[team] = found
        return found

    def _rank_again(self, now_s: float) -> None:
        self.usage.pass_to(now_s)
        self.ranked_s = now_s
        self.factors.clear()
        ranked = sorted((self._key(job), job.index, job) for job in self.lanes.in_order())
        self.lanes.clear()
        for key, _, job in ranked:
            self.lanes.add(key, job)

    def _key(self, job: Standing) -> Any:
        """Return the negative priority, so that the highest comes first."""
        weights, ask = self.weights, job.ask
        age = min(1.0, (self.now_s - ask.submit_s) / weights.oldest_s)
        size = min(1.0, job.gpus / self.total)
        size = 1 - size if weights.favour_small else size
        own = ask.priority / self.largest_priority
        return -(
            weights.age * age
            + weights.fair_share * self.factor(ask.team)
            + weights.size * size
            + weights.priority * own
        )
