"""`PackedSequences`: where the documents of packed sequences start, so that none sees another.

A batch of B sequences of T positions is read as one row of B·T tokens; a document never crosses
the end of a sequence. Everything derived from the starts (ids, positions, finer cuts) is made once
and kept with the value. Nothing here knows which kernel uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """The documents of a batch, by where each starts in its B·T tokens."""

    cu_seqlens: Tensor
    """int32, one more than there are documents: each one's first token, and last the number of
    tokens. Repeated entries are empty documents, which do no harm."""
    max_length: int
    """An upper bound of the tokens of any one document."""
    cache: dict[object, Any] = field(default_factory=dict, repr=False)
    """What was derived from the starts, by what it is."""

    @staticmethod
    def from_lengths(
        lengths: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> "PackedSequences":
        """Make them from the lengths of the documents in each sequence of a batch."""
        totals = {sum(row) for row in lengths}
        if len(totals) != 1 or any(length < 1 for row in lengths for length in row):
            what = f"sequences hold {sorted(totals)} tokens, or a document is empty"
            raise InputError([Problem("documents", what, "fill every sequence to one length")])
        flat = torch.tensor([0, *(length for row in lengths for length in row)])
        starts = flat.cumsum(0).to(device, torch.int32)
        return PackedSequences(starts, int(flat.max()))

    @staticmethod
    def from_sequences(batch: int, length: int, device: torch.device | str) -> "PackedSequences":
        """Make each sequence of a batch one document."""
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return PackedSequences(starts, length)

    def ids(self, batch: int, length: int) -> Tensor:
        """Return the number of the document each token belongs to, int64 of shape (B, T)."""
        if "ids" not in self.cache:
            tokens = torch.arange(batch * length, dtype=torch.int32, device=self.cu_seqlens.device)
            found = torch.searchsorted(self.cu_seqlens, tokens, right=True) - 1
            self.cache["ids"] = found.view(batch, length)
        ids: Tensor = self.cache["ids"]
        return ids

    def positions(self, batch: int, length: int) -> Tensor:
        """Return each token's position in its document, int64 of shape (B, T)."""
        if "positions" not in self.cache:
            ids = self.ids(batch, length)
            tokens = torch.arange(batch * length, device=ids.device).view(batch, length)
            self.cache["positions"] = tokens - self.cu_seqlens.long()[ids]
        positions: Tensor = self.cache["positions"]
        return positions

    def split_by_chunk(self, chunk: int, batch: int, length: int) -> "PackedSequences":
        """Return the same documents, each cut into pieces of `chunk` tokens."""
        if ("cut", chunk) not in self.cache:
            firsts = (self.positions(batch, length) % chunk == 0).flatten()
            # As many as there can be, without asking the device how many there are.
            most = len(self.cu_seqlens) - 1 + batch * length // chunk
            starts = torch.nonzero_static(firsts, size=most + 1, fill_value=batch * length)
            pieces = PackedSequences(starts.flatten().int(), min(chunk, self.max_length))
            self.cache["cut", chunk] = pieces
        pieces_made: PackedSequences = self.cache["cut", chunk]
        return pieces_made
