"""Keys and values written into pages, alone or straight from the fused projection.

    write_kv_cache      of keys and values at hand
    write_latent_cache  of the latents of latent attention, which are keys and values at once
    rope_and_write_kv   cuts a fused projection, norms and turns queries and keys where a model
                        does, hands out queries and writes keys and values into their pages: one
                        kernel in place of `split_qkv_apply_rotary` or `split_qkv_norm_rope` and
                        `write_kv_cache`

Bytes moved, the floor: every element is read once and written once, in the cache's own type.

A slot is block · block_tokens + offset; -1 is nowhere, for padding. Eight-bit caches hold
value / scale, cut off at ±448.

Letters: N tokens, H query heads, K key/value heads, E head width, C = (H + 2K)·E, L latent width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.paged_attention.kv_cache_write_kernel import (
    rope_and_write_kv_kernel,
    write_kv_kernel,
)
from meshwright.run.kernels.rotary.qk_norm_rope import QKNorms, split_qkv_norm_rope
from meshwright.run.kernels.rotary.rotary import QKVSizes, check_qkv, split_qkv_apply_rotary
from meshwright.run.kernels.rotary.rotary_kernel import next_power_of_2, select_rotary_tile
from meshwright.run.kernels.triton_compat import (
    KernelBackend,
    make_pdl_launch_options,
    should_use_triton,
)

TILE = 2048
"""Elements of a program."""
WARPS = 2


class KVCachePages(NamedTuple):
    """Where keys and values go: the caches of a layer, and the slot of each token."""

    k_cache: Tensor
    """(blocks, block_tokens, K, E), last dimension dense."""
    v_cache: Tensor
    """The same, with the same strides."""
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    """One float32 that what is cached is multiplied by when it is read."""
    v_scale: Tensor | None = None


def write_kv_cache(
    k_NKE: Tensor, v_NKE: Tensor, pages: KVCachePages, *, backend: KernelBackend = "auto"
) -> None:
    """Write keys and values into their slots."""
    _check(pages, len(k_NKE))
    k_cache, v_cache, slots, k_scale, v_scale = pages
    if not should_use_triton(backend, k_NKE):
        write_kv_cache_reference(k_NKE, k_cache, slots, k_scale)
        write_kv_cache_reference(v_NKE, v_cache, slots, v_scale)
        return
    tokens, kv_heads, width = k_NKE.shape
    if not tokens:
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_NKE, v_NKE))
    tile = select_rotary_tile(kv_heads, kv_heads, width, TILE)
    write_kv_kernel[(-(-tokens // tile.tokens) * (kv_heads // tile.heads), 2)](
        k, v, k_cache, v_cache, slots, k_scale, v_scale, tokens,
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        K=kv_heads, E=width, BLOCK=k_cache.shape[1], TOKENS=tile.tokens, HEADS=tile.heads,
        COLUMNS=next_power_of_2(width), EIGHT_BITS=k_cache.element_size() == 1, num_warps=WARPS,
    )  # fmt: skip


def write_latent_cache(
    x_NL: Tensor,
    cache: Tensor,
    slots_N: Tensor,
    scale: Tensor | None = None,
    *,
    backend: KernelBackend = "auto",
) -> None:
    """Write latents into their slots of a cache (blocks, block_tokens, L)."""
    if not should_use_triton(backend, x_NL):
        write_kv_cache_reference(x_NL, cache, slots_N, scale)
        return
    tokens, width = x_NL.shape
    if not tokens:
        return
    x = x_NL if x_NL.stride(-1) == 1 else x_NL.contiguous()
    each = max(1, TILE // next_power_of_2(width))
    write_kv_kernel[(-(-tokens // each), 1)](
        x, x, cache, cache, slots_N, scale, scale, tokens,
        x.stride(0), 0, x.stride(0), 0, cache.stride(0), cache.stride(1), 0,
        K=1, E=width, BLOCK=cache.shape[1], TOKENS=each, HEADS=1,
        COLUMNS=next_power_of_2(width), EIGHT_BITS=cache.element_size() == 1, num_warps=WARPS,
    )  # fmt: skip


def rope_and_write_kv(
    qkv_NC: Tensor,
    sizes: QKVSizes,
    angles: tuple[Tensor, Tensor],
    pages: KVCachePages,
    norms: QKNorms | None = None,
    *,
    interleaved: bool = False,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Return queries (N, H, E) of a fused projection, turned; its keys and values go to pages.

    Angles are cosines and sines of shape (N, R/2). No gradients.
    """
    cos, sin = angles
    check_qkv(qkv_NC[None], sizes, cos, sin)
    _check(pages, len(qkv_NC))
    if not should_use_triton(backend, qkv_NC):
        given = (qkv_NC[None], *sizes, cos, sin)
        if norms is None:
            q, k, v = split_qkv_apply_rotary(*given, interleaved=interleaved, backend=backend)
        else:
            q, k, v = split_qkv_norm_rope(*given, norms, interleaved=interleaved, backend=backend)
        write_kv_cache(k[0], v[0], pages, backend=backend)
        return q[0]
    tokens, half = len(qkv_NC), cos.shape[-1]
    k_cache, v_cache, slots, k_scale, v_scale = pages
    q_NHE = qkv_NC.new_empty(tokens, sizes.heads, sizes.head_dim)
    if not tokens:
        return q_NHE
    tile = select_rotary_tile(*sizes, TILE)
    parts = (sizes.heads + 2 * sizes.kv_heads) // tile.heads
    q_weight, k_weight, eps, offset = norms or (None, None, 0.0, False)
    rope_and_write_kv_kernel[(-(-tokens // tile.tokens) * parts,)](
        qkv_NC if qkv_NC.stride(-1) == 1 else qkv_NC.contiguous(),
        q_NHE, k_cache, v_cache, slots, q_weight, k_weight, cos.contiguous(), sin.contiguous(),
        k_scale, v_scale, tokens, qkv_NC.stride(0), *k_cache.stride()[:3], eps,
        H=sizes.heads, K=sizes.kv_heads, E=sizes.head_dim, HALF=half, BLOCK=k_cache.shape[1],
        TOKENS=tile.tokens, HEADS=tile.heads, HALF_COLUMNS=next_power_of_2(half),
        COLUMNS=next_power_of_2(sizes.head_dim), INTERLEAVED=interleaved, UNIT_OFFSET=offset,
        EIGHT_BITS=k_cache.element_size() == 1, num_warps=WARPS, **make_pdl_launch_options(q_NHE),
    )  # fmt: skip
    return q_NHE


def write_kv_cache_reference(
    x: Tensor, cache: Tensor, slots_N: Tensor, scale: Tensor | None = None
) -> None:
    """Write what each token has to its slot, with torch operations."""
    there = slots_N >= 0
    slots, kept = slots_N[there].long(), x[there]
    if cache.element_size() == 1:
        kept = kept.float() if scale is None else kept.float() / scale
        kept = kept.clamp(-448.0, 448.0).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    elif scale is not None:
        kept = kept.float() / scale
    block = cache.shape[1]
    cache[slots // block, slots % block] = kept.to(cache.dtype)


def _check(pages: KVCachePages, tokens: int) -> None:
    k_cache, v_cache, slots = pages[:3]
    problems = []
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        what = f"shapes {tuple(k_cache.shape)} and {tuple(v_cache.shape)}, or strides, differ"
        problems.append(Problem("k_cache, v_cache", what, "lay both out alike"))
    if k_cache.stride(-1) != 1:
        what = f"strides {k_cache.stride()}"
        problems.append(Problem("k_cache", what, "make the last dimension dense"))
    if tuple(slots.shape) != (tokens,):
        what = f"shape {tuple(slots.shape)} for {tokens} tokens"
        problems.append(Problem("slots", what, f"give it shape ({tokens},)"))
    if problems:
        raise InputError(problems)
