"""How fast prefill attention over pages is, beside attention over keys that lie together.

Operations are those of the queries and keys that see each other: 4 · heads · width for each pair.
Published for FlashAttention 3 on an H200, causal, bfloat16, nothing cached: 474, 576, 570 and 631
TFLOP/s for the first four cases (ai-dynamo/aiconfigurator at 095f58a51c).

    PYTHONPATH=src:. python3 -m benchmarks.prefill_attention [--seconds 60] [--out FILE]

With `--seconds` it tries tiles for so long and prints the best of each kind as JSON.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from benchmarks import decode_cases as cases
from benchmarks.decode_cases import HEADS, WIDTH, Pool
from benchmarks.result import figure
from meshwright.errors import MissingDependency

if TYPE_CHECKING:
    from meshwright.run.kernels.paged_attention.paged_prefill import PrefillTiles

NAME = "prefill_attention"
QUESTION = "How fast is prefill attention over pages, beside attention over fresh keys?"
SHARED_BYTES = 227 * 1024


class Case(NamedTuple):
    """Queries of each row, the last of its keys."""

    name: str
    queries: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def operations(self) -> int:
        """Multiplications and additions of what sees each other."""
        pairs = 0
        for many, length in zip(self.queries, self.lengths, strict=True):
            pairs += many * (length - many) + many * (many + 1) // 2
        return 4 * HEADS * WIDTH * pairs


CASES = (
    Case("1 x 2k", (2048,), (2048,)),
    Case("1 x 4k", (4096,), (4096,)),
    Case("1 x 16k", (16384,), (16384,)),
    Case("4 x 4k", (4096,) * 4, (4096,) * 4),
    Case("2k behind 14k", (2048,), (16384,)),
    Case("8 x 256 behind 1k", (256,) * 8, (1280,) * 8),
)


def ours(case: Case, pool: Pool, tiles: "PrefillTiles | None" = None) -> Callable[[], object]:
    """Return a call of ours."""
    import torch

    from meshwright.run.kernels.paged_attention.paged_prefill import paged_prefill

    rows = cases.Case(case.name, case.lengths)
    step = cases.steps_of(rows, pool)[0]
    starts = torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32, device=pool.q.device)
    q = pool.q[: sum(case.queries)]
    return lambda: paged_prefill(
        q, pool.k_cache, pool.v_cache, *step, starts, k_scale=pool.scale, v_scale=pool.scale,
        tiles=tiles, backend="triton",
    )  # fmt: skip


def fresh(case: Case, pool: Pool) -> Callable[[], object] | None:
    """Return a call of the kernel that training chooses, where nothing was cached before."""
    from meshwright.run.kernels.attention.sdpa import attention

    if case.queries != case.lengths or len(set(case.lengths)) > 1 or pool.element == 1:
        return None
    length, rows = case.lengths[0], len(case.lengths)
    q = pool.q[: rows * length].view(rows, length, HEADS, WIDTH)
    k, v = (
        cache.flatten(0, 1)[: rows * length].view(rows, length, -1, WIDTH)
        for cache in (pool.k_cache, pool.v_cache)
    )
    return lambda: attention(q, k, v)


def candidates(element: int) -> "Iterator[PrefillTiles]":
    """List tiles that fit into shared memory."""
    from meshwright.run.kernels.paged_attention.paged_prefill import PrefillTiles

    for rows, warps in ((128, 8), (128, 4), (64, 4), (256, 8)):
        for tile in (64, 128, 32):
            for stages in (3, 2, 4):
                room = 2 * (stages - 1) * tile * WIDTH * element + rows * WIDTH * 2
                if room <= SHARED_BYTES:
                    yield PrefillTiles(rows, tile, warps, stages)


def measure(quick: bool, seconds: float = 0.0) -> dict[str, object]:
    """Measure on the GPU; without one, `quick` shows that it works, interpreted."""
    import torch

    if not torch.cuda.is_available():
        if not quick:
            raise MissingDependency("this benchmark needs a CUDA GPU", "run it with --quick")
        return _measure_interpreted()
    figures: list[dict[str, object]] = []
    peers: list[dict[str, object]] = []
    notes: list[str] = []
    for eight_bits in (False, True):
        pool = cases.make_pool(
            eight_bits=eight_bits, block=128, heads_first=False, tokens=2**16, rows=2**14
        )
        tiles = _tuned(pool, seconds / 2, notes) if seconds else None
        kind = "float8" if eight_bits else "bfloat16"
        figures.append(figure(f"error, {kind}", _error(pool, tiles), "roundings", "<= 1"))
        for case in CASES[:2] if quick else CASES:
            label = f"{case.name}, {kind}"
            rate = case.operations / cases.graph_s([ours(case, pool, tiles)]) / 1e12
            figures.append(figure(label, rate, "TFLOP/s"))
            call = fresh(case, pool)
            if call is not None:
                rate = case.operations / cases.graph_s([call]) / 1e12
                peers.append(figure(f"fresh keys, {label}", rate, "TFLOP/s"))
    return {"figures": figures, "peers": peers, "notes": " ".join(notes)}


def _tuned(pool: Pool, seconds: float, notes: list[str]) -> "PrefillTiles | None":
    from triton.runtime.errors import TritonError

    ended = time.perf_counter() + seconds
    tried: list[tuple[float, PrefillTiles]] = []
    for tiles in candidates(pool.element):
        if time.perf_counter() > ended:
            break
        try:
            rates = [
                case.operations / cases.graph_s([ours(case, pool, tiles)]) / 1e12
                for case in (CASES[1], CASES[4])
            ]
        except (RuntimeError, TritonError) as problem:
            notes.append(f"{tiles}: {str(problem)[:100]}.")
            continue
        tried.append((sum(rates) / len(rates), tiles))
    tried.sort(key=lambda each: -each[0])
    best = [{"rate": round(rate, 1), **tiles._asdict()} for rate, tiles in tried[:6]]
    text = msgspec.json.encode(
        {"element_bytes": pool.element, "head_width": WIDTH, "best": best}
    ).decode()
    print(text, flush=True)
    notes.append(text)
    return tried[0][1] if tried else None


def _error(pool: Pool, tiles: "PrefillTiles | None") -> float:
    """Return the largest error against float64, in roundings to bfloat16 of the largest result."""
    import torch

    from meshwright.run.kernels.paged_attention.paged_prefill import paged_prefill

    case = Case("mixed", (1, 100, 17, 0), (70, 100, 150, 0))
    got = ours(case, pool, tiles)()
    assert isinstance(got, torch.Tensor)
    step = cases.steps_of(cases.Case(case.name, case.lengths), pool)[0]
    starts = torch.tensor([0, *accumulate(case.queries)], dtype=torch.int32, device=pool.q.device)
    exact = paged_prefill(
        pool.q[: sum(case.queries)].double(), pool.k_cache, pool.v_cache, *step, starts,
        k_scale=pool.scale, v_scale=pool.scale, backend="torch",
    )  # fmt: skip
    return float((got.double() - exact).abs().max() / exact.abs().max()) / 2**-8


def _measure_interpreted() -> dict[str, object]:
    """Show that everything works without a GPU: no figure of this says anything about speed."""
    os.environ["TRITON_INTERPRET"] = "1"
    from meshwright.run.kernels.paged_attention.paged_prefill import PrefillTiles

    make = partial(cases.make_pool, block=64, heads_first=False, tokens=512, rows=128, device="cpu")
    small = PrefillTiles(64, 32, warps=4, stages=2)
    worst = max(_error(make(eight_bits=eight_bits), small) for eight_bits in (False, True))
    if worst > 1:
        raise AssertionError(f"prefill attention is off by {worst} roundings of bfloat16")
    notes = "Triton's interpreter on the CPU: correctness only."
    return {"figures": [figure("largest error", worst, "roundings", "<= 1")], "notes": notes}


def main() -> None:
    """Measure, print, and write what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.prefill_attention", description=QUESTION)
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--seconds", type=float, default=0.0, help="try tiles for so long")
    arguments = parser.parse_args()
    answer = measure(arguments.quick, arguments.seconds)
    text = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    if arguments.out is not None:
        arguments.out.write_bytes(text + b"\n")
    print(text.decode())


if __name__ == "__main__":
    main()
