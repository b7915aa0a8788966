"""Advantages of single tokens: rewards along an answer, a critic's values, whitening over a step.

The sums over all later tokens, A_t = x_t + c · A_{t+1}, take log₂ T steps: after one of width k,
A_t covers 2k tokens, because the tokens from t + k on stand in A_{t+k} already, times cᵏ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens

_LEAST_VARIANCE = 1e-8
"""Added to a variance that is divided by, as in verl's and TRL's whitening."""


@dataclass(frozen=True, slots=True)
class WhiteningMoments:
    """Count, sum and sum of squares of what is whitened: add those of all parts of a step."""

    count: float
    sum: float
    sum_of_squares: float

    @property
    def mean(self) -> float:
        """The mean; 0 of nothing."""
        return self.sum / max(1.0, self.count)

    @property
    def variance(self) -> float:
        """Of a sample (n - 1); 0 where there are fewer than two."""
        rest = self.sum_of_squares - self.count * self.mean * self.mean
        return max(0.0, rest) / max(1.0, self.count - 1)

    def __add__(self, other: "WhiteningMoments") -> "WhiteningMoments":
        return WhiteningMoments(
            self.count + other.count,
            self.sum + other.sum,
            self.sum_of_squares + other.sum_of_squares,
        )


def compute_whitening_stats(value: Tensor, tokens: MaskedTokens) -> WhiteningMoments:
    """Return the moments of the counted tokens that lie here."""
    counted = value[tokens.mask].double()
    return WhiteningMoments(len(counted), float(counted.sum()), float(counted.square().sum()))


def whiten(value: Tensor, tokens: MaskedTokens, of: WhiteningMoments) -> Tensor:
    """Return values with mean 0 and variance 1 over the tokens of the whole step."""
    if of.count < 2:
        what = f"{of.count:.0f} tokens have no variance"
        raise InputError([Problem("whiten", what, "add up the moments of the whole step")])
    return tokens.zero_masked((value - of.mean) * (of.variance + _LEAST_VARIANCE) ** -0.5)


def terminal_rewards(reward_S: Tensor, tokens: MaskedTokens) -> Tensor:
    """Return rewards of whole answers as rewards of tokens: all at the last one that counts."""
    rows, lie = tokens.pad_to_rows(tokens.mask.to(reward_S.dtype))
    last = tokens.count_per_sequence() - 1
    out = torch.zeros_like(rows)
    some = last >= 0
    out[some, last[some]] = reward_S[some]
    return tokens.unpad_rows(out, lie)


def discounted_returns(reward: Tensor, tokens: MaskedTokens, *, gamma: float = 1.0) -> Tensor:
    """Return Σ discountᵏ · reward of the k-th later token."""
    rows, lie = tokens.pad_to_rows(reward)
    return tokens.unpad_rows(_later(rows, gamma), lie)


def reinforce_plus_plus_advantages(
    reward: Tensor,
    tokens: MaskedTokens,
    *,
    gamma: float = 1.0,
    of: WhiteningMoments | None = None,
) -> Tensor:
    """Return discounted rewards, whitened over the step (REINFORCE++, arXiv 2501.03262).

    `reward` is per token, the KL penalty included. For its variant with a baseline, whiten
    `tokens.broadcast_to_tokens(centered_advantages(...))` instead. `of` are the moments of
    `discounted_returns` over the whole step, where only a part of it lies here.
    """
    value = discounted_returns(reward, tokens, gamma=gamma)
    return whiten(value, tokens, compute_whitening_stats(value, tokens) if of is None else of)


def gae_advantages(
    reward: Tensor,
    value: Tensor,
    tokens: MaskedTokens,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Return advantages and the returns a critic shall learn (GAE, arXiv 1506.02438 Eq. 16).

    `value` is the critic's, of the state before each token; behind the last token it is 0.
    `gae_lambda` is the paper's λ.
    """
    rewards_SL, lie = tokens.pad_to_rows(reward)
    values_SL, _ = tokens.pad_to_rows(value.detach())
    after_SL = torch.nn.functional.pad(values_SL, (0, 1))[:, 1:]
    advantage_SL = _later(rewards_SL + gamma * after_SL - values_SL, gamma * gae_lambda)
    advantage = tokens.unpad_rows(advantage_SL, lie)
    return advantage, advantage + tokens.zero_masked(value.detach())


def value_loss(
    value: Tensor, wanted: Tensor, *, before: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Return each token's ½ (value - return)², clipped around the value `before` the step.

    PPO's implementations take the larger of the clipped and the plain error (arXiv 2005.12729).
    """
    plain = (value - wanted).square()
    if clip is None:
        return 0.5 * plain
    if before is None or clip <= 0:
        what = (
            f"clip is {clip}, values before the step are {'missing' if before is None else 'there'}"
        )
        raise InputError([Problem("value_loss", what, "give both, with clip above 0, or neither")])
    near = before + (value - before).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - wanted).square())


def _later(rows_SL: Tensor, factor: float) -> Tensor:
    """Return the sum over k of factorᵏ · x_{t+k}."""
    width, length = 1, rows_SL.shape[1]
    while width < length:
        ahead = torch.nn.functional.pad(rows_SL, (0, width))[:, width:]
        rows_SL = rows_SL + factor**width * ahead
        width *= 2
    return rows_SL
