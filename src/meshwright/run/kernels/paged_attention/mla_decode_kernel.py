"""The loop of latent attention over pages; `mla_decode` says what it computes.

A latent is key and value at once: it is read once, multiplied with queries as it lies turned and
with their weights as it lies.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.paged_attention.kv_tile import (
    MASKED_SCORE,
    load_pages,
    load_queries,
    load_tile,
    modify_scores,
    tile_dot,
    unpack_pairs,
)
from meshwright.run.kernels.triton_compat import tl, triton


@triton.jit
def attend_latent_tiles(
    q, cache, table, inside, place, length, scale, begin, end, page_stride, token_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Attend over tiles begin to end: weighted latents in two halves, maximum, sum of weights."""
    step: tl.constexpr = 2 if PAIRS else 1
    r_one, r_two, _ = load_queries(q + RANK, inside, scale, ROPE, ROPE_COLUMNS, PAIRS)
    q_one, q_two, scale = load_queries(q, inside, scale, RANK, COLUMNS, PAIRS)
    one = tl.zeros((M, COLUMNS), tl.float32)
    two = one if PAIRS else 0.0
    most = tl.full((M,), MASKED_SCORE, tl.float32)
    sums = tl.zeros((M,), tl.float32)
    key = tl.arange(0, TILE)
    pages = load_pages(table, begin * TILE, key, length, BLOCK, TILE)
    for tile in tl.range(begin, end):
        here = tile * TILE + key
        page = pages.to(tl.int64) * page_stride
        pages = load_pages(table, (tile + 1) * TILE, key, length, BLOCK, TILE)
        if BLOCK % TILE == 0:
            start = cache + page + tile * TILE % BLOCK * token_stride
            offset = key * token_stride
        else:
            start = cache
            offset = page + here % BLOCK * token_stride
        held = here < length
        latents = load_tile(start, offset, held, RANK // step, COLUMNS, True)
        ropes = load_tile(start + RANK // step, offset, held, ROPE // step, ROPE_COLUMNS, True)
        l_one, l_two = unpack_pairs(latents, PAIRS)
        k_one, k_two = unpack_pairs(ropes, PAIRS)
        scores = tile_dot(r_one, tl.trans(k_one), None)
        scores = tile_dot(q_one, tl.trans(l_one), scores)
        if PAIRS:
            scores = tile_dot(r_two, tl.trans(k_two), scores)
            scores = tile_dot(q_two, tl.trans(l_two), scores)
        scores = modify_scores(scores, here, place, None, scale, 1.0, 0, 0, False, True)
        now = tl.maximum(most, tl.max(scores, 1))
        weight = tl.exp2(most - now)
        shares = tl.exp2(scores - now[:, None])
        most = now
        sums = sums * weight + tl.sum(shares, 1)
        shares = shares.to(l_one.dtype)
        one = tile_dot(shares, l_one, one * weight[:, None])
        if PAIRS:
            two = tile_dot(shares, l_two, two * weight[:, None])
    if not PAIRS:
        two = one
    return one, two, most, sums
