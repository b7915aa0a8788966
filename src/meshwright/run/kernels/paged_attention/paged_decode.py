"""Decode attention: one query (or a few) per row, over keys and values that lie in pages.

    out[r, h] = softmax(scale · q[r, h] · kᵀ + what the options add) v

Bytes moved, the floor: every key and value that is seen, once: 2 · K · E · (bytes of an element)
per key, whatever the number of query heads. Queries, outputs, tables and parts of split rows are
small beside it.

How work is divided is found on the device from the lengths, so that one CUDA graph serves all: all
keys of all rows and heads stand in one line, which a single wave of programs cuts into equal
shares (`paged_decode_kernel`). `plan_decode` makes that cut once for all layers of a step whose
windows are alike. A row among shorter ones is shared by as many programs as it needs; parts are
joined in the order of keys by a second, small kernel. With `invariant` a row is cut at places that
follow from its own length alone, so that its result does not depend on what else is in the batch.

Bytes in flight on each multiprocessor, for E = 128 (H200: 4.8 TB/s · 0.8 µs of latency under load,
by 132, asks for 29 KB): a tile of 64 keys with its values is 32 KiB in bfloat16; four stages keep
two tiles in flight while another is worked on, for each of two programs: 128 KiB. In float8 a tile
of 128 keys is as large. The loop takes 400 instructions of a warp for such a tile in bfloat16 and
670 in float8 (compiled by Triton 3.6), where the memory takes about 1,500 cycles to bring it.

Shapes: R rows, N queries of all rows, H query heads, K key/value heads, G = H / K, E head width, B
blocks of a row.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.paged_attention.paged_decode_kernel import (
    decode_kernel,
    merge_splits_kernel,
)
from meshwright.run.kernels.paged_attention.paged_reference import (
    ScoreModifiers,
    paged_decode_reference,
)
from meshwright.run.kernels.paged_attention.split_kv_kernel import split_kv_kernel
from meshwright.run.kernels.rotary.rotary_kernel import next_power_of_2
from meshwright.run.kernels.triton_compat import (
    KernelBackend,
    make_pdl_launch_options,
    should_use_triton,
)

SPLITS = 16
"""Parts of a row at most where the cut must not depend on other rows."""
SPLITS_PER_MERGE = 16
"""Parts that are joined at a time."""


class DecodeTiles(NamedTuple):
    """How decode attention is cut into programs."""

    tile_tokens: int
    """Keys that a program works on at a time."""
    warps: int
    stages: int
    programs_per_sm: int
    """Programs of the single wave on each multiprocessor."""
    min_tiles_per_split: int = 2
    """Tiles of a share at least."""

    @property
    def registers(self) -> int | None:
        """Registers of a thread at most, so that all programs of the wave run at a time."""
        most = 65536 // (self.programs_per_sm * self.warps * 32) // 8 * 8
        return most if most < 255 else None

    def fit_to_block(self, block_tokens: int) -> "DecodeTiles":
        """Return the same cut with tiles that pages hold whole, if they are long enough for it."""
        return (
            self._replace(tile_tokens=min(self.tile_tokens, block_tokens))
            if block_tokens >= 32
            else self
        )


DECODE_TILES: dict[tuple[int, int], DecodeTiles] = {
    (1, 64): DecodeTiles(tile_tokens=128, warps=4, stages=2, programs_per_sm=4),
    (1, 128): DecodeTiles(tile_tokens=128, warps=4, stages=2, programs_per_sm=4),
    (1, 256): DecodeTiles(tile_tokens=64, warps=4, stages=3, programs_per_sm=2),
    (2, 64): DecodeTiles(tile_tokens=64, warps=4, stages=2, programs_per_sm=4),
    (2, 128): DecodeTiles(tile_tokens=64, warps=4, stages=2, programs_per_sm=3),
    (2, 256): DecodeTiles(tile_tokens=32, warps=4, stages=3, programs_per_sm=2),
    (4, 64): DecodeTiles(tile_tokens=64, warps=4, stages=2, programs_per_sm=2),
    (4, 128): DecodeTiles(tile_tokens=32, warps=4, stages=2, programs_per_sm=2),
    (4, 256): DecodeTiles(tile_tokens=32, warps=4, stages=2, programs_per_sm=1),
}
"""By the bytes of a cached element and the head's width, up to that power of two. Those of width
128 were the best of 45 and 81 tried on an H200 (`benchmarks/decode_attention.py`, 2026-11-16), over
rows of equal and of very unequal lengths; the others follow them by registers and shared memory."""


def select_decode_tiles(cache: Tensor, group: int) -> DecodeTiles:
    """Choose how to cut, by what is cached and how many query heads share it, never by rows."""
    element, width = cache.element_size(), min(256, max(64, next_power_of_2(cache.shape[-1])))
    cut = DECODE_TILES[element, width]
    if group > 16:
        # Queries and weights of so many heads take their part of the shared memory.
        cut = DecodeTiles(
            tile_tokens=64 if element == 1 else 32,
            warps=4,
            stages=2 if element == 4 else 3,
            programs_per_sm=1 if element == 4 or width > 128 else 2,
        )
    return cut.fit_to_block(cache.shape[1])


class DecodePlan(NamedTuple):
    """How the keys of a step are shared out; good for every layer with such a cache and window."""

    work_partition: Tensor
    """int32: grains before each row and in all, then the row where each program begins."""
    tiles: DecodeTiles
    programs: int
    splits: int
    window: int | None
    chunk: int | None
    queries: int = 1
    """Of each row."""

    @property
    def rows(self) -> int:
        """The rows whose keys are shared out."""
        return len(self.work_partition) - self.programs - 2


def plan_decode(
    lengths_R: Tensor,
    k_cache: Tensor,
    heads: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    queries: int = 1,
    invariant: bool = False,
    live_1: Tensor | None = None,
    cut: DecodeTiles | None = None,
) -> DecodePlan:
    """Share out the keys of rows among programs, on the device (Triton's part alone needs it).

    `live_1`, int32, says how many of the rows there are where only the device knows it: those
    behind have no share, and nothing is written for them.
    """
    lines = heads // k_cache.shape[2] * queries
    cut = cut or select_decode_tiles(k_cache, lines)
    programs = cut.programs_per_sm * _multiprocessors(lengths_R.device)
    rows, splits = len(lengths_R), SPLITS if invariant else 0
    units = k_cache.shape[2] * -(-lines // _packed(lines))
    counts = torch.empty(rows + programs + 2, dtype=torch.int32, device=lengths_R.device)
    split_kv_kernel[(-(-(programs + 1) // 16),)](
        lengths_R,
        counts,
        live_1,
        rows,
        programs,
        units,
        _least(cut, splits),
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        TILE=cut.tile_tokens,
        QUERIES=queries,
        SPLITS=splits,
        ROWS=next_power_of_2(max(rows, 2)),
        PROGRAMS=16,
        num_warps=4,
    )
    return DecodePlan(counts, cut, programs, splits, window, chunk, queries)


def paged_decode(
    q_NHE: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    queries: int = 1,
    plan: DecodePlan | None = None,
    invariant: bool = False,
    out: Tensor | None = None,
    rows: int | None = None,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Attend with one query per row, which is the last of the row's keys, or with a few.

    Args:
        q_NHE: Queries, row after row; H is a multiple of K.
        k_cache: (blocks, block_tokens, K, E), last dimension dense; 16 or 32 bits, or e4m3.
        v_cache: The same, with the same strides.
        tables_RB: int32, the blocks of each row in order.
        lengths_R: int32, keys of each row; the output of a row without keys is zeros.
        scale: Multiplier of the scores; None is 1/sqrt(E).
        window: Each query sees this many positions, its own included.
        chunk: Attention starts afresh every so many positions.
        softcap: Scores are squashed by tanh to this range.
        sinks: A logit per query head that takes attention without giving value.
        alibi: A slope per query head, times the (negative) distance added to the scores.
        k_scale: One float32 that multiplies cached keys.
        v_scale: One float32 that multiplies cached values.
        queries: Of each row, the last of its keys: more than one to verify what was guessed. Up to
            16 / G of them take no longer than one.
        plan: What `plan_decode` made of these lengths; None makes one.
        invariant: Cut rows by their own lengths alone; a plan says so itself.
        out: Where to write, (N, H, E) and dense; None makes room.
        rows: Attend with the queries of so many rows, the first ones; None are all.
        backend: Where to run.
    """
    check_kv_cache(q_NHE, k_cache, v_cache, tables_RB, lengths_R)
    whole, rows = rows is None, len(lengths_R) if rows is None else rows
    few = rows * queries
    if len(q_NHE) < few or (whole and len(q_NHE) != few):
        what = f"{len(q_NHE)} for {rows} rows of {queries} queries"
        raise InputError([Problem("q", what, "give every row as many")])
    scale = q_NHE.shape[-1] ** -0.5 if scale is None else scale
    shaping = ScoreModifiers(scale, window, chunk, softcap, sinks, alibi)
    out = torch.empty(q_NHE.shape, dtype=q_NHE.dtype, device=q_NHE.device) if out is None else out
    if not should_use_triton(backend, q_NHE):
        out[:few] = paged_decode_reference(
            q_NHE[:few], k_cache, v_cache, tables_RB[:rows], lengths_R[:rows], shaping, k_scale,
            v_scale,
        )  # fmt: skip
        return out
    if plan is None:
        plan = plan_decode(
            lengths_R[:rows], k_cache, q_NHE.shape[1], window=window, chunk=chunk, queries=queries,
            invariant=invariant,
        )  # fmt: skip
    check_decode_plan(plan, rows, window, chunk, queries)
    given = (q_NHE, k_cache, v_cache, tables_RB, lengths_R)
    launch_decode(given, out, plan, (k_scale, v_scale), shaping)
    return out


def launch_decode(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    plan: DecodePlan,
    scales: tuple[Tensor | None, Tensor | None],
    shaping: ScoreModifiers,
) -> None:
    """Run both kernels; keys wider than the output are latents with a rotary part behind them."""
    q_NHE, k_cache, v_cache, tables_RB, lengths_R = given
    rows, (_, heads, width) = plan.rows, out.shape
    assert out.is_contiguous()
    kv_heads, rope = k_cache.shape[2], q_NHE.shape[-1] - width
    group = heads // kv_heads
    packed = _packed(group * plan.queries)
    cut, splits = plan.tiles, plan.splits
    least = _least(cut, splits)
    units = kv_heads * -(-group * plan.queries // packed)
    slots = rows * units * splits if splits else 2 * plan.programs
    parts = torch.empty(slots, packed, width, dtype=torch.float32, device=out.device)
    stats = torch.empty(slots, packed, 2, dtype=torch.float32, device=out.device)
    pairs = k_cache.element_size() == 1
    keys, values = (view_as_int16_pairs(cache) if pairs else cache for cache in (k_cache, v_cache))
    step = 2 if pairs else 1
    decode_kernel[(plan.programs,)](
        q_NHE, keys, values, tables_RB, lengths_R, plan.work_partition, out, parts, stats,
        shaping.sinks, shaping.alibi, *scales, shaping.scale, shaping.softcap or 1.0, rows,
        plan.programs, least, *q_NHE.stride()[:2], *keys.stride()[:3], tables_RB.stride(0),
        K=kv_heads, G=group, E=width, M=max(16, next_power_of_2(packed)), BLOCK=k_cache.shape[1],
        TILE=cut.tile_tokens, COLUMNS=max(16, next_power_of_2(width // step)),
        PAIRS=pairs, WINDOW=shaping.window or 0,
        CHUNK=shaping.chunk or 0, CAPPED=shaping.softcap is not None, SPLITS=splits, PACKED=packed,
        QUERIES=plan.queries,
        ROPE=rope, ROPE_COLUMNS=max(16, next_power_of_2(max(1, rope // step))),
        num_warps=cut.warps, num_stages=cut.stages, maxnreg=cut.registers,
        **make_pdl_launch_options(out),
    )  # fmt: skip
    merge_splits_kernel[(rows * units if splits else plan.programs, packed)](
        plan.work_partition, out, parts, stats, shaping.sinks, rows, plan.programs, least,
        K=kv_heads, G=group, E=width, PACKED=packed, QUERIES=plan.queries,
        COLUMNS=next_power_of_2(width), PIECES=SPLITS_PER_MERGE, SPLITS=splits, num_warps=2,
        **make_pdl_launch_options(out),
    )  # fmt: skip


def view_as_int16_pairs(cache: Tensor) -> Tensor:
    """See 8-bit elements two by two, as whole numbers of 16 bits."""
    return cache.view(torch.int16)


def _packed(lines: int) -> int:
    """Count the lines of a unit: heads that share keys, times queries; 64 at most."""
    return min(lines, 64)


def _least(cut: DecodeTiles, splits: int) -> int:
    return 1 if splits else cut.min_tiles_per_split


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # interpreted: few enough that rows are shared, and shares hold many rows
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_decode_plan(
    plan: DecodePlan, rows: int, window: int | None, chunk: int | None, queries: int = 1
) -> None:
    """Refuse a plan of other rows."""
    made = (plan.rows, plan.window, plan.chunk, plan.queries)
    used = (rows, window, chunk, queries)
    if made != used:
        what = f"made for (rows, window, chunk, queries) = {made}, used for {used}"
        raise InputError([Problem("plan", what, "make a plan for each window, with plan_decode")])


def check_kv_cache(
    q_NHE: Tensor, k_cache: Tensor, v_cache: Tensor, tables_RB: Tensor, lengths_R: Tensor
) -> None:
    """Refuse queries, caches and tables that do not fit each other."""
    problems = []
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape:
        what = f"shapes {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        problems.append(Problem("k_cache, v_cache", what, "give both (blocks, tokens, K, E)"))
    elif k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        what = f"strides {k_cache.stride()} and {v_cache.stride()}"
        problems.append(Problem("k_cache, v_cache", what, "lay both out alike, E dense"))
    elif q_NHE.shape[-1] != k_cache.shape[3] or q_NHE.shape[1] % k_cache.shape[2]:
        what = f"queries of shape {tuple(q_NHE.shape)} for a cache of {tuple(k_cache.shape)}"
        problems.append(Problem("q", what, "give heads of that width, a multiple of the cache's"))
    elif k_cache.shape[1] & (k_cache.shape[1] - 1):
        what = f"{k_cache.shape[1]} tokens"
        problems.append(Problem("block_tokens", what, "use a power of two"))
    if q_NHE.stride(-1) != 1:
        problems.append(Problem("q", f"strides {q_NHE.stride()}", "make the last one 1"))
    if len(tables_RB) != len(lengths_R):
        what = f"{len(tables_RB)} rows beside {len(lengths_R)} lengths"
        problems.append(Problem("tables", what, "give one row of blocks per length"))
    if problems:
        raise InputError(problems)
