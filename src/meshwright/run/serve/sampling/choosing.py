"""`choose`: the next token of each line of logits, drawn at its temperature or the likeliest.

With x the logits and g Gumbel noise, the token of the largest x / temperature + g has the
probability that softmax gives it, and no sum over the vocabulary is needed. A greedy line leaves
noise and temperature out. Ties go to the lowest token, as in `torch.argmax`.

The floor is one read of the logits.
"""

# ruff: noqa: PLR0917
# Triton compiles the kernels itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch

from meshwright.run.kernels.language import Backend, on_triton, tl, triton
from meshwright.run.serve.sampling.chance import (
    TOKEN,
    draw_keys,
    gumbel,
    plain_draw_keys,
    plain_gumbel,
)
from meshwright.run.serve.sampling.rows import Places, Settings

_BLOCK = 2048
# Programs that keep an H200 busy; fewer lines than these are cut along the vocabulary.
_PROGRAMS = 512


def choose(
    logits_LV: torch.Tensor,
    places: Places,
    settings: Settings,
    floor_L: torch.Tensor | None = None,
    *,
    stream: int = TOKEN,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return a token for each line, int64; logits below a line's floor are left out.

    A line that leaves nothing to choose from (all -inf, or no numbers) gets -1.
    """
    if not on_triton(backend, logits_LV):
        return plain_choose(logits_LV, places, settings, floor_L, stream=stream)
    lines, vocab = logits_LV.shape
    tokens_L = torch.empty(lines, dtype=torch.int64, device=logits_LV.device)
    if not lines:
        return tokens_L
    splits = max(1, min(-(-_PROGRAMS // lines), -(-vocab // _BLOCK)))
    span = -(-vocab // (splits * _BLOCK)) * _BLOCK
    score_LS = torch.empty(lines, splits, device=logits_LV.device)
    best_LS = torch.empty(lines, splits, dtype=torch.int32, device=logits_LV.device)
    _best_of_span[(lines, splits)](
        logits_LV,
        logits_LV.stride(0),
        *places,
        settings.temperature,
        settings.seed,
        settings.drawn,
        score_LS if floor_L is None else floor_L,
        score_LS,
        best_LS,
        vocab,
        span,
        STREAM=stream,
        FLOORED=floor_L is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _best_of_line[(lines,)](score_LS, best_LS, tokens_L, splits, SPLITS=_power(splits))
    return tokens_L


def plain_choose(
    logits_LV: torch.Tensor,
    places: Places,
    settings: Settings,
    floor_L: torch.Tensor | None = None,
    *,
    stream: int = TOKEN,
) -> torch.Tensor:
    """Do what `choose` does."""
    score_LV = logits_LV.float()
    if floor_L is not None:
        score_LV = score_LV.masked_fill(score_LV < floor_L[:, None], -torch.inf)
    rows_L = places.rows
    temperature_L1 = settings.temperature[rows_L, None]
    if logits_LV.is_cuda or bool((temperature_L1 > 0).any()):
        position_L = settings.drawn[rows_L] + places.offsets
        first_L, second_L = plain_draw_keys(settings.seed[rows_L], position_L, stream)
        tokens_V = torch.arange(logits_LV.shape[1], device=logits_LV.device)
        noise_LV = plain_gumbel((first_L[:, None], second_L[:, None]), tokens_V)
        warm_LV = score_LV / temperature_L1.clamp(min=1e-9) + noise_LV
        score_LV = torch.where(temperature_L1 > 0, warm_LV, score_LV)
    best_L, tokens_L = score_LV.nan_to_num(-torch.inf, torch.inf, -torch.inf).max(1)
    return torch.where(best_L > -torch.inf, tokens_L, -1)


@triton.jit
def _best_of_span(
    logits,
    stride,
    rows,
    offsets,
    temperatures,
    seeds,
    drawn,
    floors,
    scores,
    bests,
    vocab,
    span,
    STREAM: tl.constexpr,
    FLOORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + line)
    temperature = tl.load(temperatures + row)
    position = tl.load(drawn + row) + tl.load(offsets + line)
    first, second = draw_keys(tl.load(seeds + row), position, STREAM)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 0, tl.int32)
    end = tl.minimum(vocab, (split + 1) * span)
    for start in range(split * span, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        pointers = logits + line.to(tl.int64) * stride + index
        x = tl.load(pointers, mask=index < end, other=float("-inf")).to(tl.float32)
        score = x
        if temperature > 0:
            score = x / temperature + gumbel(first, second, index)
        if FLOORED:
            score = tl.where(x >= tl.load(floors + line), score, float("-inf"))
        # Later blocks win only if larger, so the lowest of equal tokens stays.
        token = tl.where(score > best, index, token)
        best = tl.where(score > best, score, best)
    top = tl.max(best, 0)
    at = line * tl.num_programs(1) + split
    tl.store(scores + at, top)
    tl.store(bests + at, tl.min(tl.where(best == top, token, vocab), 0))


@triton.jit
def _best_of_line(scores, bests, tokens, splits, SPLITS: tl.constexpr):
    line = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    score = tl.load(scores + line * splits + split, mask=inside, other=float("-inf"))
    best = tl.load(bests + line * splits + split, mask=inside, other=0x7FFFFFFF)
    top = tl.max(score, 0)
    token = tl.min(tl.where(score == top, best, 0x7FFFFFFF), 0)
    tl.store(tokens + line, tl.where(top > float("-inf"), token, -1).to(tl.int64))


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
