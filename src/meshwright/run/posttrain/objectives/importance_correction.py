"""Weights against a sampler that is not quite the policy: other kernels, other precision, stale.

r is π_old / μ: the trainer's probability of a token over that under which the engine sampled it.
Losses are multiplied by these weights, which have no gradient. Equal log-probabilities on both
sides give weights of exactly 1.
"""

from typing import get_args

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.choices import CorrectionLevel
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens
from meshwright.spec.field_checks import check_choice, raise_problems


def truncated_importance_weights(
    old: Tensor,
    sampled: Tensor,
    tokens: MaskedTokens,
    *,
    most: float = 2.0,
    span: CorrectionLevel = "token",
) -> Tensor:
    """Return min(r, most) for every token, 0 where none counts (truncated importance sampling).

    As in IMPALA (arXiv 1802.01561 §4.1), and since used against engines whose numbers differ.
    """
    if most < 1:
        fix = "give a number of at least 1"
        raise InputError([Problem("truncated", f"most is {most:g}", fix)])
    return tokens.zero_masked(_ratio(old, sampled, tokens, span).clamp(max=most))


def masked_importance_weights(
    old: Tensor,
    sampled: Tensor,
    tokens: MaskedTokens,
    *,
    least: float = 0.5,
    most: float = 5.0,
    span: CorrectionLevel = "token",
    weighted: bool = True,
) -> Tensor:
    """Return r where it lies in [least, most] and 0 elsewhere (IcePop, arXiv 2510.18855).

    Without `weighted` it is 1 in place of r: tokens are dropped, and not weighted.
    """
    if not 0 <= least <= 1 <= most:
        fix = "give 0 <= least <= 1 <= most"
        raise InputError([Problem("masked", f"bounds {least:g} and {most:g}", fix)])
    ratio = _ratio(old, sampled, tokens, span)
    inside = (ratio >= least) & (ratio <= most) & tokens.mask
    return (ratio if weighted else ratio.new_ones(())).where(inside, ratio.new_zeros(()))


def _ratio(old: Tensor, sampled: Tensor, tokens: MaskedTokens, span: CorrectionLevel) -> Tensor:
    raise_problems(check_choice("span", span, get_args(CorrectionLevel)))
    gap = tokens.zero_masked(old.detach()) - tokens.zero_masked(sampled.detach())
    if span == "sequence":
        gap = tokens.broadcast_to_tokens(tokens.sum_per_sequence(gap))
    elif span == "mean":
        gap = tokens.broadcast_to_tokens(tokens.mean_per_sequence(gap))
    return gap.exp()
