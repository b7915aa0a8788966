"""`sample_gumbel_argmax`: the next token of each row of logits, sampled or greedy.

With x the logits and g Gumbel noise, the token of the largest x / temperature + g has the
probability that softmax gives it, and no sum over the vocabulary is needed. A greedy line leaves
noise and temperature out. Ties go to the lowest token, as in `torch.argmax`.

The floor is one read of the logits.
"""

# ruff: noqa: PLR0917
# Triton compiles the kernels itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch

from meshwright.run.kernels.sampling.gumbel_noise import (
    TOKEN,
    derive_noise_keys,
    derive_noise_keys_reference,
    gumbel_noise,
    gumbel_noise_reference,
)
from meshwright.run.kernels.sampling.row_params import LogitRows, RowSamplingTensors
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

_BLOCK = 2048
# Programs that keep an H200 busy; fewer lines than these are cut along the vocabulary.
_PROGRAMS, _SPLITS = 512, 128
# Gumbel noise of 32 bits is between -2.9 and 22.9, so a token further below the best cannot win.
_NOISE = 26.0


def sample_gumbel_argmax(
    logits_LV: torch.Tensor,
    places: LogitRows,
    settings: RowSamplingTensors,
    floor_L: torch.Tensor | None = None,
    *,
    stream: int = TOKEN,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Return a token for each line, int64; logits below a line's floor are left out.

    A line that leaves nothing to choose from (all -inf, or no numbers) gets -1.
    """
    if not should_use_triton(backend, logits_LV):
        return sample_gumbel_argmax_reference(logits_LV, places, settings, floor_L, stream=stream)
    lines, vocab = logits_LV.shape
    tokens_L = torch.empty(lines, dtype=torch.int64, device=logits_LV.device)
    if not lines:
        return tokens_L
    splits = max(1, min(-(-_PROGRAMS // lines), -(-vocab // _BLOCK), _SPLITS))
    span = -(-vocab // (splits * _BLOCK)) * _BLOCK
    score_LS = torch.empty(lines, splits, device=logits_LV.device)
    best_LS = torch.empty(lines, splits, dtype=torch.int32, device=logits_LV.device)
    _best_of_span[(lines, splits)](
        logits_LV,
        logits_LV.stride(0),
        *places,
        settings.temperature,
        settings.seed,
        settings.num_sampled,
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
    _best_of_line[(lines,)](score_LS, best_LS, tokens_L, splits, SPLITS=_SPLITS)
    return tokens_L


def sample_gumbel_argmax_reference(
    logits_LV: torch.Tensor,
    places: LogitRows,
    settings: RowSamplingTensors,
    floor_L: torch.Tensor | None = None,
    *,
    stream: int = TOKEN,
) -> torch.Tensor:
    """Do what `sample_gumbel_argmax` does."""
    score_LV = logits_LV.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    if floor_L is not None:
        score_LV = score_LV.masked_fill(score_LV < floor_L[:, None], -torch.inf)
    best_L, tokens_L = score_LV.max(1)
    warm_L = settings.temperature[places.rows] > 0
    if logits_LV.is_cuda or bool(warm_L.any()):
        drawn_L = _drawn(score_LV, best_L, places, settings, stream)
        tokens_L = torch.where(warm_L, drawn_L, tokens_L)
    return torch.where(best_L > -torch.inf, tokens_L, -1)


def _drawn(
    score_LV: torch.Tensor,
    best_L: torch.Tensor,
    places: LogitRows,
    settings: RowSamplingTensors,
    stream: int,
) -> torch.Tensor:
    """Return the tokens of lines that are not greedy; only those near the best need noise."""
    temperature_L = settings.temperature[places.rows]
    near_LV = score_LV >= (best_L - _NOISE * temperature_L)[:, None]
    near_LV &= score_LV > -torch.inf
    lines_N, tokens_N = near_LV.nonzero(as_tuple=True)
    rows_N = places.rows[lines_N]
    position_N = settings.num_sampled[rows_N] + places.offsets[lines_N]
    noise_N = gumbel_noise_reference(
        derive_noise_keys_reference(settings.seed[rows_N], position_N, stream), tokens_N
    )
    warm_LV = torch.full_like(score_LV, -torch.inf)
    inverse_N = 1.0 / temperature_L[lines_N].clamp(min=1e-9)
    warm_LV[lines_N, tokens_N] = score_LV[lines_N, tokens_N] * inverse_N + noise_N
    return warm_LV.argmax(1)


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
    inverse = 1.0 / tl.maximum(temperature, 1e-9)
    position = tl.load(drawn + row) + tl.load(offsets + line)
    first, second = derive_noise_keys(tl.load(seeds + row), position, STREAM)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 0, tl.int32)
    end = tl.minimum(vocab, (split + 1) * span)
    for start in range(split * span, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        pointers = logits + line.to(tl.int64) * stride + index
        x = tl.load(pointers, mask=index < end, other=float("-inf")).to(tl.float32)
        score = x
        if temperature > 0:
            score = x * inverse + gumbel_noise(first, second, index)
        if FLOORED:
            score = tl.where(x >= tl.load(floors + line), score, float("-inf"))
        # Later blocks win only if larger, so the lowest of equal tokens stays.
        token = tl.where(score > best, index, token)
        best = tl.where(score > best, score, best)
    top = tl.max(best, 0)
    at = line * tl.num_programs(1) + split
    tl.store(scores + at, top)
    tl.store(bests + at, tl.min(tl.where(best == top, token, vocab), 0))


# One kernel for any number of spans: a step of another size must not wait for a compiler.
@triton.jit(do_not_specialize=["splits"])
def _best_of_line(scores, bests, tokens, splits, SPLITS: tl.constexpr):
    line = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    score = tl.load(scores + line * splits + split, mask=inside, other=float("-inf"))
    best = tl.load(bests + line * splits + split, mask=inside, other=0x7FFFFFFF)
    top = tl.max(score, 0)
    token = tl.min(tl.where(score == top, best, 0x7FFFFFFF), 0)
    tl.store(tokens + line, tl.where(top > float("-inf"), token, -1).to(tl.int64))
