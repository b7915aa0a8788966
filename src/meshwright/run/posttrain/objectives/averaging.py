"""Weights of tokens over the totals of a whole step, so that microbatches simply add up.

A loss here is Σ weight · loss of a token. The weights hold the denominator, which is that of all
microbatches on all ranks, so the sum of all parts and of their gradients is the same however the
step was cut up: nothing is averaged twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.objectives.tokens import Tokens
from meshwright.spec.bounds import require, word

Averaging = Literal["token", "sequence", "constant"]
"""token     every token counts the same (DAPO, arXiv 2503.14476 Eq. 8)
sequence  every sequence counts the same (GRPO, arXiv 2402.03300 Eq. 3)
constant  every token counts 1 / longest of a sequence (Dr. GRPO, arXiv 2503.20783 §3.2)"""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a step holds altogether: add those of its microbatches and ranks."""

    tokens: int
    """Tokens that count."""
    sequences: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences)


def totals(parts: Iterable[Tokens]) -> Totals:
    """Return the totals of microbatches that lie here, of whole sequences."""
    total = Totals(0, 0)
    for part in parts:
        total += Totals(int(part.mask.sum()), part.sequences)
    return total


def weights(
    tokens: Tokens,
    of: Totals,
    averaging: Averaging = "token",
    *,
    longest: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of every token, 0 for those that do not count.

    `longest` is the most tokens an answer may have, where `averaging` is "constant".
    """
    require(word("averaging", averaging, get_args(Averaging)))
    counted = tokens.mask.to(dtype)
    if averaging == "token":
        return counted / max(1, of.tokens)
    if averaging == "sequence":
        own = tokens.spread(tokens.lengths().clamp(min=1)).to(dtype)
        return counted / (own * max(1, of.sequences))
    if longest is None or longest < 1:
        fix = "give the most tokens an answer may have"
        raise InputError([Problem("weights", f"longest is {longest}", fix)])
    return counted / (max(1, of.sequences) * longest)


def weighted_sum(losses: Tensor, weight: Tensor) -> Tensor:
    """Return Σ weight · loss, leaving out what has no weight even where it is not a number.

    That mends the value alone: what goes into a loss must be clean (`Tokens.clean`), or gradients
    of padding may be NaN. Policy losses see to it themselves.
    """
    return (losses.masked_fill(weight == 0, 0) * weight).sum()
