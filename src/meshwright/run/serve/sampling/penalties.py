"""`Counts`: which tokens requests had and how often, and what that takes off their logits.

Only requests with a penalty have a place here; the tensor grows with the most there ever were.
"""

from collections.abc import Sequence

import torch

# In the count of a token: it was in the prompt. Counts of answers stay far below.
_IN_PROMPT = 1 << 30


class Counts:
    """How often each token was seen, for rows of an engine that ask for penalties."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._counts_SV = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, row: int) -> bool:
        return row in self._slots

    def slot(self, row: int) -> int:
        """Return the place of a row that was added."""
        return self._slots[row]

    def add(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Begin to count for a row, with what it has so far."""
        if not self._free:
            self._grow()
        slot = self._slots[row] = self._free.pop()
        device = self._counts_SV.device
        counts_V = self._counts_SV[slot].zero_()
        if output:
            output_T = torch.tensor(output, dtype=torch.int64).to(device, non_blocking=True)
            counts_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))
        seen = torch.tensor(sorted(set(prompt)), dtype=torch.int64).to(device, non_blocking=True)
        counts_V[seen] += _IN_PROMPT

    def drop(self, row: int) -> None:
        """Stop counting for a row, where it was counted."""
        if row in self._slots:
            self._free.append(self._slots.pop(row))

    def of(self, slots_P: torch.Tensor) -> torch.Tensor:
        """Return a copy of the counts at some places."""
        return self._counts_SV[slots_P]

    def count(self, slots_P: torch.Tensor, tokens_P: torch.Tensor, times_P: torch.Tensor) -> None:
        """Count tokens so many times each; a token of -1 (none) must have 0 times."""
        where = (slots_P, tokens_P.clamp(min=0))
        self._counts_SV.index_put_(where, times_P.to(torch.int32), accumulate=True)

    def _grow(self) -> None:
        have, vocab = self._counts_SV.shape
        more = self._counts_SV.new_zeros(max(have, 8), vocab)
        self._counts_SV = torch.cat([self._counts_SV, more])
        self._free.extend(range(have, self._counts_SV.shape[0]))


def penalise(
    logits_PV: torch.Tensor,
    counts_PV: torch.Tensor,
    repetition_P: torch.Tensor,
    presence_P: torch.Tensor,
    frequency_P: torch.Tensor,
) -> torch.Tensor:
    """Return logits less what repeating costs.

    The repetition penalty is that of transformers: logits of tokens in prompt or answer are divided
    by it where positive and multiplied where negative. Presence and frequency are OpenAI's: tokens
    of the answer lose `presence` once and `frequency` each time.
    """
    times_PV = counts_PV & (_IN_PROMPT - 1)
    factor_P1 = repetition_P[:, None]
    repeated_PV = torch.where(logits_PV > 0, logits_PV / factor_P1, logits_PV * factor_P1)
    logits_PV = torch.where(counts_PV > 0, repeated_PV, logits_PV)
    logits_PV = logits_PV - frequency_P[:, None] * times_PV
    return logits_PV - presence_P[:, None] * (times_PV > 0)
