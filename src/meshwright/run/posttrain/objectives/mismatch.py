"""Weights against a sampler that is not quite the policy: other kernels, other precision, stale.

r is π_old / μ: the trainer's probability of a token over that under which the engine sampled it.
Losses are multiplied by these weights, which have no gradient. Equal log-probabilities on both
sides give weights of exactly 1.
"""

from typing import Literal, get_args

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.tokens import Tokens
from meshwright.spec.bounds import require, word

Span = Literal["token", "sequence", "mean"]
"""Over what r is taken: a token; the product over its sequence; the sequence's geometric mean."""


def truncated(
    old: Tensor, sampled: Tensor, tokens: Tokens, *, most: float = 2.0, span: Span = "token"
) -> Tensor:
    """Return min(r, most) for every token, 0 where none counts (truncated importance sampling).

    As in IMPALA (arXiv 1802.01561 §4.1), and since used against engines whose numbers differ.
    """
    if most < 1:
        fix = "give a number of at least 1"
        raise InputError([Problem("truncated", f"most is {most:g}", fix)])
    return tokens.clean(_ratio(old, sampled, tokens, span).clamp(max=most))


def masked(
    old: Tensor,
    sampled: Tensor,
    tokens: Tokens,
    *,
    least: float = 0.5,
    most: float = 5.0,
    span: Span = "token",
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


def _ratio(old: Tensor, sampled: Tensor, tokens: Tokens, span: Span) -> Tensor:
    require(word("span", span, get_args(Span)))
    gap = tokens.clean(old.detach()) - tokens.clean(sampled.detach())
    if span == "sequence":
        gap = tokens.spread(tokens.sums(gap))
    elif span == "mean":
        gap = tokens.spread(tokens.means(gap))
    return gap.exp()
