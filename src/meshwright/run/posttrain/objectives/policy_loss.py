"""Policy losses of tokens: PPO's clip, GSPO, CISPO and plain REINFORCE.

ρ is π / π_old of a token, or of its whole sequence; A its advantage. All of these return the loss
of every token, to be weighted and summed (`loss_weights`), and what became of the ratio.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens
from meshwright.spec.field_checks import check_choice, raise_problems

RatioLevel = Literal["token", "sequence"]

MAX_LOG_RATIO = 20.0
"""|log ρ| beyond which a token has no gradient: e²⁰ tells that something is wrong, infinity would
ruin the weights. verl bounds it likewise."""


class PolicyLoss(NamedTuple):
    """Losses of tokens, before weights."""

    losses: Tensor
    ratio: Tensor
    """ρ of each token, without gradient; 1 where none counts."""
    clipped: Tensor
    """bool: tokens whose gradient (PPO, GSPO) or weight (CISPO) the bounds took away or cut."""


def log_ratio(
    logp: Tensor, old: Tensor, tokens: MaskedTokens, level: RatioLevel = "token"
) -> Tensor:
    """Return log ρ of every token.

    "sequence" is the mean over the sequence (GSPO, arXiv 2507.18071 Eq. 7), whose gradient each
    token carries for itself (its Eq. 14, GSPO-token): with the weights of "sequence" averaging and
    one advantage per sequence, value and gradient are those of the sequence's own ratio.
    """
    raise_problems(check_choice("level", level, get_args(RatioLevel)))
    logp = tokens.zero_masked(logp)
    gap = logp - tokens.zero_masked(old.detach())
    if level == "sequence":
        mean = tokens.broadcast_to_tokens(tokens.mean_per_sequence(gap.detach()))
        gap = tokens.zero_masked(logp - logp.detach() + mean)
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip_loss(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: MaskedTokens,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    level: RatioLevel = "token",
    most: float | None = None,
) -> PolicyLoss:
    """Return -min(ρ · A, clip(ρ, 1 - low, 1 + high) · A) (PPO, arXiv 1707.06347 Eq. 7).

    low and high are `clip_ratio_low` and `clip_ratio_high`; with high above low it is DAPO's
    clip-higher (arXiv 2503.14476 Eq. 10). `level="sequence"` with bounds of some 3e-4 is GSPO.
    `most` also bounds ρ where A < 0: -min(…) ≤ -most · A (dual clip, arXiv 1912.09729).
    """
    _check(clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(logp, old, tokens, level).exp()
    advantage = tokens.zero_masked(advantage.detach())
    plain = -ratio * advantage
    near = -ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantage
    losses, cut = torch.maximum(plain, near), near > plain
    if most is not None:
        if most <= 1 + clip_ratio_high:
            fix = f"give a number above {1 + clip_ratio_high:g}, or None"
            raise InputError([Problem("clipped", f"most is {most}", fix)])
        bound = -most * advantage
        over = (advantage < 0) & (losses > bound)
        losses, cut = torch.where(over, bound, losses), cut | over
    return PolicyLoss(losses, ratio.detach(), cut)


def cispo_loss(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: MaskedTokens,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 4.0,
) -> PolicyLoss:
    """Return -clip(ρ, 1 - low, 1 + high) · A · log π, the clipped ρ being a mere weight.

    No token loses its gradient (MiniMax-M1, arXiv 2506.13585 Eq. 4 and 5). The paper sets no lower
    bound, which `clip_ratio_low` = 1 is.
    """
    _check(clip_ratio_low, clip_ratio_high, least=1.0)
    ratio = log_ratio(logp, old, tokens).detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = -weight * tokens.zero_masked(advantage.detach()) * tokens.zero_masked(logp)
    return PolicyLoss(losses, ratio, weight != ratio)


def reinforce_loss(logp: Tensor, advantage: Tensor, tokens: MaskedTokens) -> PolicyLoss:
    """Return -A · log π, for tokens of the policy as it is."""
    logp = tokens.zero_masked(logp)
    losses = -tokens.zero_masked(advantage.detach()) * logp
    return PolicyLoss(losses, torch.ones_like(logp).detach(), torch.zeros_like(tokens.mask))


def _check(clip_ratio_low: float, clip_ratio_high: float, least: float = 1.0 - 1e-9) -> None:
    if not (0 <= clip_ratio_low <= least and clip_ratio_high >= 0):
        what = f"bounds 1 - {clip_ratio_low:g} and 1 + {clip_ratio_high:g}"
        fix = (
            "give 0 <= clip_ratio_low < 1 (CISPO: <= 1) and clip_ratio_high >= 0, "
            "as distances from 1"
        )
        raise InputError([Problem("policy", what, fix)])
