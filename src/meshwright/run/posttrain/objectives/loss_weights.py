"""Weights of tokens over the totals of a whole step, so that microbatches simply add up.

A loss here is Σ weight · loss of a token. The weights hold the denominator, which is that of all
microbatches on all ranks, so the sum of all parts and of their gradients is the same however the
step was cut up: nothing is averaged twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.choices import LossAggregation
from meshwright.run.posttrain.objectives.masked_tokens import MaskedTokens
from meshwright.spec.field_checks import check_choice, raise_problems


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What a step holds altogether: add those of its microbatches and ranks."""

    tokens: int
    """Tokens that count."""
    sequences: int

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(self.tokens + other.tokens, self.sequences + other.sequences)


def sum_step_totals(parts: Iterable[MaskedTokens]) -> StepTotals:
    """Return the totals of microbatches that lie here, of whole sequences."""
    total = StepTotals(0, 0)
    for part in parts:
        total += StepTotals(int(part.mask.sum()), part.num_sequences)
    return total


def compute_token_weights(
    tokens: MaskedTokens,
    of: StepTotals,
    loss_agg_mode: LossAggregation = "token",
    *,
    longest: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of every token, 0 for those that do not count.

    `longest` is the most tokens an answer may have, where `loss_agg_mode` is "constant".
    """
    raise_problems(check_choice("loss_agg_mode", loss_agg_mode, get_args(LossAggregation)))
    counted = tokens.mask.to(dtype)
    if loss_agg_mode == "token":
        return counted / max(1, of.tokens)
    if loss_agg_mode == "sequence":
        own = tokens.broadcast_to_tokens(tokens.count_per_sequence().clamp(min=1)).to(dtype)
        return counted / (own * max(1, of.sequences))
    if longest is None or longest < 1:
        fix = "give the most tokens an answer may have"
        raise InputError([Problem("weights", f"longest is {longest}", fix)])
    return counted / (max(1, of.sequences) * longest)


def weighted_sum(losses: Tensor, weight: Tensor) -> Tensor:
    """Return Σ weight · loss, leaving out what has no weight even where it is not a number.

    That mends the value alone: what goes into a loss must be clean (`MaskedTokens.zero_masked`), or
    gradients of padding may be NaN. Policy losses see to it themselves.
    """
    return (losses.masked_fill(weight == 0, 0) * weight).sum()
