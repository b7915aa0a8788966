"""Kernels that write keys and values into pages; `kv_cache_write` says what they compute.

As in `rotary_kernel` a program takes some heads of some neighbouring tokens, of one kind alone.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.rotary.qk_norm_rope_kernel import (
    load_pair_weights,
    load_unrotated_weights,
)
from meshwright.run.kernels.rotary.rotary_kernel import (
    compute_tile_offsets,
    load_columns,
    load_pairs,
    store_columns,
    store_pairs,
)
from meshwright.run.kernels.triton_compat import tl, triton, wait_for_inputs

MAX_E4M3 = tl.constexpr(448.0)
"""Of the 8-bit floats that caches hold; what is larger becomes this."""


@triton.jit
def get_page_row_pointers(
    cache,
    slots,
    token,
    head,
    number,
    page_stride,
    token_stride,
    head_stride,
    BLOCK: tl.constexpr,
):
    """Return where heads of tokens lie in pages, and whether they lie anywhere."""
    slot = tl.load(slots + token, mask=token < number, other=-1).to(tl.int64)
    here = cache + slot // BLOCK * page_stride + slot % BLOCK * token_stride + head * head_stride
    return here, slot >= 0


@triton.jit
def quantize_to_kv_cache(value, factor, EIGHT_BITS: tl.constexpr):
    """Return a value as it is cached: divided by the scale, and within what the type can hold."""
    value *= factor
    return tl.clamp(value, -MAX_E4M3, MAX_E4M3) if EIGHT_BITS else value


@triton.jit
def load_inverse_scale(scale):
    """Load a scale, if there is one, and turn it around."""
    factor = 1.0
    if scale is not None:
        factor = 1.0 / tl.load(scale)
    return factor


@triton.jit(do_not_specialize=["number"])
def write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    number,
    k_token,
    k_head,
    v_token,
    v_head,
    page_stride,
    token_stride,
    head_stride,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
):
    """Copy heads of keys (second index 0) or of values (1) to the tokens' slots."""
    parts: tl.constexpr = K // HEADS
    program = tl.program_id(0)
    place = (program // parts * TOKENS).to(tl.int64)
    first = program % parts * HEADS
    row = tl.arange(0, TOKENS * HEADS)
    token = place + row // HEADS
    head = first + row % HEADS
    if tl.program_id(1) == 0:
        x = (
            k
            + place * k_token
            + first * k_head
            + compute_tile_offsets(k_token, k_head, TOKENS, HEADS)
        )
        out = k_cache
        factor = load_inverse_scale(k_scale)
    else:
        x = (
            v
            + place * v_token
            + first * v_head
            + compute_tile_offsets(v_token, v_head, TOKENS, HEADS)
        )
        out = v_cache
        factor = load_inverse_scale(v_scale)
    target, there = get_page_row_pointers(
        out, slots, token, head, number, page_stride, token_stride, head_stride, BLOCK
    )
    value = load_columns(x, there, 0, E, COLUMNS)
    store_columns(target, quantize_to_kv_cache(value, factor, EIGHT_BITS), there, 0, E, COLUMNS)


@triton.jit(do_not_specialize=["number"])
def rope_and_write_kv_kernel(
    qkv,
    out,
    k_cache,
    v_cache,
    slots,
    q_weight,
    k_weight,
    cos,
    sin,
    k_scale,
    v_scale,
    number,
    row_stride,
    page_stride,
    token_stride,
    head_stride,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and turn heads of queries into `out` or of keys into pages, or store those of values."""
    wait_for_inputs(PDL)
    parts: tl.constexpr = (H + 2 * K) // HEADS
    program = tl.program_id(0)
    place = (program // parts * TOKENS).to(tl.int64)
    first = program % parts * HEADS
    row = tl.arange(0, TOKENS * HEADS)
    token = place + row // HEADS
    head = first + row % HEADS
    x = qkv + place * row_stride + first * E + compute_tile_offsets(row_stride, E, TOKENS, HEADS)
    angles = token * HALF
    if first < H:
        inside = token < number
        _turn(
            x, out + (token * H + head) * E, q_weight, cos + angles, sin + angles, inside, inside,
            1.0, eps, E, HALF, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET, False,
        )  # fmt: skip
    elif first < H + K:
        k_rows, there = get_page_row_pointers(
            k_cache, slots, token, head - H, number, page_stride, token_stride, head_stride, BLOCK
        )
        _turn(
            x, k_rows, k_weight, cos + angles, sin + angles, token < number, there,
            load_inverse_scale(k_scale), eps, E, HALF, HALF_COLUMNS, COLUMNS, INTERLEAVED,
            UNIT_OFFSET,
            EIGHT_BITS,
        )  # fmt: skip
    else:
        v_rows, held = get_page_row_pointers(
            v_cache, slots, token, head - (H + K), number, page_stride, token_stride, head_stride,
            BLOCK,
        )  # fmt: skip
        value = quantize_to_kv_cache(
            load_columns(x, held, 0, E, COLUMNS), load_inverse_scale(v_scale), EIGHT_BITS
        )
        store_columns(v_rows, value, held, 0, E, COLUMNS)


@triton.jit
def _turn(
    x, target, weight, cos, sin, inside, there, last, eps,
    E: tl.constexpr, HALF: tl.constexpr, HALF_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, UNIT_OFFSET: tl.constexpr, EIGHT_BITS: tl.constexpr,
):  # fmt: skip
    one, two = load_pairs(x, inside, HALF, HALF_COLUMNS, INTERLEAVED)
    cosine = load_columns(cos, inside, 0, HALF, HALF_COLUMNS)
    sine = load_columns(sin, inside, 0, HALF, HALF_COLUMNS)
    rest = one
    if 2 * HALF < E:
        rest = load_columns(x, inside, 2 * HALF, E, COLUMNS)
    if weight is not None:
        square = tl.sum(one * one + two * two, axis=1)
        if 2 * HALF < E:
            square += tl.sum(rest * rest, axis=1)
            rest *= load_unrotated_weights(weight, HALF, E, COLUMNS, UNIT_OFFSET)
        scale = tl.rsqrt(square / E + eps)[:, None]
        factor, factor_two = load_pair_weights(weight, HALF, HALF_COLUMNS, INTERLEAVED, UNIT_OFFSET)
        one *= scale * factor
        two *= scale * factor_two
        rest *= scale
    store_pairs(
        target,
        quantize_to_kv_cache(one * cosine - two * sine, last, EIGHT_BITS),
        quantize_to_kv_cache(two * cosine + one * sine, last, EIGHT_BITS),
        there,
        HALF,
        HALF_COLUMNS,
        INTERLEAVED,
    )
    if 2 * HALF < E:
        store_columns(
            target, quantize_to_kv_cache(rest, last, EIGHT_BITS), there, 2 * HALF, E, COLUMNS
        )
