"""`Counts`: which tokens requests had and how often, and what that takes off their logits.

Only requests with a penalty have a place here; the tensor grows with the most there ever were.
"""

# Triton compiles the kernel itself: its arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.run.kernels.language import Backend, on_triton, tl, triton

# In the count of a token: it was in the prompt. Counts of answers stay far below.
_IN_PROMPT = 1 << 30
_BLOCK = 2048


class Asked(NamedTuple):
    """Lines of logits whose requests ask for penalties, and what they ask."""

    lines: torch.Tensor
    slots: torch.Tensor
    """Where their counts are."""
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class Counts:
    """How often each token was seen, for rows of an engine that ask for penalties."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.all = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        """By place and token."""
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
        device = self.all.device
        counts_V = self.all[slot].zero_()
        if output:
            output_T = torch.tensor(output, dtype=torch.int64).to(device, non_blocking=True)
            counts_V.index_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))
        seen = torch.tensor(sorted(set(prompt)), dtype=torch.int64).to(device, non_blocking=True)
        counts_V[seen] += _IN_PROMPT

    def drop(self, row: int) -> None:
        """Stop counting for a row, where it was counted."""
        if row in self._slots:
            self._free.append(self._slots.pop(row))

    def count(self, slots_P: torch.Tensor, tokens_P: torch.Tensor, times_P: torch.Tensor) -> None:
        """Count tokens so many times each; a token of -1 (none) must have 0 times."""
        where = (slots_P, tokens_P.clamp(min=0))
        self.all.index_put_(where, times_P.to(torch.int32), accumulate=True)

    def _grow(self) -> None:
        have, vocab = self.all.shape
        more = self.all.new_zeros(max(have, 8), vocab)
        self.all = torch.cat([self.all, more])
        self._free.extend(range(have, self.all.shape[0]))


def penalise(
    logits_LV: torch.Tensor,
    asked: Asked,
    counts: Counts,
    proposed: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    backend: Backend = "auto",
) -> None:
    """Take off logits, in place, what repeating costs.

    The repetition penalty is that of transformers: logits of tokens in prompt or answer are divided
    by it where positive and multiplied where negative. Presence and frequency are OpenAI's: tokens
    of the answer lose `presence` once and `frequency` each time.

    `proposed` are pairs (index of a line in `asked`, token): tokens that come before that line and
    are not counted yet.
    """
    late = None if proposed is None else _late(logits_LV, asked, counts, *proposed)
    counts_SV, vocab = counts.all, logits_LV.shape[1]
    if on_triton(backend, logits_LV):
        grid = (len(asked.lines), -(-vocab // _BLOCK))
        strides = (logits_LV.stride(0), counts_SV.stride(0))
        _penalise[grid](
            logits_LV, counts_SV, *strides, *asked, vocab, IN_PROMPT=_IN_PROMPT, BLOCK=_BLOCK
        )
    else:
        for index, line in enumerate(asked.lines.tolist()):
            factors = (each[index] for each in asked[2:])
            logits_LV[line] = _penalised(logits_LV[line], counts_SV[asked.slots[index]], *factors)
    if late is not None:
        logits_LV.index_put_(late[:2], late[2])


def _late(
    logits_LV: torch.Tensor,
    asked: Asked,
    counts: Counts,
    index_Q: torch.Tensor,
    tokens_Q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of proposed tokens as they are to be, with their lines and tokens."""
    alike_QQ = (index_Q[:, None] == index_Q) & (tokens_Q[:, None] == tokens_Q)
    count_Q = counts.all[asked.slots[index_Q], tokens_Q] + alike_QQ.sum(1, dtype=torch.int32)
    lines_Q = asked.lines[index_Q]
    factors = (each[index_Q] for each in asked[2:])
    return lines_Q, tokens_Q, _penalised(logits_LV[lines_Q, tokens_Q], count_Q, *factors)


def _penalised(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    times = counts & (_IN_PROMPT - 1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    return logits - frequency * times - presence * (times > 0)


@triton.jit
def _penalise(
    logits,
    counts,
    stride,
    count_stride,
    lines,
    slots,
    repetitions,
    presences,
    frequencies,
    vocab,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts += tl.load(slots + at) * count_stride
    count = tl.load(counts + index, mask=index < vocab, other=0)
    # Few tokens were seen, so few logits are read and written.
    seen = count > 0
    logits += tl.load(lines + at) * stride
    x = tl.load(logits + index, mask=seen, other=0.0)
    times = (count & (IN_PROMPT - 1)).to(tl.float32)
    repetition = tl.load(repetitions + at)
    x = tl.where(x > 0, x / repetition, x * repetition)
    x -= tl.load(frequencies + at) * times
    x -= tl.where(times > 0, tl.load(presences + at), 0.0)
    tl.store(logits + index, x, mask=seen)
