"""Prefill attention: rows with many queries each, over keys and values that lie in pages.

A row's queries are the last of its keys, whether the others were cached just now, in an earlier
chunk of the same prompt, or by another request with the same beginning.

Bytes moved, the floor: queries and outputs once, and a row's keys and values once for every block
of its queries: beyond some hundred queries the products decide, 4 · H · E operations per query and
key.

`paged_attention` takes rows of both kinds, decodes first. How many of each there are may be told by
a tensor (`MixedBatchCounts`), so that a captured step serves any mixture. Where nothing was cached
before (see `has_no_cached_prefix`) attention over the fresh keys and values, without pages, is
faster.

Shapes: N queries of all rows, R rows, H query heads, K key/value heads, E head width.
"""

# Tensors that lie beside each other in every call are handed over by position.
# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.paged_attention.paged_decode import (
    DecodePlan,
    check_kv_cache,
    paged_decode,
    plan_decode,
    view_as_int16_pairs,
)
from meshwright.run.kernels.paged_attention.paged_prefill_kernel import prefill_kernel
from meshwright.run.kernels.paged_attention.paged_reference import (
    ScoreModifiers,
    paged_prefill_reference,
)
from meshwright.run.kernels.rotary.rotary_kernel import next_power_of_2
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton


class PrefillTiles(NamedTuple):
    """How prefill attention is cut into programs."""

    rows: int
    """Queries times heads that share keys."""
    tile: int
    """Keys at a time."""
    warps: int
    stages: int

    @property
    def for_persistent_kernel(self) -> "PrefillTiles":
        """The same for programs that take several blocks: a loop around all takes registers."""
        return self._replace(tile=min(self.tile, 64))


_AT_ONCE = 16
"""Rows for which captured prefill attention has programs of their own."""


class MixedBatchCounts(NamedTuple):
    """How rows of both kinds lie in a step, where only the device knows."""

    counts_2: Tensor
    """int32: how many of the first rows have one query each, and how many rows come behind them.
    Rows behind these begin where the last one ends."""
    num_decodes: int
    """How many the first are at most."""


PREFILL_TILES: dict[tuple[int, int], PrefillTiles] = {
    (1, 64): PrefillTiles(128, 64, warps=8, stages=3),
    (1, 128): PrefillTiles(128, 128, warps=8, stages=3),
    (1, 256): PrefillTiles(64, 64, warps=8, stages=2),
    (2, 64): PrefillTiles(128, 128, warps=8, stages=3),
    (2, 128): PrefillTiles(128, 128, warps=8, stages=3),
    (2, 256): PrefillTiles(64, 64, warps=8, stages=2),
    (4, 64): PrefillTiles(64, 32, warps=4, stages=2),
    (4, 128): PrefillTiles(64, 32, warps=4, stages=2),
    (4, 256): PrefillTiles(32, 32, warps=4, stages=1),
}
"""By the bytes of a cached element and the head's width, up to that power of two. Those of 1 and 2
bytes for heads of 128 were the fastest on an H200; the others follow from them untried."""


def has_no_cached_prefix(queries: Sequence[int], lengths: Sequence[int]) -> bool:
    """Say whether every key of every row is new, so that attention needs no pages at all."""
    return all(many == length for many, length in zip(queries, lengths, strict=True))


def paged_prefill(
    q_NHE: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    starts_R1: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tiles: PrefillTiles | None = None,
    out: Tensor | None = None,
    skip: tuple[int, int] | MixedBatchCounts = (0, 0),
    backend: KernelBackend = "auto",
) -> Tensor:
    """Attend with the queries of each row, starts[r] to starts[r + 1], to its pages.

    Tokens that belong to no row get zeros. The other arguments are those of `paged_decode`; `out`
    is where to write, (N, H, E) with dense heads; `skip` are rows and their tokens, the first ones,
    that are left out, with what is in `out` for them: as numbers, or as those that a
    `MixedBatchCounts` has.
    """
    check_kv_cache(q_NHE, k_cache, v_cache, tables_RB, lengths_R)
    scale = q_NHE.shape[-1] ** -0.5 if scale is None else scale
    number, heads, width = q_NHE.shape
    rows, kv_heads = len(lengths_R), k_cache.shape[2]
    out = torch.empty(q_NHE.shape, dtype=q_NHE.dtype, device=q_NHE.device) if out is None else out
    on_device = should_use_triton(backend, q_NHE)
    split = None
    if isinstance(skip, MixedBatchCounts) and on_device:
        # Read where it lies: for all that is known here, no row is left out.
        split, skip = skip.counts_2, (0, 0)
    elif isinstance(skip, MixedBatchCounts):
        skip = (int(skip.counts_2[0]),) * 2
    skipped, few = skip
    left = rows - skipped
    if number <= few:
        return out
    if not on_device:
        out[few:] = paged_prefill_reference(
            q_NHE[few:], k_cache, v_cache, tables_RB[skipped:], lengths_R[skipped:],
            starts_R1[skipped:] - few, ScoreModifiers(scale, window, chunk, softcap, sinks, alibi),
            k_scale, v_scale,
        )  # fmt: skip
        return out
    group = heads // kv_heads
    size = min(256, max(64, next_power_of_2(width)))
    tiles = tiles or PREFILL_TILES[k_cache.element_size(), size]
    tiles = tiles if split is None else tiles.for_persistent_kernel
    packed = min(group, tiles.rows)
    pairs = k_cache.element_size() == 1
    keys, values = (view_as_int16_pairs(cache) if pairs else cache for cache in (k_cache, v_cache))
    # An upper bound: how many blocks each row needs is known on the device alone. Where there may
    # be many rows, and mostly are few, programs go on with what is left instead.
    room = left if split is None else min(left, _AT_ONCE)
    blocks = (number - few) // (tiles.rows // packed) + room + 1
    prefill_kernel[(blocks, kv_heads * -(-group // packed))](
        q_NHE, keys, values, tables_RB, lengths_R, starts_R1, out, sinks, alibi, k_scale, v_scale,
        scale, softcap or 1.0, number, left, skipped, split, q_NHE.stride(0), q_NHE.stride(1),
        out.stride(0), *keys.stride()[:3], tables_RB.stride(0),
        K=kv_heads, G=group, E=width, M=tiles.rows, PACKED=packed, BLOCK=k_cache.shape[1],
        TILE=tiles.tile, COLUMNS=max(16, next_power_of_2(keys.shape[-1])),
        ROWS=_rows_tile(left + 1), PAIRS=pairs, WINDOW=window or 0, CHUNK=chunk or 0,
        CAPPED=softcap is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _rows_tile(rows: int) -> int:
    """Round up to one of few sizes: a step with some rows more must not wait for a compiler."""
    return 64 if rows <= 64 else max(1024, next_power_of_2(rows))


def paged_attention(
    q_NHE: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    starts_R1: Tensor,
    decodes: int | MixedBatchCounts,
    *,
    queries: int = 1,
    plan: DecodePlan | None = None,
    invariant: bool = False,
    **options: Any,
) -> Tensor:
    """Attend with rows of both kinds: the first `decodes` rows have one query each, or `queries`.

    Each kind has its kernel; `plan` is one of the first kind's lengths, `options` are what both
    take. With a `MixedBatchCounts` the plan knows of it, too.
    """
    out = torch.empty(q_NHE.shape, dtype=q_NHE.dtype, device=q_NHE.device)
    given = (q_NHE, k_cache, v_cache, tables_RB, lengths_R)
    if isinstance(decodes, MixedBatchCounts) and should_use_triton(
        options.get("backend", "auto"), q_NHE
    ):
        paged_decode(*given, plan=plan or _split_plan(q_NHE, k_cache, lengths_R, decodes, options),
                     out=out, rows=decodes.num_decodes, **options)  # fmt: skip
        return paged_prefill(*given, starts_R1, out=out, skip=decodes, **options)
    if isinstance(decodes, MixedBatchCounts):
        decodes = int(decodes.counts_2[0])
    few = decodes * queries
    if decodes:
        paged_decode(
            *given,
            queries=queries,
            plan=plan,
            invariant=invariant,
            out=out,
            rows=decodes,
            **options,
        )
    if few < len(q_NHE):
        paged_prefill(*given, starts_R1, out=out, skip=(decodes, few), **options)
    return out


def _split_plan(
    q_NHE: Tensor,
    k_cache: Tensor,
    lengths_R: Tensor,
    split: MixedBatchCounts,
    options: dict[str, Any],
) -> DecodePlan:
    return plan_decode(
        lengths_R[: split.num_decodes],
        k_cache,
        q_NHE.shape[1],
        window=options.get("window"),
        chunk=options.get("chunk"),
        live_1=split.counts_2[:1],
    )
