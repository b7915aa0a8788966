"""The kernels of normed and rotated heads; `norm_rotate` says what they compute."""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.language import tl, triton
from meshwright.run.kernels.rotary_kernel import copy_heads, load_pairs, store_pairs


@triton.jit
def norm_turn_tokens(
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Norm and rotate the query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    cosine, sine = _angles(cos, sin, token, T, angle_batch, HALF, HALF_COLUMNS)
    qkv += token * ((H + 2 * K) * E)
    out += token * ((H + K) * E)
    _norm_turn(
        qkv, out, q_weight, cosine, sine, eps,
        H, E, HALF, HEADS, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET,
    )  # fmt: skip
    _norm_turn(
        qkv + H * E, out + H * E, k_weight, cosine, sine, eps,
        K, E, HALF, KV_HEADS, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET,
    )  # fmt: skip


@triton.jit
def _norm_turn(
    x,
    out,
    weight,
    cosine,
    sine,
    eps,
    H: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    one, two = load_pairs(x, E, H, HALF, HEADS, HALF_COLUMNS, INTERLEAVED)
    square = tl.sum(one * one + two * two, axis=1)
    if 2 * HALF < E:
        rest = _load_rest(x, E, H, HALF, E, HEADS, COLUMNS)
        square += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(square / E + eps)[:, None]
    factor, factor_two = load_pairs(weight, 0, 1, HALF, 1, HALF_COLUMNS, INTERLEAVED)
    if UNIT_OFFSET:
        factor += 1.0
        factor_two += 1.0
    one *= scale * factor
    two *= scale * factor_two
    store_pairs(
        out, one * cosine - two * sine, two * cosine + one * sine,
        H, E, HALF, HEADS, HALF_COLUMNS, INTERLEAVED,
    )  # fmt: skip
    if 2 * HALF < E:
        factor_rest = _load_rest(weight, 0, 1, HALF, E, 1, COLUMNS)
        if UNIT_OFFSET:
            factor_rest += 1.0
        _store_rest(out, rest * scale * factor_rest, H, HALF, E, HEADS, COLUMNS)


@triton.jit
def gradients(
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
    tokens,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Work through every so many tokens; leave d(qkv), and parts of both weights' gradients.

    Gradients of a weight add up head by head and meet only at the end.
    """
    q_one = tl.zeros((HEADS, HALF_COLUMNS), tl.float32)
    q_two = tl.zeros((HEADS, HALF_COLUMNS), tl.float32)
    k_one = tl.zeros((KV_HEADS, HALF_COLUMNS), tl.float32)
    k_two = tl.zeros((KV_HEADS, HALF_COLUMNS), tl.float32)
    q_rest = tl.zeros((HEADS, COLUMNS if 2 * HALF < E else 1), tl.float32)
    k_rest = tl.zeros((KV_HEADS, COLUMNS if 2 * HALF < E else 1), tl.float32)
    token = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), tokens, tl.num_programs(0)):
        batch = token // T
        place = token % T
        cosine, sine = _angles(cos, sin, token, T, angle_batch, HALF, HALF_COLUMNS)
        here = qkv + token * ((H + 2 * K) * E)
        target = dqkv + token * ((H + 2 * K) * E)
        q_one, q_two, q_rest = _turn_back(
            here, dq + batch * q_batch + place * q_token, q_head, target, q_weight, cosine, sine,
            eps, q_one, q_two, q_rest,
            H, E, HALF, HEADS, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET,
        )  # fmt: skip
        k_one, k_two, k_rest = _turn_back(
            here + H * E, dk + batch * k_batch + place * k_token, k_head, target + H * E,
            k_weight, cosine, sine, eps, k_one, k_two, k_rest,
            K, E, HALF, KV_HEADS, HALF_COLUMNS, COLUMNS, INTERLEAVED, UNIT_OFFSET,
        )  # fmt: skip
        values = dv + batch * v_batch + place * v_token
        copy_heads(values, target + (H + K) * E, v_head, K, 0, E, E, KV_HEADS, COLUMNS)
        token += tl.num_programs(0)
    parts += tl.program_id(0) * (2 * E)
    _store_part(parts, q_one, q_two, q_rest, E, HALF, HALF_COLUMNS, COLUMNS, INTERLEAVED)
    _store_part(parts + E, k_one, k_two, k_rest, E, HALF, HALF_COLUMNS, COLUMNS, INTERLEAVED)


@triton.jit
def _turn_back(
    x,
    dy,
    dy_head,
    dx,
    weight,
    cosine,
    sine,
    eps,
    part_one,
    part_two,
    part_rest,
    H: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Write the gradient of a token's heads; return the weight's with this token added."""
    one, two = load_pairs(x, E, H, HALF, HEADS, HALF_COLUMNS, INTERLEAVED)
    turned, turned_two = load_pairs(dy, dy_head, H, HALF, HEADS, HALF_COLUMNS, INTERLEAVED)
    square = tl.sum(one * one + two * two, axis=1)
    if 2 * HALF < E:
        rest = _load_rest(x, E, H, HALF, E, HEADS, COLUMNS)
        grad_rest = _load_rest(dy, dy_head, H, HALF, E, HEADS, COLUMNS)
        square += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(square / E + eps)[:, None]
    one *= scale
    two *= scale
    grad = turned * cosine + turned_two * sine
    grad_two = turned_two * cosine - turned * sine
    part_one += grad * one
    part_two += grad_two * two
    factor, factor_two = load_pairs(weight, 0, 1, HALF, 1, HALF_COLUMNS, INTERLEAVED)
    if UNIT_OFFSET:
        factor += 1.0
        factor_two += 1.0
    grad *= factor
    grad_two *= factor_two
    along = tl.sum(grad * one + grad_two * two, axis=1)
    if 2 * HALF < E:
        rest *= scale
        part_rest += grad_rest * rest
        factor_rest = _load_rest(weight, 0, 1, HALF, E, 1, COLUMNS)
        if UNIT_OFFSET:
            factor_rest += 1.0
        grad_rest *= factor_rest
        along += tl.sum(grad_rest * rest, axis=1)
    along = (along / E)[:, None]
    store_pairs(
        dx, (grad - one * along) * scale, (grad_two - two * along) * scale,
        H, E, HALF, HEADS, HALF_COLUMNS, INTERLEAVED,
    )  # fmt: skip
    if 2 * HALF < E:
        _store_rest(dx, (grad_rest - rest * along) * scale, H, HALF, E, HEADS, COLUMNS)
    return part_one, part_two, part_rest


@triton.jit
def _store_part(
    out,
    one,
    two,
    rest,
    E: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Add up the heads and store one program's part of a weight's gradient."""
    one, two = tl.sum(one, axis=0)[None, :], tl.sum(two, axis=0)[None, :]
    store_pairs(out, one, two, 1, E, HALF, 1, HALF_COLUMNS, INTERLEAVED)
    if 2 * HALF < E:
        _store_rest(out, tl.sum(rest, axis=0)[None, :], 1, HALF, E, 1, COLUMNS)


@triton.jit
def _angles(cos, sin, token, T, angle_batch, HALF: tl.constexpr, HALF_COLUMNS: tl.constexpr):
    """Load the cosines and sines of a token's place."""
    column = tl.arange(0, HALF_COLUMNS)
    here = (token // T) * angle_batch + (token % T) * HALF + column
    cosine = tl.load(cos + here, mask=column < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + here, mask=column < HALF, other=0.0).to(tl.float32)
    return cosine[None, :], sine[None, :]


@triton.jit
def _load_rest(
    x,
    head_stride,
    H: tl.constexpr,
    HALF: tl.constexpr,
    E: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load what does not turn, the columns from 2·HALF on; 0 elsewhere."""
    head = tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    inside = (head < H)[:, None] & ((column >= 2 * HALF) & (column < E))[None, :]
    value = tl.load(x + head[:, None] * head_stride + column[None, :], mask=inside, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _store_rest(
    out,
    value,
    H: tl.constexpr,
    HALF: tl.constexpr,
    E: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    inside = (head < H)[:, None] & ((column >= 2 * HALF) & (column < E))[None, :]
    here = out + head[:, None] * E + column[None, :]
    tl.store(here, value.to(out.dtype.element_ty), mask=inside)
