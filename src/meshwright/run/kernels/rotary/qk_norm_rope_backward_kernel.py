"""The backward kernel of normed and rotated heads; `qk_norm_rope` says what it computes.

With n = x · rstd, and g what came back, turned back and multiplied with the weight:

    dx = rstd · (g - n · mean(g · n)),   d(weight) = Σ over heads and tokens of g / weight · n

As in `rotary_kernel` a program takes some heads of neighbouring tokens, of one kind alone.
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
    copy_columns,
    load_columns,
    load_raw_pairs,
    locate_token_block,
    store_columns,
    store_pairs,
)
from meshwright.run.kernels.triton_compat import tl, triton


@triton.jit
def qk_norm_rope_backward_kernel(
    qkv,
    dq,
    dk,
    dv,
    dqkv,
    q_weight,
    k_weight,
    cos,
    sin,
    parts,
    blocks,
    T,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
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
    AHEAD: tl.constexpr,
):
    """Work through every so many blocks of tokens; leave d(qkv), and parts of weights' gradients.

    A program keeps to the same heads: their number divides that of the programs. A row of `parts`
    has room for both weights' gradients, and each program fills one.
    """
    each: tl.constexpr = (H + 2 * K) // HEADS
    first = (tl.program_id(0) % each * HEADS).to(tl.int64)
    begin = tl.program_id(0) // each
    step = tl.num_programs(0) // each
    parts += tl.program_id(0) * (2 * E)
    if first < H:
        _turn_back(
            qkv, dq, dqkv, q_weight, cos, sin, parts, parts + E, begin, step, blocks, T, first,
            q_batch, q_token, q_head, angle_batch, eps, 0, (H + 2 * K) * E,
            E, HALF, TOKENS, HEADS, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET, AHEAD,
        )  # fmt: skip
    elif first < H + K:
        _turn_back(
            qkv, dk, dqkv, k_weight, cos, sin, parts + E, parts, begin, step, blocks, T, first,
            k_batch, k_token, k_head, angle_batch, eps, H, (H + 2 * K) * E,
            E, HALF, TOKENS, HEADS, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET, AHEAD,
        )  # fmt: skip
    else:
        for block in range(begin, blocks, step):
            batch, place = locate_token_block(block, T, TOKENS)
            source = dv + (batch * v_batch + place * v_token + (first - (H + K)) * v_head)
            target = dqkv + ((batch * T + place) * ((H + 2 * K) * E) + first * E)
            copy_columns(
                source + compute_tile_offsets(v_token, v_head, TOKENS, HEADS),
                target + compute_tile_offsets((H + 2 * K) * E, E, TOKENS, HEADS),
                place + tl.arange(0, TOKENS * HEADS) // HEADS < T,
                0, E, COLUMNS,
            )  # fmt: skip
        column = tl.arange(0, 2 * COLUMNS)
        tl.store(parts + column, tl.zeros((2 * COLUMNS,), tl.float32), mask=column < 2 * E)


@triton.jit
def _turn_back(
    qkv,
    dy,
    dqkv,
    weight,
    cos,
    sin,
    part,
    other_part,
    begin,
    step,
    blocks,
    T,
    first,
    dy_batch,
    dy_token,
    dy_head,
    angle_batch,
    eps,
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Write the gradients of some heads of every so many blocks, then those of their weight.

    BEFORE heads come before these in a token. With `AHEAD` the next block is asked for before this
    one is worked on, so that the memory is never without requests.
    """
    rows: tl.constexpr = TOKENS * HEADS
    part_one = tl.zeros((rows, HALF_COLUMNS), tl.float32)
    part_two = tl.zeros((rows, HALF_COLUMNS), tl.float32)
    part_rest = tl.zeros((rows, COLUMNS if 2 * HALF < E else 1), tl.float32)
    factor, factor_two = load_pair_weights(weight, HALF, HALF_COLUMNS, INTERLEAVED, UNIT_OFFSET)
    if AHEAD:
        next_one, next_two, next_turned, next_turned_two = _fetch(
            qkv, dy, begin, blocks, T, first, dy_batch, dy_token, dy_head,
            BEFORE, WIDTH, E, HALF, TOKENS, HEADS, HALF_COLUMNS, INTERLEAVED,
        )  # fmt: skip
    for block in range(begin, blocks, step):
        if AHEAD:
            one, two, turned, turned_two = next_one, next_two, next_turned, next_turned_two
            next_one, next_two, next_turned, next_turned_two = _fetch(
                qkv, dy, block + step, blocks, T, first, dy_batch, dy_token, dy_head,
                BEFORE, WIDTH, E, HALF, TOKENS, HEADS, HALF_COLUMNS, INTERLEAVED,
            )  # fmt: skip
        else:
            one, two, turned, turned_two = _fetch(
                qkv, dy, block, blocks, T, first, dy_batch, dy_token, dy_head,
                BEFORE, WIDTH, E, HALF, TOKENS, HEADS, HALF_COLUMNS, INTERLEAVED,
            )  # fmt: skip
        part_one, part_two, part_rest = _tile_back(
            qkv, dy, dqkv, weight, cos, sin, one, two, turned, turned_two, factor, factor_two,
            part_one, part_two, part_rest, block, T, first, dy_batch, dy_token, dy_head,
            angle_batch, eps, BEFORE, WIDTH, E, HALF, TOKENS, HEADS, HALF_COLUMNS, COLUMNS,
            INTERLEAVED, UNIT_OFFSET,
        )  # fmt: skip
    _store_part(part, part_one, part_two, HALF, HALF_COLUMNS, INTERLEAVED)
    column = tl.arange(0, COLUMNS)
    if 2 * HALF < E:
        unturned = (column >= 2 * HALF) & (column < E)
        tl.store(part + column, tl.sum(part_rest, axis=0), mask=unturned)
    tl.store(other_part + column, tl.zeros((COLUMNS,), tl.float32), mask=column < E)


@triton.jit
def _tile_back(
    qkv,
    dy,
    dqkv,
    weight,
    cos,
    sin,
    one,
    two,
    turned,
    turned_two,
    factor,
    factor_two,
    part_one,
    part_two,
    part_rest,
    block,
    T,
    first,
    dy_batch,
    dy_token,
    dy_head,
    angle_batch,
    eps,
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Write the gradients of one tile's heads; return the weight's with this tile added."""
    batch, place = locate_token_block(block, T, TOKENS)
    inside = place + tl.arange(0, TOKENS * HEADS) // HEADS < T
    here = (batch * T + place) * WIDTH + first * E + compute_tile_offsets(WIDTH, E, TOKENS, HEADS)
    angles = batch * angle_batch + place * HALF + compute_tile_offsets(HALF, 0, TOKENS, HEADS)
    cosine = load_columns(cos + angles, inside, 0, HALF, HALF_COLUMNS)
    sine = load_columns(sin + angles, inside, 0, HALF, HALF_COLUMNS)
    one, two = one.to(tl.float32), two.to(tl.float32)
    turned, turned_two = turned.to(tl.float32), turned_two.to(tl.float32)
    square = tl.sum(one * one + two * two, axis=1)
    if 2 * HALF < E:
        before = batch * dy_batch + place * dy_token + (first - BEFORE) * dy_head
        source = dy + before + compute_tile_offsets(dy_token, dy_head, TOKENS, HEADS)
        rest = load_columns(qkv + here, inside, 2 * HALF, E, COLUMNS)
        grad_rest = load_columns(source, inside, 2 * HALF, E, COLUMNS)
        square += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(square / E + eps)[:, None]
    one *= scale
    two *= scale
    grad = turned * cosine + turned_two * sine
    grad_two = turned_two * cosine - turned * sine
    part_one += grad * one
    part_two += grad_two * two
    grad *= factor
    grad_two *= factor_two
    along = tl.sum(grad * one + grad_two * two, axis=1)
    if 2 * HALF < E:
        rest *= scale
        part_rest += grad_rest * rest
        grad_rest *= load_unrotated_weights(weight, HALF, E, COLUMNS, UNIT_OFFSET)
        along += tl.sum(grad_rest * rest, axis=1)
    along = (along / E)[:, None]
    store_pairs(
        dqkv + here, (grad - one * along) * scale, (grad_two - two * along) * scale, inside,
        HALF, HALF_COLUMNS, INTERLEAVED,
    )  # fmt: skip
    if 2 * HALF < E:
        grad_rest = (grad_rest - rest * along) * scale
        store_columns(dqkv + here, grad_rest, inside, 2 * HALF, E, COLUMNS)
    return part_one, part_two, part_rest


@triton.jit
def _fetch(
    qkv,
    dy,
    block,
    blocks,
    T,
    first,
    dy_batch,
    dy_token,
    dy_head,
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load heads and what came back for them; 0 beyond the last block."""
    batch, place = locate_token_block(block, T, TOKENS)
    row = tl.arange(0, TOKENS * HEADS)
    inside = (place + row // HEADS < T) & (block + 0 * row < blocks)
    qkv += (batch * T + place) * WIDTH + first * E
    x = qkv + compute_tile_offsets(WIDTH, E, TOKENS, HEADS)
    one, two = load_raw_pairs(x, inside, HALF, HALF_COLUMNS, INTERLEAVED)
    dy += batch * dy_batch + place * dy_token + (first - BEFORE) * dy_head
    source = dy + compute_tile_offsets(dy_token, dy_head, TOKENS, HEADS)
    turned, turned_two = load_raw_pairs(source, inside, HALF, HALF_COLUMNS, INTERLEAVED)
    return one, two, turned, turned_two


@triton.jit
def _store_part(
    out, one, two, HALF: tl.constexpr, HALF_COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Add up the rows and store one program's part of a weight's gradient."""
    column = tl.arange(0, HALF_COLUMNS)
    here = out + (2 * column if INTERLEAVED else column)
    tl.store(here, tl.sum(one, axis=0), mask=column < HALF)
    tl.store(here + (1 if INTERLEAVED else HALF), tl.sum(two, axis=0), mask=column < HALF)
