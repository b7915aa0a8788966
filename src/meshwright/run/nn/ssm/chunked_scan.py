"""`SequenceChunks`: sequences cut into chunks, as linear recurrences compute them.

Within a chunk they are products of matrices, from chunk to chunk a state is carried.

Shapes: B sequences, T positions, C chunks, L positions of a chunk, H heads.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls
# ruff: noqa: N815

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.nn.ssm.causal_conv1d import CausalConv1d


class RecurrentCache(Protocol):
    """Runs a recurrence over pieces of sequences, from the states that earlier pieces left."""

    def convolve(self, conv: CausalConv1d, x_BTC: Tensor) -> Tensor:
        """Convolve, reading the tokens before a piece from where they are kept."""

    def scan(self, *terms: Tensor) -> Tensor:
        """Run the recurrence; the terms are those of the mixer's own scan."""


class ChunkDecays(NamedTuple):
    """What is left of what, given how fast each head forgets."""

    within_BCHLL: Tensor
    """Of token m's write when token l of its chunk reads it; 0 where l does not see m."""
    to_chunk_end_BCHL: Tensor
    """Of a token's write at the end of its chunk."""
    from_chunk_start_BCHL: Tensor
    """Of the state that enters the chunk, when a token reads it."""
    across_chunk_BCH: Tensor
    """Of the state that enters the chunk, at its end."""


class SequenceChunks(NamedTuple):
    """How one batch of sequences is cut, and which of its tokens may see which state."""

    length: int
    """Positions of a sequence, T."""
    chunk_length: int
    """Positions of a chunk, L; the last chunk is padded."""
    intra_chunk_mask: Tensor
    """Token l sees token m of its chunk: m is not later, and of the same document (…LL)."""
    reads_initial_state: Tensor | None
    """Token l belongs to the document that ended the chunk before (BCL); None: it always does."""
    writes_final_state: Tensor | None
    """Token l belongs to the document that ends its chunk (BCL); None: it always does."""

    def split(self, x: Tensor) -> Tensor:
        """Cut `x_BT…` into `x_BCL…`, padded with zeros."""
        short = -self.length % self.chunk_length
        if short:
            x = functional.pad(x, [0, 0] * (x.dim() - 2) + [0, short])
        cut: Tensor = x.unflatten(1, (-1, self.chunk_length))
        return cut

    def compute_decays(self, sums_BCHL: Tensor) -> ChunkDecays:
        """Return the decays that follow from their logarithms, summed from each chunk's start."""
        visible = (
            self.intra_chunk_mask
            if self.reads_initial_state is None
            else self.intra_chunk_mask[:, :, None]
        )
        gaps = sums_BCHL[..., :, None] - sums_BCHL[..., None, :]
        kept_BCHL = (sums_BCHL[..., -1:] - sums_BCHL).exp()
        reads_BCHL = sums_BCHL.exp()
        carried_BCH = reads_BCHL[..., -1]
        if self.reads_initial_state is not None and self.writes_final_state is not None:
            kept_BCHL = kept_BCHL * self.writes_final_state[:, :, None]
            reads_BCHL = reads_BCHL * self.reads_initial_state[:, :, None]
            carried_BCH = carried_BCH * self.reads_initial_state[..., -1:]
        within_BCHLL = gaps.masked_fill(~visible, -math.inf).exp()
        return ChunkDecays(within_BCHLL, kept_BCHL, reads_BCHL, carried_BCH)

    def join(self, x: Tensor) -> Tensor:
        """Put `x_BCL…` together again as `x_BT…`."""
        return x.flatten(1, 2)[:, : self.length]


def make_chunks(
    length: int, chunk: int, documents_BT: Tensor | None, device: torch.device
) -> SequenceChunks:
    """Cut sequences of `length` into chunks; `documents_BT` numbers the document of each token."""
    chunk = min(chunk, length)
    visible = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
    if documents_BT is None:
        return SequenceChunks(length, chunk, visible, None, None)
    short = -length % chunk
    # Padding continues the last document, so that it changes no state that anyone reads.
    padded = torch.cat([documents_BT, documents_BT[:, -1:].expand(-1, short)], 1)
    documents_BCL = padded.unflatten(1, (-1, chunk))
    ends_BC = documents_BCL[..., -1]
    # The chunk before the first ends no document.
    before_BC = functional.pad(ends_BC[:, :-1], (1, 0), value=-1)
    return SequenceChunks(
        length,
        chunk,
        visible & (documents_BCL[..., :, None] == documents_BCL[..., None, :]),
        documents_BCL == before_BC[..., None],
        documents_BCL == ends_BC[..., None],
    )
