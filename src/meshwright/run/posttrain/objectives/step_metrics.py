"""What a person needs to see of a step: sums that add up over microbatches and ranks, and words."""

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from meshwright.run.posttrain.objectives.group_advantages import compute_group_stats
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens
from meshwright.run.posttrain.objectives.policy_loss import PolicyLoss


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Sums and extremes over the counted tokens; None where something was not measured."""

    num_tokens: int = 0
    clipped_tokens: int = 0
    ratio_min: float | None = None
    ratio_max: float | None = None
    logprob_gap_sum: float | None = None
    """Sum of |log π_old - log μ|: the trainer against the engine that sampled."""
    logprob_gap_max: float | None = None
    kl_sum: float | None = None
    entropy_sum: float | None = None
    dropped_tokens: int = 0
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

    def to_dict(self) -> dict[str, float]:
        """Return shares, means and extremes by name, of what was measured."""
        count = max(1, self.num_tokens)
        found = {
            "clip_fraction": self.clipped_tokens / count,
            "dropped_fraction": self.dropped_tokens / count,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "logprob_gap_mean": None
            if self.logprob_gap_sum is None
            else self.logprob_gap_sum / count,
            "logprob_gap_max": self.logprob_gap_max,
            "kl": None if self.kl_sum is None else self.kl_sum / count,
            "entropy": None if self.entropy_sum is None else self.entropy_sum / count,
        }
        return {name: value for name, value in found.items() if value is not None}


def compute_policy_metrics(
    loss: PolicyLoss,
    tokens: MaskedTokens,
    *,
    old: Tensor | None = None,
    sampled: Tensor | None = None,
    divergence: Tensor | None = None,
    entropy: Tensor | None = None,
    mismatch: Tensor | None = None,
) -> PolicyMetrics:
    """Return the signals of a microbatch, in one copy from the device.

    `old` and `sampled` are the log-probabilities of trainer and engine, `divergence` and `entropy`
    those of tokens, `mismatch` the weights of `mismatch`.
    """
    mask = tokens.mask
    if not mask.numel():
        return PolicyMetrics()
    found = {
        "clipped_tokens": (loss.clipped & mask).sum(),
        "ratio_min": loss.ratio.masked_fill(~mask, math.inf).min(),
        "ratio_max": loss.ratio.masked_fill(~mask, -math.inf).max(),
    }
    if old is not None and sampled is not None:
        gap = tokens.zero_masked(old - sampled).abs()
        found |= {"logprob_gap_sum": gap.sum(), "logprob_gap_max": gap.max()}
    if divergence is not None:
        found["kl_sum"] = tokens.zero_masked(divergence).sum()
    if entropy is not None:
        found["entropy_sum"] = tokens.zero_masked(entropy).sum()
    if mismatch is not None:
        found["dropped_tokens"] = ((mismatch == 0) & mask).sum()
    figures = torch.stack([each.detach().double() for each in (mask.sum(), *found.values())])
    count, *values = figures.tolist()
    if not count:
        return PolicyMetrics()
    named = dict(zip(found, values, strict=True))
    clipped, dropped = int(named.pop("clipped_tokens")), int(named.pop("dropped_tokens", 0.0))
    return PolicyMetrics(int(count), clipped, dropped_tokens=dropped, **named)


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Rewards of a whole step."""

    mean: float
    std: float
    """Over all answers, of a sample; 0 for one alone."""
    groups: int
    groups_without_signal: int
    """Groups whose answers all have the same reward: they move nothing."""
    min: float
    max: float

    def signal_warning(self) -> str:
        """Say in words what share of the step carries a signal; nothing where all of it does."""
        if not self.groups_without_signal:
            return ""
        if self.groups_without_signal < self.groups:
            share = f"{self.groups_without_signal} of {self.groups} groups carry no signal"
            return f"{share}: all answers to their prompt have the same reward"
        head = f"this step carries no signal: in each of {self.groups} groups all rewards are equal"
        if self.min != self.max:
            return f"{head}, so the policy loss is 0; sample more answers to each prompt"
        same = f"{head} (all are {self.max:g}), so the policy loss is 0"
        return (
            f"{same}; look at transcripts: prompts are too hard or too easy, or the verifier errs"
        )


def compute_reward_metrics(reward_S: Tensor, group_S: Tensor) -> RewardMetrics:
    """Return the signals of a step's answers, at least one."""
    known = compute_group_stats(reward_S, group_S)
    wide = reward_S.double()
    return RewardMetrics(
        mean=float(wide.mean()),
        std=float(wide.std()) if len(wide) > 1 else 0.0,
        groups=len(torch.unique(group_S)),
        groups_without_signal=len(torch.unique(group_S[known.all_equal])),
        min=float(wide.min()),
        max=float(wide.max()),
    )
