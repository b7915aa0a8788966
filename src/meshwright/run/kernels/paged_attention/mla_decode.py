"""Decode attention over pages of latents (DeepSeek's multi-head latent attention), absorbed.

Keys and values of all heads come of one latent per token by two matrices, which queries and
outputs take over: with q already multiplied by the keys' matrix,

    out[r, h] = softmax(scale · q[r, h] · [latent | rope]ᵀ) latent

where the last elements of a cached token, its rotary key, are key alone. What comes out is still a
latent per head, for the values' matrix to turn into values.

Bytes moved, the floor: every cached token once, (L + rope) · (bytes of an element), for up to 64
heads; 4 · H · L operations on each make it a matter of products from about 100 heads on. Work is
shared out as in `paged_decode`, and `plan_mla_decode` serves all layers of a step.

A row has one query here. Queries of a prompt may be given as rows of their own, with the length
each sees; or keys and values be made of cached latents first, which is cheaper for many queries.

Shapes: R rows, H heads, L latent width, C = L + rotary width, B blocks of a row.
"""

from torch import Tensor, empty

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.paged_attention.paged_decode import (
    DecodePlan,
    DecodeTiles,
    check_decode_plan,
    check_kv_cache,
    launch_decode,
    plan_decode,
)
from meshwright.run.kernels.paged_attention.paged_reference import (
    ScoreModifiers,
    paged_decode_reference,
)
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton

FEW_HEADS_TILES: dict[int, DecodeTiles] = {
    1: DecodeTiles(tile_tokens=32, warps=4, stages=4, programs_per_sm=2),
    2: DecodeTiles(tile_tokens=32, warps=4, stages=3, programs_per_sm=2),
    4: DecodeTiles(tile_tokens=16, warps=4, stages=2, programs_per_sm=1),
}
"""By the bytes of a cached element, for up to 16 heads. Not yet tuned on a GPU. Float32 is left to
torch unless Triton is insisted on: on a GPU it needs more shared memory than there is."""
MANY_HEADS_TILES: dict[int, DecodeTiles] = {
    1: DecodeTiles(tile_tokens=64, warps=8, stages=2, programs_per_sm=1),
    2: DecodeTiles(tile_tokens=32, warps=8, stages=3, programs_per_sm=1),
    4: DecodeTiles(tile_tokens=16, warps=8, stages=2, programs_per_sm=1),
}
"""The same for more heads, whose sums fill the registers of eight warps."""


def plan_mla_decode(
    lengths_R: Tensor,
    cache: Tensor,
    heads: int,
    *,
    invariant: bool = False,
    cut: DecodeTiles | None = None,
) -> DecodePlan:
    """Share out the latents of rows among programs, on the device."""
    cut = cut or (FEW_HEADS_TILES if heads <= 16 else MANY_HEADS_TILES)[cache.element_size()]
    return plan_decode(lengths_R, cache.unsqueeze(2), heads, invariant=invariant, cut=cut)


def paged_mla_decode(
    q_RHC: Tensor,
    cache: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    *,
    rank: int,
    scale: float,
    cache_scale: Tensor | None = None,
    plan: DecodePlan | None = None,
    invariant: bool = False,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Return a latent (R, H, L) per row and head.

    Args:
        q_RHC: Queries that took over the keys' matrix, L elements, then the rotary ones.
        cache: (blocks, block_tokens, C), last dimension dense; 16 or 32 bits, or e4m3.
        tables_RB: int32, the blocks of each row in order.
        lengths_R: int32, keys of each row; the output of a row without keys is zeros.
        rank: L.
        scale: Multiplier of the scores.
        cache_scale: One float32 that multiplies what is cached.
        plan: What `plan_mla_decode` made of these lengths; None makes one.
        invariant: Cut rows by their own lengths alone; a plan says so itself.
        backend: Where to run.
    """
    keys = cache.unsqueeze(2)
    check_kv_cache(q_RHC, keys, keys, tables_RB, lengths_R)
    rows, heads, width = q_RHC.shape
    if not 0 < rank < width:
        what = f"{rank} of {width} cached elements"
        raise InputError([Problem("rank", what, "give the width of the latents alone")])
    shaping = ScoreModifiers(scale)
    too_wide = backend == "auto" and cache.element_size() == 4
    if too_wide or not should_use_triton(backend, q_RHC):
        given = (q_RHC, keys, keys[..., :rank], tables_RB, lengths_R)
        return paged_decode_reference(*given, shaping, cache_scale, cache_scale)
    plan = plan or plan_mla_decode(lengths_R, cache, heads, invariant=invariant)
    check_decode_plan(plan, rows, None, None)
    out = empty(rows, heads, rank, dtype=q_RHC.dtype, device=q_RHC.device)
    given = (q_RHC, keys, keys, tables_RB, lengths_R)
    launch_decode(given, out, plan, (cache_scale, cache_scale), shaping)
    return out
