"""`MaskedTokens`: which tokens of a microbatch count and whose they are, padded or packed alike.

Whatever the other modules of this package compute per token has the shape of `mask`, be it [B, T]
rows of padded sequences or [N] tokens of packed ones; per sequence it is [S].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem

AllReduce = Callable[[Tensor], Tensor]
"""Adds a tensor up over the ranks that hold parts of the same sequences."""


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Tokens of one microbatch."""

    mask: Tensor
    """bool: those that count, which are the ones the policy sampled (or shall learn)."""
    sequence_ids: Tensor
    """int64, the same shape: which sequence each belongs to, in its order; anything ≥ 0 where
    `mask` is false."""
    num_sequences: int
    """How many there are, those without a token that counts included."""
    all_reduce: AllReduce | None = None
    """Where sequences are shared between ranks (context parallelism), which all must number them
    alike; None where whole sequences lie here."""

    def __post_init__(self) -> None:
        where = "tokens"
        if self.mask.dtype != torch.bool or self.mask.shape != self.sequence_ids.shape:
            what = f"mask is {self.mask.dtype} {tuple(self.mask.shape)}, sequence has shape "
            fix = "give a bool for every token and the number of its sequence"
            raise InputError([Problem(where, what + str(tuple(self.sequence_ids.shape)), fix)])

    def zero_masked(self, value: Tensor) -> Tensor:
        """Return what was computed per token with noughts where no token counts.

        Padding may hold anything, and NaN times a weight of 0 would still be NaN, in gradients too.
        """
        if value.shape != self.mask.shape:
            what = f"{tuple(value.shape)} values for {tuple(self.mask.shape)} tokens"
            raise InputError([Problem("tokens", what, "give one value for every token")])
        return value.masked_fill(~self.mask, 0)

    def sum_per_sequence(self, value: Tensor) -> Tensor:
        """Return the sum over the counted tokens of each sequence, [S].

        Where ranks share sequences the value is that of whole sequences, and gradients flow to the
        tokens of this rank: each rank has its own part of them.
        """
        flat = self.zero_masked(value).flatten()
        here = flat.new_zeros(self.num_sequences).index_add(0, self.sequence_ids.flatten(), flat)
        if self.all_reduce is None:
            return here
        return here + (self.all_reduce(here.detach()) - here.detach())

    def count_per_sequence(self) -> Tensor:
        """Return how many tokens count in each sequence, [S] int64."""
        return self.sum_per_sequence(self.mask.long())

    def mean_per_sequence(self, value: Tensor) -> Tensor:
        """Return the mean over the counted tokens of each sequence, [S]; 0 where there is none."""
        return self.sum_per_sequence(value) / self.count_per_sequence().clamp(min=1)

    def broadcast_to_tokens(self, value_S: Tensor) -> Tensor:
        """Return every token's own entry of what was computed per sequence."""
        return value_S[self.sequence_ids]

    def pad_to_rows(self, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the counted tokens as rows [S, L], filled up with 0, and where each of them lies.

        Tokens that do not count, such as a tool's answer between two turns, leave no gap.
        """
        if self.all_reduce is not None:
            fix = "compute this for the whole step, before its tokens are shared out"
            raise InputError([Problem("tokens", "sequences are on several ranks", fix)])
        counted = self.mask.flatten()
        own = self.sequence_ids.flatten()[counted]
        order = torch.argsort(own, stable=True)
        lengths = torch.bincount(own, minlength=self.num_sequences)
        starts = lengths.cumsum(0) - lengths
        column = torch.empty_like(own)
        column[order] = torch.arange(len(own), device=own.device) - starts[own[order]]
        longest = int(lengths.max()) if len(own) else 0
        rows = value.new_zeros(self.num_sequences, longest)
        rows[own, column] = value.flatten()[counted]
        return rows, (own, column)

    def unpad_rows(self, rows_SL: Tensor, lie: tuple[Tensor, Tensor]) -> Tensor:
        """Return values of `rows` in the shape of the tokens, 0 where none counts."""
        out = rows_SL.new_zeros(self.mask.numel())
        out[self.mask.flatten()] = rows_SL[lie]
        return out.view(self.mask.shape)


def padded_tokens(mask_BT: Tensor) -> MaskedTokens:
    """Return tokens of which every row is one sequence."""
    rows = torch.arange(mask_BT.shape[0], device=mask_BT.device).unsqueeze(1)
    return MaskedTokens(mask_BT, rows.expand(mask_BT.shape), mask_BT.shape[0])


def packed_tokens(mask_N: Tensor, lengths: list[int]) -> MaskedTokens:
    """Return tokens of sequences that follow each other, of so many tokens (counted or not)."""
    if sum(lengths) != mask_N.numel() or mask_N.dim() != 1:
        what = f"lengths add up to {sum(lengths)}, the mask has shape {tuple(mask_N.shape)}"
        raise InputError([Problem("tokens", what, "give the length of every packed sequence")])
    sizes = torch.tensor(lengths, dtype=torch.int64, device=mask_N.device)
    own = torch.repeat_interleave(torch.arange(len(lengths), device=mask_N.device), sizes)
    return MaskedTokens(mask_N, own, len(lengths))
