"""The cases of `decode_attention`: rows of given lengths over pages, and everyone who attends.

Lengths are those of a published table of kernels on an H200 (32 query and 8 key/value heads of 128
elements; ai-dynamo/aiconfigurator at 095f58a51c, vLLM 0.22's FlashAttention 3 and TensorRT-LLM),
and mixed ones. Every call of a case reads other pages, so that no cache keeps what the memory has
to bring; calls are captured in one CUDA graph, as an engine's are.
"""

import os
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.run.kernels.paged_attention.paged_decode import DecodeTiles

HEADS, KV_HEADS, WIDTH = 32, 8, 128
L2_BYTES = 64 * 2**20
"""More than the H200's second-level cache holds."""
POOL_TOKENS = 640 * 1024
"""Tokens of the pages that all cases draw from: 2.5 GiB in bfloat16."""


class Case(NamedTuple):
    """Rows of one decode step, and what others took for them, in µs."""

    name: str
    lengths: tuple[int, ...]
    fa3_us: float | None = None
    trt_us: float | None = None
    fa3_fp8_us: float | None = None
    trt_fp8_us: float | None = None

    @property
    def tokens(self) -> int:
        """Keys of all rows."""
        return sum(self.lengths)

    def moved_bytes(self, element: int) -> int:
        """Bytes of all keys and values."""
        return 2 * self.tokens * KV_HEADS * WIDTH * element


CASES = (
    Case("1 x 8k", (8192,), 15.7, 23.9, 16.4, 13.9),
    Case("8 x 4k", (4096,) * 8, 41.4, 66.9, 31.8, 31.1),
    Case("32 x 2k", (2048,) * 32, 72.9, 87.8, 55.2, 44.6),
    Case("64 x 2k", (2048,) * 64, 137.7, 146.8, 104.2, 75.3),
    Case("128 x 2k", (2048,) * 128, 265.9, 254.9, 201.4, 132.8),
    Case("256 x 1k", (1024,) * 256, 279.1, 258.4, 223.4, 143.0),
    Case("32 x 16k", (16384,) * 32, 508.4, 493.0, 380.4, 254.3),
    Case("1 x 128k and 31 x 4k", (131072, *(4096,) * 31)),
    Case("256 x 100 to 1,600", tuple(100 + 1500 * row // 255 for row in range(256))),
)
TINY = (Case("3 x few", (40, 0, 90)),)


class Pool(NamedTuple):
    """Pages of keys and values, and the queries of as many rows as any case has."""

    k_cache: "Tensor"
    v_cache: "Tensor"
    q: "Tensor"
    scale: "Tensor | None"
    steps: "dict[str, list[Step]]"
    """The calls of each case, once made."""

    @property
    def block(self) -> int:
        """Tokens of a page."""
        return int(self.k_cache.shape[1])

    @property
    def element(self) -> int:
        """Bytes of a cached element."""
        return self.k_cache.element_size()


def make_pool(
    *,
    eight_bits: bool,
    block: int,
    heads_first: bool,
    tokens: int = POOL_TOKENS,
    rows: int = 256,
    device: str = "cuda",
) -> Pool:
    """Draw pages; `heads_first` stores a page head by head instead of token by token."""
    import torch

    torch.manual_seed(0)
    blocks = tokens // block
    shape = (blocks, KV_HEADS, block, WIDTH) if heads_first else (blocks, block, KV_HEADS, WIDTH)
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    caches = []
    for _ in range(2):
        cache = torch.empty(shape, dtype=kind, device=device).normal_()
        cache = cache.to(torch.float8_e4m3fn) if eight_bits else cache
        caches.append(cache.transpose(1, 2) if heads_first else cache)
    q = torch.randn(rows, HEADS, WIDTH, device=device).to(kind)
    scale = torch.tensor(0.5, device=device) if eight_bits else None
    return Pool(caches[0], caches[1], q, scale, {})


class Step(NamedTuple):
    """One call's rows: their pages, in no order, and their lengths."""

    tables: "Tensor"
    lengths: "Tensor"


def steps_of(case: Case, pool: Pool) -> list[Step]:
    """Return as many calls, each with pages of its own, as keep caches from helping."""
    import torch

    if case.name in pool.steps:
        return pool.steps[case.name]
    counts = [-(-length // pool.block) for length in case.lengths]
    each = max(sum(counts), 1)
    wanted = max(2, -(-4 * L2_BYTES // max(case.moved_bytes(pool.element), 1)))
    calls = max(1, min(wanted, 12, len(pool.k_cache) // each))
    order = torch.randperm(len(pool.k_cache), generator=torch.Generator().manual_seed(1)).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=pool.q.device)
    steps = []
    for call in range(calls):
        tables = torch.zeros(len(counts), max(1, *counts), dtype=torch.int32)
        at = call * each
        for row, count in enumerate(counts):
            tables[row, :count] = order[at : at + count]
            at += count
        steps.append(Step(tables.to(pool.q.device), lengths))
    pool.steps[case.name] = steps
    return steps


def ours(case: Case, pool: Pool, cut: "DecodeTiles | None" = None) -> list[Callable[[], object]]:
    """Return our calls, with the plan of the step already made, as all layers but one find it."""
    from meshwright.run.kernels.paged_attention.paged_decode import paged_decode, plan_decode

    steps = steps_of(case, pool)
    plan = plan_decode(steps[0].lengths, pool.k_cache, HEADS, cut=cut)
    q = pool.q[: len(case.lengths)]

    def call(step: Step) -> object:
        return paged_decode(
            q, pool.k_cache, pool.v_cache, *step, k_scale=pool.scale, v_scale=pool.scale,
            plan=plan, backend="triton",
        )  # fmt: skip

    return [lambda step=step: call(step) for step in steps]  # type: ignore[misc]


def fa3(case: Case, pool: Pool) -> list[Callable[[], object]] | None:
    """Return FlashAttention 3's calls, where MESHWRIGHT_FA3 names vLLM's library of it."""
    import torch

    path = os.environ.get("MESHWRIGHT_FA3")
    if path is None or not pool.k_cache.is_contiguous():
        return None
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    rows = len(case.lengths)
    q = pool.q[:rows, None].contiguous()
    scale = None
    if pool.element == 1:
        q = q.to(torch.float8_e4m3fn)
        scale = torch.full((rows, KV_HEADS), 0.5, device=q.device)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)

    def call(step: Step) -> object:
        return torch.ops._vllm_fa3_C.fwd(  # noqa: SLF001
            q, pool.k_cache, pool.v_cache, None, None, None, out, None, None, None, None,
            step.lengths, 1, max(case.lengths), step.tables, None, None, None, None, None,
            scale, scale, scale, WIDTH**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None,
            1, 0, None,
        )  # fmt: skip

    return [lambda step=step: call(step) for step in steps_of(case, pool)]  # type: ignore[misc]


def sdpa(case: Case, pool: Pool) -> list[Callable[[], object]] | None:
    """Return torch's calls over keys that lie together, where rows are all as long."""
    from torch.nn.functional import scaled_dot_product_attention

    if pool.element == 1 or len(set(case.lengths)) > 1:
        return None
    q = pool.q[: len(case.lengths), :, None]
    calls = []
    for step in steps_of(case, pool)[:2]:
        keys, values = (
            cache[step.tables.long()].flatten(1, 2)[:, : case.lengths[0]].transpose(1, 2)
            for cache in (pool.k_cache, pool.v_cache)
        )
        calls.append(
            lambda k=keys, v=values: scaled_dot_product_attention(q, k, v, enable_gqa=True)
        )
    return calls  # type: ignore[return-value]


def graph_s(calls: list[Callable[[], object]], *, budget_s: float = 0.03) -> float:
    """Seconds of one call on the device: the median of five replays of a graph of all, repeated."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replayed_s(times: int) -> float:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    replayed_s(1)
    times = int(min(50, max(1, budget_s / 5 / replayed_s(2))))
    return statistics.median(replayed_s(times) for _ in range(5)) / len(calls)


def copy_bytes_per_s() -> float:
    """Measure what a copy of large buffers reaches, reading and writing.

    By a kernel: `copy_` within a graph becomes a copy of the driver's, at 2.7 TB/s on an H200 where
    kernels reach 4.2.
    """
    import torch

    here = torch.ones(2**28, dtype=torch.int32, device="cuda")
    there = torch.empty_like(here)
    return 8 * here.numel() / graph_s([lambda: torch.add(here, 0, out=there)] * 4)
