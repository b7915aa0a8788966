"""The kernel of rotary positions and its launch; `rotary` says what it computes.

A program takes some heads of some neighbouring tokens, of queries, of keys or of values alone: so
programs are alike whatever the numbers of heads, no thread is without work, and nobody has to wait
for another thread.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from typing import NamedTuple

import torch

from meshwright.run.kernels.triton_compat import tl, triton

TILE = 4096
"""Elements of one program: four accesses of 16 bytes per thread, in bfloat16."""
WARPS = 4


def launch_rotary(
    three: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    *,
    backward: bool,
) -> None:
    """Rotate q and k and copy v into `out`, a dense row per token; in place where q lies there."""
    # Any strides do, as long as neighbours within a head are neighbours in memory.
    q, k, v = (
        each if each is None or each.stride(-1) == 1 else each.contiguous() for each in three
    )
    assert q is not None
    batch, positions, heads, head_dim = q.shape
    if not out.numel():
        return
    kv_heads = 0 if k is None else k.shape[-2]
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    tile = select_rotary_tile(heads, kv_heads, head_dim, TILE)
    parts = (heads + (0 if k is None else kv_heads) + (0 if v is None else kv_heads)) // tile.heads
    strides = [stride for x in (q, k, v) for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    rotary_kernel[(batch * -(-positions // tile.tokens) * parts,)](
        q,
        k,
        v,
        out,
        cos,
        sin,
        positions,
        *strides,
        out.numel() // (batch * positions),
        cos.stride(0) if cos.dim() == 3 else 0,
        H=heads,
        K=kv_heads,
        E=head_dim,
        HALF=half,
        PARTS=parts,
        TOKENS=tile.tokens,
        HEADS=tile.heads,
        HALF_COLUMNS=next_power_of_2(half),
        COLUMNS=next_power_of_2(head_dim),
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        IN_PLACE=q.data_ptr() == out.data_ptr(),
        num_warps=WARPS,
    )


def next_power_of_2(number: int) -> int:
    """Return the number, or the next power of two above it."""
    return 1 << (number - 1).bit_length()


class RotaryTile(NamedTuple):
    """What a program holds at a time: both are powers of two."""

    tokens: int
    heads: int


def select_rotary_tile(heads: int, kv_heads: int, head_dim: int, elements: int) -> RotaryTile:
    """Choose a tile of about so many elements, whose heads divide queries' as well as keys'."""
    rows = max(1, elements // next_power_of_2(head_dim))
    # The largest power of two that divides both; no heads are divided by any.
    together = heads | kv_heads
    each = min(rows, together & -together)
    return RotaryTile(rows // each, each)


@triton.jit
def rotary_kernel(
    q,
    k,
    v,
    out,
    cos,
    sin,
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
    out_token,
    angle_batch,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Rotate heads of q or of k, or copy those of v, into the rows of `out`, one per token.

    In place only what changes is written. k and v may be absent; PARTS programs share the heads of
    the same tokens.
    """
    program = tl.program_id(0)
    first = (program % PARTS * HEADS).to(tl.int64)
    batch, place = locate_token_block(program // PARTS, T, TOKENS)
    inside = place + tl.arange(0, TOKENS * HEADS) // HEADS < T
    out += (batch * T + place) * out_token + first * E
    target = out + compute_tile_offsets(out_token, E, TOKENS, HEADS)
    angles = batch * angle_batch + place * HALF + compute_tile_offsets(HALF, 0, TOKENS, HEADS)
    if first < H:
        here = batch * q_batch + place * q_token + first * q_head
        _rotate(
            q + here + compute_tile_offsets(q_token, q_head, TOKENS, HEADS),
            target, cos + angles, sin + angles, inside,
            E, HALF, HALF_COLUMNS, COLUMNS, INTERLEAVED, BACKWARD, IN_PLACE,
        )  # fmt: skip
    elif first < H + K:
        if k is not None:
            here = batch * k_batch + place * k_token + (first - H) * k_head
            _rotate(
                k + here + compute_tile_offsets(k_token, k_head, TOKENS, HEADS),
                target, cos + angles, sin + angles, inside,
                E, HALF, HALF_COLUMNS, COLUMNS, INTERLEAVED, BACKWARD, IN_PLACE,
            )  # fmt: skip
    elif v is not None:
        here = batch * v_batch + place * v_token + (first - (H + K)) * v_head
        rows = v + here + compute_tile_offsets(v_token, v_head, TOKENS, HEADS)
        copy_columns(rows, target, inside, 0, E, COLUMNS)


@triton.jit
def _rotate(
    x,
    out,
    cos,
    sin,
    inside,
    E: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    one, two = load_pairs(x, inside, HALF, HALF_COLUMNS, INTERLEAVED)
    cosine = load_columns(cos, inside, 0, HALF, HALF_COLUMNS)
    sine = load_columns(sin, inside, 0, HALF, HALF_COLUMNS)
    if BACKWARD:
        sine = -sine
    if 2 * HALF < E and not IN_PLACE:
        copy_columns(x, out, inside, 2 * HALF, E, COLUMNS)
    store_pairs(
        out, one * cosine - two * sine, two * cosine + one * sine, inside,
        HALF, HALF_COLUMNS, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def locate_token_block(block, T, TOKENS: tl.constexpr):
    """Return the sequence of a block of tokens and the place of the first of them."""
    blocks = tl.cdiv(T, TOKENS)
    return (block // blocks).to(tl.int64), (block % blocks * TOKENS).to(tl.int64)


@triton.jit
def compute_tile_offsets(token_stride, head_stride, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Return how far the rows of a tile lie from the first one."""
    row = tl.arange(0, TOKENS * HEADS).to(tl.int64)
    return row // HEADS * token_stride + row % HEADS * head_stride


@triton.jit
def load_pairs(
    x, inside, HALF: tl.constexpr, HALF_COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load what turns together from where rows begin, as two float32 tiles of rows and pairs."""
    one, two = load_raw_pairs(x, inside, HALF, HALF_COLUMNS, INTERLEAVED)
    return one.to(tl.float32), two.to(tl.float32)


@triton.jit
def load_raw_pairs(
    x, inside, HALF: tl.constexpr, HALF_COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load the same as it lies in memory."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF_COLUMNS)
        within = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.load(x[:, None] + column[None, :], mask=within, other=0.0)
        one, two = tl.split(tl.reshape(both, (inside.shape[0], HALF_COLUMNS, 2)))
    else:
        column = tl.arange(0, HALF_COLUMNS)
        within = inside[:, None] & (column < HALF)[None, :]
        here = x[:, None] + column[None, :]
        one = tl.load(here, mask=within, other=0.0)
        two = tl.load(here + HALF, mask=within, other=0.0)
    return one, two


@triton.jit
def store_pairs(
    out,
    one,
    two,
    inside,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store what `load_pairs` loads, to where rows begin."""
    one = one.to(out.dtype.element_ty)
    two = two.to(out.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF_COLUMNS)
        within = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.reshape(tl.join(one, two), (inside.shape[0], 2 * HALF_COLUMNS))
        tl.store(out[:, None] + column[None, :], both, mask=within)
    else:
        column = tl.arange(0, HALF_COLUMNS)
        within = inside[:, None] & (column < HALF)[None, :]
        here = out[:, None] + column[None, :]
        tl.store(here, one, mask=within)
        tl.store(here + HALF, two, mask=within)


@triton.jit
def load_columns(x, inside, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr):
    """Load columns FIRST to LAST of each row as float32; 0 elsewhere."""
    column = tl.arange(0, COLUMNS)
    within = inside[:, None] & ((column >= FIRST) & (column < LAST))[None, :]
    return tl.load(x[:, None] + column[None, :], mask=within, other=0.0).to(tl.float32)


@triton.jit
def store_columns(
    out, value, inside, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store columns FIRST to LAST of each row."""
    column = tl.arange(0, COLUMNS)
    within = inside[:, None] & ((column >= FIRST) & (column < LAST))[None, :]
    tl.store(out[:, None] + column[None, :], value.to(out.dtype.element_ty), mask=within)


@triton.jit
def copy_columns(x, out, inside, FIRST: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy columns FIRST to LAST of each row."""
    store_columns(out, load_columns(x, inside, FIRST, LAST, COLUMNS), inside, FIRST, LAST, COLUMNS)
