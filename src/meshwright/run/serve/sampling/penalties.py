"""`TokenCounts`: which tokens requests had and how often, and what that takes off their logits.

Only requests with a penalty have a place here; the tensor grows with the most there ever were.
"""

from collections.abc import Sequence

import torch

from meshwright.run.kernels.sampling.penalties import IN_PROMPT


class TokenCounts:
    """How often each token was seen, for rows of an engine that ask for penalties."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        """By place and token."""
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, row: int) -> bool:
        return row in self._slots

    def row_slot(self, row: int) -> int:
        """Return the place of a row that was added."""
        return self._slots[row]

    def add(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Begin to count for a row, with what it has so far."""
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        device = self.counts.device
        counts_V = self.counts[slot].zero_()
        if output:
            output_T = torch.tensor(output, dtype=torch.int64).to(device, non_blocking=True)
            counts_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))
        seen = torch.tensor(sorted(set(prompt)), dtype=torch.int64).to(device, non_blocking=True)
        counts_V[seen] += IN_PROMPT

    def remove(self, row: int) -> None:
        """Stop counting for a row, where it was counted."""
        if row in self._slots:
            self._free.append(self._slots.pop(row))

    def count(self, slots_P: torch.Tensor, tokens_P: torch.Tensor, times_P: torch.Tensor) -> None:
        """Count tokens so many times each; a token of -1 (none) must have 0 times."""
        where = (slots_P, tokens_P.clamp(min=0))
        self.counts.index_put_(where, times_P.to(torch.int32), accumulate=True)

    def _grow(self) -> None:
        have, vocab = self.counts.shape
        more = self.counts.new_zeros(max(have, 8), vocab)
        self.counts = torch.cat([self.counts, more])
        self._free.extend(range(have, self.counts.shape[0]))
