"""What a person needs to see of a step: sums that add up over microbatches and ranks, and words."""

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from meshwright.run.posttrain.objectives.advantages import groups
from meshwright.run.posttrain.objectives.policy import PolicyLoss
from meshwright.run.posttrain.objectives.tokens import Tokens


@dataclass(frozen=True, slots=True)
class PolicySignals:
    """Sums and extremes over the counted tokens; None where something was not measured."""

    tokens: int = 0
    clipped: int = 0
    ratio_min: float | None = None
    ratio_max: float | None = None
    gap_total: float | None = None
    """Sum of |log π_old - log μ|: the trainer against the engine that sampled."""
    gap_max: float | None = None
    divergence_total: float | None = None
    entropy_total: float | None = None
    dropped: int = 0
    """Tokens that a weight against mismatch left out."""

    def __add__(self, other: Self) -> Self:
        changed: dict[str, float | int | None] = {}
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                changed[name] = theirs if mine is None else mine
            elif name.endswith("_min"):
                changed[name] = min(mine, theirs)
            else:
                changed[name] = max(mine, theirs) if name.endswith("_max") else mine + theirs
        return replace(self, **changed)  # type: ignore[arg-type]

    def figures(self) -> dict[str, float]:
        """Return shares, means and extremes by name, of what was measured."""
        count = max(1, self.tokens)
        found = {
            "clip_share": self.clipped / count,
            "dropped_share": self.dropped / count,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "logp_gap_mean": None if self.gap_total is None else self.gap_total / count,
            "logp_gap_max": self.gap_max,
            "kl": None if self.divergence_total is None else self.divergence_total / count,
            "entropy": None if self.entropy_total is None else self.entropy_total / count,
        }
        return {name: value for name, value in found.items() if value is not None}


def policy_signals(
    loss: PolicyLoss,
    tokens: Tokens,
    *,
    old: Tensor | None = None,
    sampled: Tensor | None = None,
    divergence: Tensor | None = None,
    entropy: Tensor | None = None,
    mismatch: Tensor | None = None,
) -> PolicySignals:
    """Return the signals of a microbatch, in one copy from the device.

    `old` and `sampled` are the log-probabilities of trainer and engine, `divergence` and `entropy`
    those of tokens, `mismatch` the weights of `mismatch`.
    """
    mask = tokens.mask
    if not mask.numel():
        return PolicySignals()
    found = {
        "clipped": (loss.clipped & mask).sum(),
        "ratio_min": loss.ratio.masked_fill(~mask, math.inf).min(),
        "ratio_max": loss.ratio.masked_fill(~mask, -math.inf).max(),
    }
    if old is not None and sampled is not None:
        gap = tokens.clean(old - sampled).abs()
        found |= {"gap_total": gap.sum(), "gap_max": gap.max()}
    if divergence is not None:
        found["divergence_total"] = tokens.clean(divergence).sum()
    if entropy is not None:
        found["entropy_total"] = tokens.clean(entropy).sum()
    if mismatch is not None:
        found["dropped"] = ((mismatch == 0) & mask).sum()
    figures = torch.stack([each.detach().double() for each in (mask.sum(), *found.values())])
    count, *values = figures.tolist()
    if not count:
        return PolicySignals()
    named = dict(zip(found, values, strict=True))
    clipped, dropped = int(named.pop("clipped")), int(named.pop("dropped", 0.0))
    return PolicySignals(int(count), clipped, dropped=dropped, **named)


@dataclass(frozen=True, slots=True)
class RewardSignals:
    """Rewards of a whole step."""

    mean: float
    std: float
    """Over all answers, of a sample; 0 for one alone."""
    groups: int
    silent: int
    """Groups whose answers all have the same reward: they move nothing."""
    least: float
    most: float

    def sentence(self) -> str:
        """Say in words what share of the step carries a signal; nothing where all of it does."""
        if not self.silent:
            return ""
        if self.silent < self.groups:
            share = f"{self.silent} of {self.groups} groups carry no signal"
            return f"{share}: all answers to their prompt have the same reward"
        head = f"this step carries no signal: in each of {self.groups} groups all rewards are equal"
        if self.least != self.most:
            return f"{head}, so the policy loss is 0; sample more answers to each prompt"
        same = f"{head} (all are {self.most:g}), so the policy loss is 0"
        return (
            f"{same}; look at transcripts: prompts are too hard or too easy, or the verifier errs"
        )


def reward_signals(reward_S: Tensor, group_S: Tensor) -> RewardSignals:
    """Return the signals of a step's answers, at least one."""
    known = groups(reward_S, group_S)
    wide = reward_S.double()
    return RewardSignals(
        mean=float(wide.mean()),
        std=float(wide.std()) if len(wide) > 1 else 0.0,
        groups=len(torch.unique(group_S)),
        silent=len(torch.unique(group_S[known.equal])),
        least=float(wide.min()),
        most=float(wide.max()),
    )
