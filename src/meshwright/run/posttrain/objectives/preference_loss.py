"""Losses from preferences: DPO, IPO, KTO and reward models.

All take figures of whole answers and return one loss for each pair (P) or answer (S); sum them over
the number of pairs or answers of the whole step. `gain` is log π - log ref of an answer: the sum
over its tokens (`MaskedTokens.sum_per_sequence`), or their mean.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from meshwright.errors import InputError, Problem


def dpo_loss(
    chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Tensor:
    """Return -log σ(β (gain of the chosen - gain of the rejected)) (arXiv 2305.18290 Eq. 7).

    `label_smoothing` is the share of pairs thought to be labelled the wrong way round (cDPO).
    """
    _above_nought("beta", beta)
    if not 0 <= label_smoothing < 0.5:
        fix = "give a share of at least 0 and less than a half"
        raise InputError([Problem("dpo", f"label_smoothing is {label_smoothing:g}", fix)])
    margin = beta * (chosen_P - rejected_P)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo_loss(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return (gain of the chosen - gain of the rejected - 1 / 2β)² (arXiv 2310.12036 Eq. 17).

    β is the paper's τ. The paper's gains are sums over tokens; TRL gives it means, for which the
    margin 1 / 2β is that of one token.
    """
    _above_nought("beta", beta)
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def kto_loss(
    gain_S: Tensor,
    wanted_S: Tensor,
    *,
    baseline: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return λ (1 - σ(±β (gain - z₀))), + where an answer is wanted (arXiv 2402.01306 Eq. 7).

    `baseline` is z₀ of the whole step: the same for all its microbatches.
    """
    _above_nought("beta", beta)
    sign = torch.where(wanted_S, 1.0, -1.0).to(gain_S.dtype)
    weight = torch.full_like(gain_S, undesirable_weight).masked_fill(wanted_S, desirable_weight)
    return weight * torch.sigmoid(-sign * beta * (gain_S - baseline))


def bradley_terry_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    margin_P: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """Return -log σ(reward of the chosen - reward of the rejected - margin).

    InstructGPT's loss (arXiv 2203.02155 Eq. 1), with Llama 2's margin (arXiv 2307.09288 Eq. 2).
    Only differences count, so rewards may drift; `center_rewards_coefficient` times (sum of both)²
    keeps them around 0 (arXiv 2312.09244 §2).
    """
    gap = chosen_P - rejected_P
    gap = gap if margin_P is None else gap - margin_P
    losses = -logsigmoid(gap)
    if not center_rewards_coefficient:
        return losses
    return losses + center_rewards_coefficient * (chosen_P + rejected_P).square()


def _above_nought(name: str, value: float) -> None:
    if not value > 0:
        raise InputError([Problem("preference", f"{name} is {value:g}", "give a number above 0")])
