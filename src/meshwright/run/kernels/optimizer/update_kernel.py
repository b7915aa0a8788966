"""One tile of an optimizer update: what the kernel of `adamw` does with a stretch of one tensor."""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.optimizer.block_quantization import (
    BLOCK_ELEMENTS,
    dequantize_codes,
    quantize_codes,
)
from meshwright.run.kernels.optimizer.global_index import compute_global_index
from meshwright.run.kernels.optimizer.stochastic_rounding import (
    generate_random_bits,
    stochastic_round_bf16,
)
from meshwright.run.kernels.triton_compat import tl, triton

_BLOCK = tl.constexpr(BLOCK_ELEMENTS)


@triton.jit
def update_tile(
    places,
    numbers,
    chance,
    begin,
    length,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    WRITES: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENT: tl.constexpr,
    GAPS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update up to `TILE` elements from `begin` on, all of them unless `MASKED`.

    `places` point at the chunk: weight, gradient, master, two moments and their scales. `numbers`
    are the gradients' scale, size of the step, share of the weight to keep, 1 / √(1 - β₂ᵗ), β₁,
    1 - β₁, β₂, 1 - β₂ and ε. `chance` has the keys of the step and what
    `find_first_global_index` says of the chunk, with as many `GAPS`.
    """
    weight, grad, master, first, second, first_scale, second_scale = places
    # Blocks are rows where codes share a scale: a row is then reduced within one warp.
    block = begin // _BLOCK + tl.arange(0, TILE // _BLOCK)[:, None]
    if MOMENT == "int8":
        lane = (
            begin + tl.arange(0, TILE // _BLOCK)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        )
    else:
        lane = begin + tl.arange(0, TILE)
    inside = lane < length
    there = block * _BLOCK < length

    g = _load(grad + lane, inside, MASKED).to(tl.float32) * numbers[0]
    w = g
    m = g
    v = g
    if WRITES:
        if MASTER:
            w = _load(master + lane, inside, MASKED)
        else:
            w = _load(weight + lane, inside, MASKED).to(tl.float32)
    keep1 = 1.0
    keep2 = 1.0
    if RULE == "adamw":
        keep1 = numbers[4]
        keep2 = numbers[6]
    if RULE != "apply":
        m = _load_moment(first + lane, first_scale + block, keep1, inside, there, MOMENT, MASKED)
    if RULE == "adamw":
        v = _load_moment(second + lane, second_scale + block, keep2, inside, there, MOMENT, MASKED)

    update, m, v = _follow(g, m, v, numbers, RULE, NESTEROV)

    keys, way = chance
    place = compute_global_index(way, lane.to(tl.uint32), GAPS)
    for_weight, for_first, for_second = generate_random_bits(keys, place)
    # Weights are stored first: otherwise ptxas delays loading them until the moments are done.
    if WRITES:
        w = w * numbers[2] - update * numbers[1]
        _store_weight(weight + lane, master + lane, w, for_weight, inside, MASTER, MASKED)
    if RULE != "apply":
        _store_moment(
            first + lane, first_scale + block, m, for_first, inside, there, MOMENT, MASKED
        )
    if RULE == "adamw":
        _store_moment(
            second + lane, second_scale + block, v, for_second, inside, there, MOMENT, MASKED
        )
    if RULE == "direction":
        _store(grad + lane, update.to(grad.dtype.element_ty), inside, MASKED)


@triton.jit
def _follow(g, m, v, numbers, RULE: tl.constexpr, NESTEROV: tl.constexpr):
    """Return the update and the next moments; AdamW's come faded already."""
    _, _, _, root_correction, beta1, rest1, _, rest2, eps = numbers
    update = g
    if RULE == "adamw":
        m = m + g * rest1
        v = v + g * g * rest2
        # A GPU takes three instructions for this root, and nine for a division.
        divisor = tl.sqrt(v) * root_correction + eps
        update = m * tl.rsqrt(divisor * divisor)
    elif RULE == "lion":
        towards = m + (g - m) * rest1
        update = tl.where(towards > 0, 1.0, tl.where(towards < 0, -1.0, 0.0))
        m = m + (g - m) * rest2
    elif RULE == "sgd":
        m = m * beta1 + g
        update = m
        if NESTEROV:
            update = g + m * beta1
    elif RULE != "apply":
        m = m + (g - m) * rest1
        update = m
        if NESTEROV:
            update = g + (m - g) * beta1
    return update, m, v


@triton.jit
def _load_moment(
    pointer,
    scale_pointer,
    keep,
    inside,
    there,
    MOMENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return `keep` times a moment; where it is coded, it is the scales that are multiplied."""
    value = _load(pointer, inside, MASKED)
    if MOMENT == "int8":
        value = dequantize_codes(value, _load(scale_pointer, there, MASKED) * keep)
    else:
        value = value.to(tl.float32) * keep
    return value


@triton.jit
def _store_weight(
    pointer, master_pointer, value, bits, inside, MASTER: tl.constexpr, MASKED: tl.constexpr
):
    if MASTER:
        _store(master_pointer, value, inside, MASKED)
    elif pointer.dtype.element_ty == tl.bfloat16:
        value = stochastic_round_bf16(value, bits)
    _store(pointer, value.to(pointer.dtype.element_ty), inside, MASKED)


@triton.jit
def _store_moment(
    pointer,
    scale_pointer,
    value,
    bits,
    inside,
    there,
    MOMENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    if MOMENT == "int8":
        if MASKED:
            value = tl.where(inside, value, 0.0)
        scale = tl.max(tl.abs(value), axis=1, keep_dims=True)
        _store(scale_pointer, scale, there, MASKED)
        code = quantize_codes(value, scale, bits, pointer.dtype.element_ty == tl.int8)
        _store(
            pointer, code.to(tl.uint8).to(pointer.dtype.element_ty, bitcast=True), inside, MASKED
        )
    elif MOMENT == "bf16":
        _store(pointer, stochastic_round_bf16(value, bits << 8), inside, MASKED)
    else:
        _store(pointer, value, inside, MASKED)


@triton.jit
def _load(pointer, inside, MASKED: tl.constexpr):
    if MASKED:
        value = tl.load(pointer, mask=inside, other=0)
    else:
        value = tl.load(pointer)
    return value


@triton.jit
def _store(pointer, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer, value, mask=inside)
    else:
        tl.store(pointer, value)
