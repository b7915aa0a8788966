"""How far the policy is from a reference, estimated from the log-probabilities of sampled tokens.

With d = log π - log ref of a token that π sampled (Schulman, "Approximating KL divergence", 2020):

    k1 = d            unbiased, of either sign
    k2 = d² / 2       biased, never negative
    k3 = e⁻ᵈ - 1 + d  unbiased, never negative (GRPO's, arXiv 2402.03300 Eq. 4)

As a value any of them may be taken off the reward. In the loss their gradients count, and these are
another matter (arXiv 2510.01555). For tokens of π itself that of k1 is 0 on average: it restrains
nothing; that of k2 is the gradient of KL(π ‖ ref); that of k3 is the gradient of KL(ref ‖ π). Times
the ratio π / π_old, with its gradient, k1 and k3 both have the gradient of KL(π ‖ ref), also for
tokens of π_old.
"""

from typing import get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.choices import KLEstimator
from meshwright.spec.field_checks import check_choice, raise_problems


def estimate_kl(logp: Tensor, reference: Tensor, kind: KLEstimator = "k3") -> Tensor:
    """Return each token's estimate of KL(π ‖ ref), in nats."""
    raise_problems(check_choice("kind", kind, get_args(KLEstimator)))
    gap = logp - reference.detach()
    if kind == "k1":
        return gap
    if kind == "k2":
        return 0.5 * gap.square()
    return torch.expm1(-gap) + gap


def subtract_kl_from_reward(
    reward: Tensor, logp: Tensor, reference: Tensor, *, strength: float, kind: KLEstimator = "k1"
) -> Tensor:
    """Return rewards of tokens less the divergence, as numbers without gradient."""
    return reward - strength * estimate_kl(logp.detach(), reference, kind)


def kl_loss(
    logp: Tensor,
    reference: Tensor,
    *,
    strength: float,
    kind: KLEstimator = "k2",
    ratio: Tensor | None = None,
) -> Tensor:
    """Return what each token's loss gains; `ratio` is π / π_old with its gradient.

    k1 without a ratio is refused: it would add noise and keep nothing near the reference.
    """
    value = estimate_kl(logp, reference, kind)
    if ratio is not None:
        if kind == "k2":
            fix = "leave the ratio away with k2, or take k3"
            raise InputError([Problem("divergence", "k2 times a ratio estimates no KL", fix)])
        return strength * ratio * value
    if kind == "k1":
        fix = "take k2 or k3, or give the ratio, or take k1 off the reward"
        raise InputError([Problem("divergence", "the gradient of k1 is 0 on average", fix)])
    return strength * value
