"""The kernel that norms and rotates heads; `qk_norm_rope` says what it computes.

As in `rotary_kernel` a program takes some heads of neighbouring tokens, of one kind alone.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.rotary.rotary_kernel import (
    compute_tile_offsets,
    load_columns,
    load_pairs,
    locate_token_block,
    store_columns,
    store_pairs,
)
from meshwright.run.kernels.triton_compat import tl, triton


# Not compiled anew for a number of tokens that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["T"])
def qk_norm_rope_kernel(
    qkv,
    out,
    q_weight,
    k_weight,
    cos,
    sin,
    T,
    angle_batch,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Norm and rotate heads of queries or of keys."""
    parts: tl.constexpr = (H + K) // HEADS
    program = tl.program_id(0)
    first = program % parts * HEADS
    batch, place = locate_token_block(program // parts, T, TOKENS)
    inside = place + tl.arange(0, TOKENS * HEADS) // HEADS < T
    qkv += (batch * T + place) * ((H + 2 * K) * E) + first * E
    x = qkv + compute_tile_offsets((H + 2 * K) * E, E, TOKENS, HEADS)
    out += (batch * T + place) * ((H + K) * E) + first * E
    target = out + compute_tile_offsets((H + K) * E, E, TOKENS, HEADS)
    angles = batch * angle_batch + place * HALF + compute_tile_offsets(HALF, 0, TOKENS, HEADS)
    weight = q_weight if first < H else k_weight
    one, two = load_pairs(x, inside, HALF, HALF_COLUMNS, INTERLEAVED)
    cosine = load_columns(cos + angles, inside, 0, HALF, HALF_COLUMNS)
    sine = load_columns(sin + angles, inside, 0, HALF, HALF_COLUMNS)
    factor, factor_two = load_pair_weights(weight, HALF, HALF_COLUMNS, INTERLEAVED, UNIT_OFFSET)
    square = tl.sum(one * one + two * two, axis=1)
    if 2 * HALF < E:
        rest = load_columns(x, inside, 2 * HALF, E, COLUMNS)
        square += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(square / E + eps)[:, None]
    one *= scale * factor
    two *= scale * factor_two
    store_pairs(
        target, one * cosine - two * sine, two * cosine + one * sine, inside,
        HALF, HALF_COLUMNS, INTERLEAVED,
    )  # fmt: skip
    if 2 * HALF < E:
        rest *= scale * load_unrotated_weights(weight, HALF, E, COLUMNS, UNIT_OFFSET)
        store_columns(target, rest, inside, 2 * HALF, E, COLUMNS)


@triton.jit
def load_pair_weights(
    weight,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Load what multiplies each first and each second of a pair, as one row."""
    column = tl.arange(0, HALF_COLUMNS)
    one = weight + (2 * column if INTERLEAVED else column)
    factor = tl.load(one, mask=column < HALF, other=0.0).to(tl.float32)
    two = tl.load(one + (1 if INTERLEAVED else HALF), mask=column < HALF, other=0.0)
    factor_two = two.to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
        factor_two += 1.0
    return factor[None, :], factor_two[None, :]


@triton.jit
def load_unrotated_weights(
    weight, HALF: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, UNIT_OFFSET: tl.constexpr
):
    """Load what multiplies the elements that do not turn."""
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=(column >= 2 * HALF) & (column < E), other=0.0)
    factor = factor.to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    return factor[None, :]
