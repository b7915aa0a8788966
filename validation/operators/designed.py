"""How well do 150 designed shapes predict thousands of others? `mw calibrate` on public tables.

    python -m validation.operators.designed FOLDER

FOLDER is the unpacked wheel `aiconfigurator-core` 0.12.0, as for `fit.py`. Of each device's bf16
products the rows nearest to the first designed shapes are calibrated with, and all others within
the designed range are predicted. Needs pandas.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.kernels.gemm_shapes import (
    MAX_FLOPS,
    MIN_FLOPS,
    TOKENS,
    WIDTHS,
    sample_gemm_shapes,
)
from meshwright.observe.bench.suite import BenchResult
from meshwright.observe.calibrate.calibration import calibrate
from meshwright.observe.calibrate.fit_score import FitScore
from meshwright.observe.hardware.machine import Machine
from validation.operators import tables

SHAPES = 150
FARTHEST = 1.0
"""Doublings that a row may lie from the designed shape it stands for."""


def rows_of(data: Path, device: str) -> list[BenchRow]:
    """Return the bf16 products of a device that lie where a bench measures."""
    table = tables.products(data, device, "bfloat16", ("sglang", "trtllm", "vllm"))
    sides = ((name, limits) for name, limits in zip("mnk", (TOKENS, WIDTHS, WIDTHS), strict=True))
    inside = np.ones(len(table["s"]), dtype=bool)
    for name, limits in sides:
        inside &= (table[name] >= limits.min_value) & (table[name] <= limits.max_value)
    flops = 2.0 * table["m"] * table["n"] * table["k"]
    inside &= (flops >= MIN_FLOPS) & (flops <= MAX_FLOPS)
    kept = tables.pick(table, inside)
    return [
        _row(int(m), int(n), int(k), seconds)
        for m, n, k, seconds in zip(*(kept[name].tolist() for name in "mnks"), strict=True)
    ]


def _row(m: int, n: int, k: int, seconds: float) -> BenchRow:
    sizes: dict[str, int | float | str] = {"m": m, "n": n, "k": k, "precision": "bf16"}
    case = BenchCase(family="gemm", name="forward", sizes=sizes)
    return BenchRow(case=case, median_s=seconds, p10_s=seconds, p90_s=seconds, num_samples=1)


def designed(rows: list[BenchRow], number: int = SHAPES) -> list[int]:
    """Return the places of the rows nearest to the first designed shapes."""
    logs: Any = np.log2([[row.case.size(side) for side in "mnk"] for row in rows])
    taken = list[int]()
    for shape in sample_gemm_shapes(10 * number):
        apart = np.sqrt(np.square(logs - np.log2(np.array(shape))).sum(axis=1))
        apart[taken] = np.inf
        nearest = int(apart.argmin())
        if apart[nearest] <= FARTHEST:
            taken.append(nearest)
        if len(taken) == number:
            break
    return taken


def scored(data: Path, device: str) -> FitScore:
    """Return the errors on every row that was not calibrated with."""
    rows = rows_of(data, device)
    taken = set(designed(rows))
    mine = tuple(row for place, row in enumerate(rows) if place in taken)
    others = [row for place, row in enumerate(rows) if place not in taken]
    found = calibrate(BenchResult(Machine(device=device, gpu=device), mine), others)
    held = found.reports[0].validation
    assert held is not None, "most rows are held out"
    return held


def main(folder: str) -> None:
    """Print one line per device."""
    data = tables.data_folder(Path(folder))
    for device in tables.FOLDERS:
        found = scored(data, device)
        sys.stdout.write(
            f"{device:22} {found.num_rows:6,} unseen: median {found.median:.1%}, 95th "
            f"{found.p95:.1%}, "
            f"bias {found.bias:+.1%}\n"
        )


if __name__ == "__main__":
    main(sys.argv[1])
