"""What a microbatch costs a policy, from its log-probabilities, and what people see of it.

Losses are sums of weighted tokens, and weights hold the totals of the whole update: however it was
cut into microbatches and dealt to ranks, all of them simply add up.
"""

from typing import NamedTuple

from torch import Tensor

from meshwright.run.posttrain.objectives import (
    importance_correction,
    loss_weights,
    policy_loss,
    token_advantages,
)
from meshwright.run.posttrain.objectives.kl_penalty import estimate_kl, kl_loss
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens
from meshwright.run.posttrain.objectives.step_metrics import PolicyMetrics, compute_policy_metrics
from meshwright.run.posttrain.rl.config.objective_config import ObjectiveConfig
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch
from meshwright.run.posttrain.rl.trainer.step_preparation import TrainingMicrobatch


class MicrobatchLoss(NamedTuple):
    """What became of a microbatch."""

    loss: Tensor
    """What is differentiated: a share of the update's."""
    metrics: PolicyMetrics


def compute_policy_loss(
    aim: ObjectiveConfig,
    part: TrainingMicrobatch,
    logp: Tensor,
    entropy: Tensor | None,
    *,
    of: loss_weights.StepTotals,
    longest: int,
) -> MicrobatchLoss:
    """Return what a microbatch of an update costs; `logp` and `entropy` are of its tokens."""
    rows, tokens = part.microbatch, part.microbatch.loss_tokens
    old = rows.sampler_logprobs if part.old_logprobs is None else part.old_logprobs
    loss = _policy_loss(aim, logp, old, tokens, part.advantages)
    losses, apart = loss.losses, None
    if part.ref_logprobs is not None:
        if aim.kl_in == "loss":
            losses = losses + _pull(aim, logp, part.ref_logprobs, old, tokens)
        apart = estimate_kl(logp.detach(), part.ref_logprobs)
    weight = loss_weights.compute_token_weights(tokens, of, aim.loss_agg_mode, longest=longest)
    correction = None
    if part.old_logprobs is not None:
        correction = _correction(aim, part.old_logprobs, rows)
        weight = weight * correction
    total = loss_weights.weighted_sum(losses, weight)
    seen = None if entropy is None else entropy.detach()
    return MicrobatchLoss(
        total,
        compute_policy_metrics(loss, tokens, divergence=apart, entropy=seen, mismatch=correction),
    )


def compute_value_loss(
    part: TrainingMicrobatch, value: Tensor, *, of: loss_weights.StepTotals, clip: float | None
) -> Tensor:
    """Return a microbatch's share of what a critic minimises; `value` is what it says now."""
    assert part.returns is not None, "a step with a critic says what it shall learn"
    tokens = part.microbatch.loss_tokens
    losses = token_advantages.value_loss(
        tokens.zero_masked(value), part.returns, before=part.values, clip=clip
    )
    return loss_weights.weighted_sum(losses, loss_weights.compute_token_weights(tokens, of))


class LogprobGap:
    """|Δ log p| of engine and trainer, over tokens that the present weights drew."""

    def __init__(self, total: float = 0.0, most: float = 0.0, count: int = 0) -> None:
        self.sum, self.max, self.count = total, most, count

    def add(self, logp: Tensor, rows: RolloutMicrobatch, fresh_S: Tensor) -> None:
        """Add those of a microbatch; `fresh_S` tells which answers the present weights drew."""
        mask = rows.loss_tokens.mask & fresh_S[rows.rollout_indices][:, None]
        gap = (logp.detach() - rows.sampler_logprobs).abs()[mask].double()
        if gap.numel():
            self.sum += float(gap.sum())
            self.max = max(self.max, float(gap.max()))
            self.count += gap.numel()

    def __add__(self, other: "LogprobGap") -> "LogprobGap":
        most = max(self.max, other.max)
        return LogprobGap(self.sum + other.sum, most, self.count + other.count)

    def to_dict(self) -> dict[str, float]:
        """Return the mean and the largest; nothing where there is none."""
        if not self.count:
            return {}
        return {"logprob_gap_mean": self.sum / self.count, "logprob_gap_max": self.max}


def _policy_loss(
    aim: ObjectiveConfig, logp: Tensor, old: Tensor, tokens: MaskedTokens, advantage: Tensor
) -> policy_loss.PolicyLoss:
    low, high = aim.ratio_bounds
    if aim.loss == "reinforce":
        return policy_loss.reinforce_loss(logp, advantage, tokens)
    if aim.loss == "cispo":
        return policy_loss.cispo_loss(
            logp, old, advantage, tokens, clip_ratio_low=low, clip_ratio_high=high
        )
    level: policy_loss.RatioLevel = "sequence" if aim.loss == "gspo" else "token"
    most = aim.dual_clip
    return policy_loss.ppo_clip_loss(
        logp,
        old,
        advantage,
        tokens,
        clip_ratio_low=low,
        clip_ratio_high=high,
        level=level,
        most=most,
    )


def _pull(
    aim: ObjectiveConfig, logp: Tensor, reference: Tensor, old: Tensor, tokens: MaskedTokens
) -> Tensor:
    """Return what KL to the reference adds to the losses of tokens."""
    ratio = policy_loss.log_ratio(logp, old, tokens).exp() if aim.kl_weighted else None
    return kl_loss(
        logp, reference, strength=aim.kl_coef, kind=aim.resolved_kl_estimator, ratio=ratio
    )


def _correction(aim: ObjectiveConfig, old: Tensor, rows: RolloutMicrobatch) -> Tensor:
    most, span = aim.correction_cap, aim.correction_level
    if aim.importance_correction == "truncated":
        return importance_correction.truncated_importance_weights(
            old, rows.sampler_logprobs, rows.loss_tokens, most=most, span=span
        )
    least = 1 / most
    return importance_correction.masked_importance_weights(
        old, rows.sampler_logprobs, rows.loss_tokens, least=least, most=most, span=span
    )
