"""`compute_logit_thresholds`: lowest logit that top-k, top-p and min-p keep, without a full sort.

Whatever these three leave is the set of logits at or above one value, so that value is all that is
needed. In the order of transformers: top-k leaves the k largest; top-p the fewest largest of those
whose probability is p of theirs together; min-p what has min-p of the largest one's probability.
Tokens of equal logits stay or go together.

The kernel narrows an interval of values between two logits that occur: each read of the line counts
(or weighs) what lies above the middle, and finds the next logits above and below it. About a dozen
reads are usual. Halving values could take hundreds of reads where a logit is as low as -1e30, so
after 24 the bits of the numbers are halved instead: 32 more are enough for any.
"""

# ruff: noqa: PLR0917
# Triton compiles the kernels itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch

from meshwright.run.kernels.sampling.row_params import LogitRows, RowSamplingTensors
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

_BLOCK = 4096
# Logits that plain torch sorts at first: more than most nuclei have.
_LARGEST = 1024


def compute_logit_thresholds(
    logits_LV: torch.Tensor,
    places: LogitRows,
    settings: RowSamplingTensors,
    *,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Return the least logit to choose from for each line, float32; -inf where all may stay."""
    if not should_use_triton(backend, logits_LV):
        return compute_logit_thresholds_reference(logits_LV, places, settings)
    lines, vocab = logits_LV.shape
    floor_L = torch.empty(lines, device=logits_LV.device)
    if lines:
        _floor[(lines,)](
            logits_LV,
            logits_LV.stride(0),
            places.rows,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            floor_L,
            vocab,
            BLOCK=_BLOCK,
            num_warps=16,
        )
    return floor_L


def compute_logit_thresholds_reference(
    logits_LV: torch.Tensor, places: LogitRows, settings: RowSamplingTensors
) -> torch.Tensor:
    """`compute_logit_thresholds` by sorting: the largest first, all where these do not suffice."""
    if not logits_LV.shape[0]:
        return logits_LV.new_empty(0, dtype=torch.float32)
    logits_LV = logits_LV.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    vocab, rows_L = logits_LV.shape[1], places.rows
    temperature_L = settings.temperature[rows_L].clamp(min=1e-9)
    top_k_L, top_p_L, min_p_L = (
        each[rows_L] for each in (settings.top_k, settings.top_p, settings.min_p)
    )
    most = min(vocab, max(int(top_k_L.max()), _LARGEST))
    sorted_LS = logits_LV.topk(most, dim=1).values
    best_L = sorted_LS[:, 0]
    last_L = torch.where(top_k_L > 0, top_k_L, vocab).clamp(max=most)
    least_L = sorted_LS.gather(1, last_L[:, None] - 1).squeeze(1)
    least_L = least_L.where(top_k_L > 0, -torch.inf)
    scaled_LV = (logits_LV - best_L[:, None]) / temperature_L[:, None]
    whole_L = scaled_LV.exp().where(logits_LV >= least_L[:, None], 0).sum(1)
    needed_L1 = (top_p_L * whole_L)[:, None]
    sums_LS = ((sorted_LS - best_L[:, None]) / temperature_L[:, None]).exp().cumsum(1)
    if most < vocab and bool(((sums_LS[:, -1:] < needed_L1).squeeze(1) & (top_p_L < 1)).any()):
        sorted_LS = logits_LV.sort(dim=1, descending=True).values
        sums_LS = ((sorted_LS - best_L[:, None]) / temperature_L[:, None]).exp().cumsum(1)
    fewest_L1 = (sums_LS < needed_L1).sum(1, keepdim=True).clamp(max=sorted_LS.shape[1] - 1)
    nucleus_L = sorted_LS.gather(1, fewest_L1).squeeze(1).where(top_p_L < 1, -torch.inf)
    near_L = best_L + temperature_L * min_p_L.log()
    floor_L = torch.maximum(torch.maximum(least_L, nucleus_L), near_L)
    free_L = (settings.temperature[rows_L] <= 0) | floor_L.isnan()
    return torch.where(free_L, -torch.inf, floor_L)


@triton.jit
def _floor(
    logits,
    stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    floors,
    vocab,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0)
    row = tl.load(rows + line)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        logits += line.to(tl.int64) * stride
        least, most, count = _ends(logits, vocab, BLOCK)
        # No logit is a number where the largest is -inf: nothing to narrow.
        if most > float("-inf"):
            if (top_k > 0) & (top_k < count):
                wanted = top_k.to(tl.float32)
                least = _narrowed(logits, vocab, least, most, 0.0, wanted, True, BLOCK)
                floor = least
            if top_p < 1:
                # Logits this far down weigh less than 1 - p together, however many they are.
                reach = temperature * (tl.log(vocab / (1 - top_p)) + 1)
                whole = _above(logits, vocab, least, most, 1 / temperature, BLOCK)
                low = tl.maximum(least, most - reach)
                wanted = top_p * whole
                floor = _narrowed(logits, vocab, low, most, 1 / temperature, wanted, False, BLOCK)
            if min_p > 0:
                floor = tl.maximum(floor, most + temperature * tl.log(min_p))
    tl.store(floors + line, floor)


@triton.jit
def _ends(logits, vocab, BLOCK: tl.constexpr):
    """Return the least and the largest logit above -inf, and how many there are."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    count = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _block(logits, start, vocab, BLOCK)
        real = x > float("-inf")
        least = tl.where(real & (x < least), x, least)
        most = tl.where(x > most, x, most)
        count += real.to(tl.int32)
    return tl.min(least, 0), tl.max(most, 0), tl.sum(count, 0)


@triton.jit
def _above(logits, vocab, floor, most, sharpness, BLOCK: tl.constexpr):
    """Return the weight of logits at or above `floor`."""
    weight = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _block(logits, start, vocab, BLOCK)
        weight += tl.where(x >= floor, tl.exp((x - most) * sharpness), 0.0)
    return tl.sum(weight, 0)


@triton.jit
def _narrowed(
    logits, vocab, low, most, sharpness, wanted, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest logit, of those from `low` on, that has `wanted` at or above it.

    Logits count 1 each, or weigh e to the power of (logit - most) · sharpness.
    """
    high = most
    reads = 0
    while low < high:
        middle = low + (high - low) * 0.5
        if reads >= 24:
            middle = _between(low, high)
        # Rounding may give one of the ends; the upper one always divides.
        middle = tl.where((middle > low) & (middle < high), middle, high)
        weight = tl.full((BLOCK,), 0.0, tl.float32)
        above = tl.full((BLOCK,), float("inf"), tl.float32)
        below = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _block(logits, start, vocab, BLOCK)
            over = x >= middle
            if COUNTED:
                weight += over.to(tl.float32)
            else:
                weight += tl.where(over, tl.exp((x - most) * sharpness), 0.0)
            above = tl.where(over & (x < above), x, above)
            below = tl.where((x < middle) & (x > below), x, below)
        if tl.sum(weight, 0) >= wanted:
            low = tl.min(above, 0)
        else:
            # Never below `low`, where rounding makes the sums of two reads disagree.
            high = tl.maximum(tl.max(below, 0), low)
        reads += 1
    return low


@triton.jit
def _between(low, high):
    """Return the number halfway between two in the order of all float32 numbers."""
    first = low.to(tl.int32, bitcast=True)
    last = high.to(tl.int32, bitcast=True)
    first = first ^ ((first >> 31) & 0x7FFFFFFF)
    last = last ^ ((last >> 31) & 0x7FFFFFFF)
    middle = (first >> 1) + (last >> 1) + (first & last & 1)
    return (middle ^ ((middle >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _block(logits, start, vocab, BLOCK: tl.constexpr):
    index = start + tl.arange(0, BLOCK)
    return tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
