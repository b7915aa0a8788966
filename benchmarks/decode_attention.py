"""How near decode attention over pages comes to the bandwidth of the GPU, beside other kernels.

Bytes are those of all keys and values, once. Shares are of the H200's 4.8 TB/s, as the published
figures are, and of what a copy reaches in the same run.

    PYTHONPATH=src:. python3 -m benchmarks.decode_attention [--seconds 120] [--out FILE]

With `--seconds` it first tries cuts (tiles, warps, stages, programs) and page layouts for so long
and prints the best of each kind as JSON; `DECODE_TILES` in
`run/kernels/paged_attention/paged_decode.py` takes them over. Kernels to be tried are compiled
beforehand by as many processes as there are cores.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from benchmarks import decode_cases as cases
from benchmarks.decode_cases import CASES, TINY, Case, Pool
from benchmarks.result import figure
from meshwright.errors import MissingDependency

if TYPE_CHECKING:
    from meshwright.run.kernels.paged_attention.paged_decode import DecodeTiles

NAME = "decode_attention"
QUESTION = "How near does decode attention over pages come to the bandwidth of the GPU?"

BANDWIDTH = 4.8e12
"""Of an H200, bytes per second."""
TARGETS = {2: ">= 80", 1: ">= 75"}
"""Percent of it, by the bytes of a cached element, for 64 to 256 rows of 1k to 2k keys."""
PROMISED = ("64 x 2k", "128 x 2k", "256 x 1k")
TUNING = ("64 x 2k", "256 x 1k", "8 x 4k", "256 x 100 to 1,600")
FEW = ("1 x 8k", "8 x 4k", "64 x 2k", "1 x 128k and 31 x 4k")
"""Cases that tell how rows should be shared and joined."""
ERROR_TARGET = "<= 1"
LAYOUTS = ((16, True), (64, True), (128, True), (32, True), (256, True), (16, False), (64, False))
"""Tokens of a page, and whether its heads come first, as in the engine's cache."""
BLOCK, HEADS_FIRST = 128, True
"""The layout that cuts are tried with: every tile fits."""
SHOWN = {2: 64, 1: 128}
"""Tokens of a page in the figures, by the bytes of an element, heads first; others' kernels get
pages of as many with tokens first, which is what they take."""
SHARED_BYTES = 227 * 1024

Figures = list[dict[str, object]]
Result = TypeVar("Result")


class Found(NamedTuple):
    """What was measured so far."""

    figures: Figures
    peers: Figures
    failures: list[str]


def measure(quick: bool, seconds: float = 0.0) -> dict[str, object]:
    """Measure on the GPU; without one, `quick` shows that everything works, interpreted."""
    import torch

    if not torch.cuda.is_available():
        if not quick:
            hint = "run it with --quick to see it work"
            raise MissingDependency("this benchmark needs a CUDA GPU", hint)
        return _measure_interpreted()
    found = Found([], [], [])
    copy_per_s = cases.copy_bytes_per_s()
    found.figures.append(figure("copy", copy_per_s / 1e12, "TB/s"))
    found.figures.extend(_errors(found.failures))
    notes = []
    for eight_bits in (False, True):
        cut, block = None, SHOWN[1 if eight_bits else 2]
        if seconds:
            tuned = _tuned(eight_bits, seconds / 2, found.failures)
            print(json(tuned), flush=True)
            notes.append(json(tuned))
            cut = _best(tuned)
        make = partial(cases.make_pool, eight_bits=eight_bits)
        pool = make(block=block, heads_first=True)
        beside = make(block=block, heads_first=False)
        for case in CASES[3:6] if quick else CASES:
            _measure_case(found, case, (pool, beside), cut, copy_per_s)
        del pool, beside
        found.figures.append(_plan_figure(eight_bits))
    text = (
        "32 query and 8 key/value heads of 128; pages of 64 (float8: 128) in no order, others at "
        "every call; "
        "calls captured in one CUDA graph with the step's plan made before. torch "
        f"{torch.__version__}. Failures: {' '.join(found.failures) or 'none'}. {' '.join(notes)}"
    )
    return {"figures": found.figures, "peers": found.peers, "notes": text}


def _measure_case(
    found: Found, case: Case, pools: tuple[Pool, Pool], cut: "DecodeTiles | None", copy_per_s: float
) -> None:
    (figures, peers, failures), (pool, beside) = found, pools
    label = f"{case.name}, {'float8' if pool.element == 1 else 'bfloat16'}"
    moved = case.moved_bytes(pool.element)
    taken_s = _attempt(label, failures, partial(_ours_s, case, pool, cut))
    if taken_s is not None:
        target = TARGETS[pool.element] if case.name in PROMISED else ""
        figures.append(figure(label, taken_s * 1e6, "µs"))
        figures.append(figure(label, 100 * moved / taken_s / BANDWIDTH, "% of 4.8 TB/s", target))
        figures.append(figure(label, 100 * moved / taken_s / copy_per_s, "% of copy"))
    for name, calls_of in (("FA3 here", cases.fa3), ("torch SDPA here", cases.sdpa)):
        run = partial(_peer_s, calls_of, case, beside)
        taken_s = _attempt(f"{name}, {label}", failures, run)
        if taken_s is not None:
            peers.append(figure(f"{name}, {label}", taken_s * 1e6, "µs"))
    published = (case.fa3_us, case.trt_us)
    if pool.element == 1:
        published = (case.fa3_fp8_us, case.trt_fp8_us)
    for name, microseconds in zip(("FA3", "TensorRT-LLM"), published, strict=True):
        if microseconds is not None:
            peers.append(figure(f"{name} published, {label}", microseconds, "µs"))


def _ours_s(case: Case, pool: Pool, cut: "DecodeTiles | None") -> float:
    return cases.graph_s(cases.ours(case, pool, cut))


def _peer_s(
    calls_of: Callable[[Case, Pool], list[Callable[[], object]] | None], case: Case, pool: Pool
) -> float | None:
    calls = calls_of(case, pool)
    return None if calls is None else cases.graph_s(calls)


def _plan_figure(eight_bits: bool) -> dict[str, object]:
    """What a step pays once for all its layers."""
    from meshwright.run.kernels.paged_attention.paged_decode import plan_decode

    pool = cases.make_pool(eight_bits=eight_bits, block=64, heads_first=False, tokens=2**18)
    lengths = cases.steps_of(CASES[5], pool)[0].lengths
    taken_s = cases.graph_s([lambda: plan_decode(lengths, pool.k_cache, cases.HEADS)] * 8)
    return figure(f"plan of 256 rows, {pool.element} bytes", taken_s * 1e6, "µs")


# What is tried.


def candidates(eight_bits: bool) -> "Iterator[DecodeTiles]":
    """List cuts that fit into shared memory, the likeliest first."""
    from meshwright.run.kernels.paged_attention.paged_decode import DecodeTiles

    element = 1 if eight_bits else 2
    tiles = (128, 64, 256) if eight_bits else (64, 128)
    rest = []
    for tile in tiles:
        for warps in (4, 8):
            for per_sm in (2, 3, 1, 4):
                for stages in (3, 4, 2, 6):
                    tile_bytes = 2 * tile * cases.WIDTH * element
                    room = max(1, stages - 1) * tile_bytes + 8192
                    in_flight = per_sm * max(1, stages - 2) * tile_bytes
                    if per_sm * (room + 1024) > SHARED_BYTES or in_flight < 24 * 1024:
                        continue
                    if per_sm * warps <= 16:
                        rest.append(DecodeTiles(tile, warps, stages, per_sm))
    # Those nearest to three programs of four warps with some tiles in flight come first.
    yield from sorted(
        rest, key=lambda cut: (cut.warps, abs(cut.programs_per_sm - 3), abs(cut.stages - 3))
    )


def _tuned(eight_bits: bool, seconds: float, failures: list[str]) -> dict[str, object]:
    """Try cuts, then layouts with the best one, within the time."""
    started = time.perf_counter()
    wanted = list(candidates(eight_bits))
    _compile_ahead(eight_bits, 0.35 * seconds)
    pool = cases.make_pool(eight_bits=eight_bits, block=BLOCK, heads_first=HEADS_FIRST)
    chosen = [case for case in CASES if case.name in TUNING]
    tried: list[tuple[float, DecodeTiles, dict[str, float]]] = []
    for cut in wanted:
        if time.perf_counter() - started > 0.85 * seconds:
            break
        shares = _shares(chosen, pool, cut, failures)
        if shares:
            tried.append((sum(shares.values()) / len(shares), cut, shares))
    tried.sort(key=lambda each: -each[0])
    best = tried[0][1] if tried else None
    joins = {}
    few = [case for case in CASES if case.name in FEW]
    for least in (1, 2, 4):
        if best is None or time.perf_counter() - started > seconds:
            break
        changed = best._replace(min_tiles_per_split=least)
        joins[f"at least {least} tiles"] = _shares(few, pool, changed, failures)
    del pool
    layouts = {}
    for block, heads_first in LAYOUTS:
        if time.perf_counter() - started > 1.2 * seconds:
            break
        pool = cases.make_pool(eight_bits=eight_bits, block=block, heads_first=heads_first)
        fitted = None if best is None else best.fit_to_block(block)
        layouts[f"{block} {'heads' if heads_first else 'tokens'} first"] = _shares(
            chosen[:2], pool, fitted, failures
        )
        del pool
    return {
        "element_bytes": 1 if eight_bits else 2,
        "tried": f"{len(tried)} of {len(wanted)}",
        "best": [
            {"mean": round(mean, 1), **cut._asdict(), "cases": shares}
            for mean, cut, shares in tried[:8]
        ],
        "joins": joins,
        "layouts": layouts,
    }


def _best(tuned: dict[str, object]) -> "DecodeTiles | None":
    """Return the best cut, as it fits the layout of the figures."""
    from meshwright.run.kernels.paged_attention.paged_decode import DecodeTiles

    best = tuned["best"]
    assert isinstance(best, list)
    if not best:
        return None
    return DecodeTiles(**{name: best[0][name] for name in DecodeTiles._fields})


def _shares(
    chosen: list[Case], pool: Pool, cut: "DecodeTiles | None", failures: list[str]
) -> dict[str, float]:
    shares = {}
    for case in chosen:
        taken_s = _attempt(f"{cut}", failures, partial(_ours_s, case, pool, cut))
        if taken_s is None:
            return {}
        shares[case.name] = round(100 * case.moved_bytes(pool.element) / taken_s / BANDWIDTH, 1)
    return shares


def _compile_ahead(eight_bits: bool, seconds: float) -> None:
    """Let other processes compile what will be tried; their results lie in Triton's cache."""
    many = max(1, min(12, (os.cpu_count() or 2) - 2))
    width = "8" if eight_bits else "16"
    arguments = [sys.executable, "-m", "benchmarks.decode_attention", "--compile", width]
    compilers = [
        subprocess.Popen([*arguments, f"{part}/{many}"], stdout=subprocess.DEVNULL)
        for part in range(many)
    ]
    ended = time.perf_counter() + seconds
    for process in compilers:
        try:
            process.wait(max(0.1, ended - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


def _compile_part(eight_bits: bool, part: int, parts: int) -> None:
    pool = cases.make_pool(
        eight_bits=eight_bits, block=BLOCK, heads_first=HEADS_FIRST, tokens=16 * BLOCK, rows=3
    )
    for number, cut in enumerate(candidates(eight_bits)):
        if number % parts == part:
            _attempt("", [], cases.ours(TINY[0], pool, cut)[0])


# Whether it is right.


def _errors(failures: list[str]) -> Figures:
    """Compare kernels with attention written out, in roundings of bfloat16."""
    worst: dict[str, float] = {}
    for eight_bits in (False, True):
        for block, heads_first in ((16, True), (64, False), (128, False)):
            pool = cases.make_pool(
                eight_bits=eight_bits, block=block, heads_first=heads_first, tokens=2**14
            )
            case = Case("", (1, 777, 0, 128, 5000, 63))
            label = f"error, {'float8' if eight_bits else 'bfloat16'}, pages of {block}"
            off = _attempt(label, failures, partial(error_of, case, pool))
            worst[label] = 1e9 if off is None else off
    return [figure(label, off, "roundings", ERROR_TARGET) for label, off in worst.items()]


def error_of(case: Case, pool: Pool, cut: "DecodeTiles | None" = None) -> float:
    """Return the largest error against float64, in roundings to bfloat16 of the largest result."""
    import torch

    from meshwright.run.kernels.paged_attention.paged_decode import paged_decode

    step = cases.steps_of(case, pool)[0]
    got = cases.ours(case, pool, cut)[0]()
    q = pool.q[: len(case.lengths)].double()
    exact = paged_decode(
        q, pool.k_cache, pool.v_cache, *step, k_scale=pool.scale, v_scale=pool.scale,
        backend="torch",
    )  # fmt: skip
    assert isinstance(got, torch.Tensor)
    off = (got.double() - exact).abs().max() / exact.abs().max()
    return float(off) / 2**-8


def _attempt(label: str, failures: list[str], run: Callable[[], Result]) -> Result | None:
    """Run; where a kernel cannot be compiled or launched, note it and go on."""
    import torch
    from triton.runtime.errors import TritonError

    try:
        result = run()
        torch.cuda.synchronize()
    except (RuntimeError, TritonError) as problem:
        failures.append(f"{label}: {type(problem).__name__}: {str(problem)[:200]}.")
        return None
    return result


def _measure_interpreted() -> dict[str, object]:
    """Show that everything works without a GPU: no figure of this says anything about speed."""
    os.environ["TRITON_INTERPRET"] = "1"
    worst = 0.0
    for eight_bits in (False, True):
        pool = cases.make_pool(
            eight_bits=eight_bits, block=64, heads_first=False, tokens=512, rows=3, device="cpu"
        )
        worst = max(worst, error_of(TINY[0], pool, next(candidates(eight_bits)).fit_to_block(64)))
    if worst > 1:
        raise AssertionError(f"decode attention is off by {worst} roundings of bfloat16")
    notes = "Triton's interpreter on the CPU: correctness only."
    return {"figures": [figure("largest error", worst, "roundings", ERROR_TARGET)], "notes": notes}


def json(value: object) -> str:
    """Write a value on one line."""
    return msgspec.json.encode(value).decode()


def main() -> None:
    """Measure, print, and write what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.decode_attention", description=QUESTION)
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--seconds", type=float, default=0.0, help="try cuts for so long")
    parser.add_argument("--compile", nargs=2, metavar=("BITS", "PART"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        part, parts = (int(number) for number in arguments.compile[1].split("/"))
        _compile_part(arguments.compile[0] == "8", part, parts)
        return
    answer = measure(arguments.quick, arguments.seconds)
    text = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    if arguments.out is not None:
        arguments.out.write_bytes(text + b"\n")
    print(text.decode())


if __name__ == "__main__":
    main()
