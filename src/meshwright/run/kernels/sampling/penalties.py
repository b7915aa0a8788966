"""`apply_penalties`: repetition, presence and frequency penalties on logits, in place."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from typing import NamedTuple

import torch

from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

_BLOCK = 2048
# In the count of a token: it was in the prompt. Counts of answers stay far below.
IN_PROMPT = 1 << 30


class PenaltyParams(NamedTuple):
    """Lines of logits whose requests ask for penalties, and what they ask."""

    logit_rows: torch.Tensor
    count_slots: torch.Tensor
    """Where their counts are."""
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


def apply_penalties(
    logits_LV: torch.Tensor,
    asked: PenaltyParams,
    counts_SV: torch.Tensor,
    proposed: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    backend: KernelBackend = "auto",
) -> None:
    """Take off logits, in place, what repeating costs.

    The repetition penalty is that of transformers: logits of tokens in prompt or answer are divided
    by it where positive and multiplied where negative. Presence and frequency are OpenAI's: tokens
    of the answer lose `presence` once and `frequency` each time.

    `counts_SV` counts the tokens of each slot; `IN_PROMPT` is added for tokens of the prompt.

    `proposed` are pairs (index of a line in `asked`, token): tokens that come before that line and
    are not counted yet.
    """
    late = None if proposed is None else _late(logits_LV, asked, counts_SV, *proposed)
    vocab = logits_LV.shape[1]
    if should_use_triton(backend, logits_LV):
        grid = (len(asked.logit_rows), -(-vocab // _BLOCK))
        strides = (logits_LV.stride(0), counts_SV.stride(0))
        _penalise[grid](
            logits_LV, counts_SV, *strides, *asked, vocab, IN_PROMPT=IN_PROMPT, BLOCK=_BLOCK
        )
    else:
        for index, line in enumerate(asked.logit_rows.tolist()):
            factors = (each[index] for each in asked[2:])
            logits_LV[line] = _penalised(
                logits_LV[line], counts_SV[asked.count_slots[index]], *factors
            )
    if late is not None:
        logits_LV.index_put_(late[:2], late[2])


def _late(
    logits_LV: torch.Tensor,
    asked: PenaltyParams,
    counts_SV: torch.Tensor,
    index_Q: torch.Tensor,
    tokens_Q: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of proposed tokens as they are to be, with their lines and tokens."""
    alike_QQ = (index_Q[:, None] == index_Q) & (tokens_Q[:, None] == tokens_Q)
    count_Q = counts_SV[asked.count_slots[index_Q], tokens_Q] + alike_QQ.sum(1, dtype=torch.int32)
    lines_Q = asked.logit_rows[index_Q]
    factors = (each[index_Q] for each in asked[2:])
    return lines_Q, tokens_Q, _penalised(logits_LV[lines_Q, tokens_Q], count_Q, *factors)


def _penalised(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    times = counts & (IN_PROMPT - 1)
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
