"""Rows of a device whose true constants are known."""

from collections.abc import Callable

import msgspec
import numpy as np

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.kernels.attention import list_attention_cases
from meshwright.observe.bench.kernels.gemm import choose_gemm_pass
from meshwright.observe.bench.kernels.gemm_shapes import BenchGemmShape, sample_gemm_shapes
from meshwright.observe.bench.suite import BenchResult
from meshwright.observe.calibrate.fit_targets import list_fit_targets
from meshwright.observe.hardware.machine import Machine
from meshwright.predict.cost import AttentionCurve, Calibration, GemmCurve, build_device_costs
from meshwright.spec.catalog import get_gpu

GPU = get_gpu("h200-141g-sxm")
MACHINE = Machine(device="NVIDIA H200", gpu=GPU.name, torch="2.11")
PRODUCT = GemmCurve(
    precision="bf16",
    efficiency=0.62,
    bandwidth=0.71,
    launch_s=4e-6,
    fill_k=240.0,
    tail=0.3,
    tile_penalty=0.05,
    split_penalty=2.0,
    accumulate_bytes=2.0,
    gradient_ratio=0.9,
)
ATTENTION = AttentionCurve(
    kernel="native",
    part="forward",
    efficiency=0.55,
    softmax_dims=120.0,
    fill_keys=150.0,
    tail=0.5,
    wave=0.3,
    launch_s=6e-6,
    pad_dims=64,
)
TRUE = Calibration(gpu=GPU.name, source="made up", products=(PRODUCT,), attention=(ATTENTION,))

Extra = Callable[[BenchCase], float]


def product_cases(number: int, *, after: int = 0, precision: str = "bf16") -> list[BenchCase]:
    """Return designed products."""
    return [
        _case(choose_gemm_pass(place), shape, precision)
        for place, shape in enumerate(sample_gemm_shapes(number, after=after))
    ]


def _case(part: str, shape: BenchGemmShape, precision: str) -> BenchCase:
    sizes: dict[str, int | float | str] = {"m": shape.m, "n": shape.n, "k": shape.k}
    return BenchCase(family="gemm", name=part, sizes={**sizes, "precision": precision})


def forward_attention() -> list[BenchCase]:
    """Return what a bench measures of attention forward, without kernels of another kind."""
    return [
        case
        for case in list_attention_cases("full", True)
        if case.name == "forward"
        and case.text("mask") in ("causal", "full")
        and case.size("head_dim") < 256
    ]


def measured(
    cases: list[BenchCase], *, noise: float = 0.0, extra: Extra = lambda _: 0.0, seed: int = 0
) -> tuple[BenchRow, ...]:
    """Return rows of the made-up device: its true time, times exp(extra + noise)."""
    draw = np.random.default_rng(seed)
    device = build_device_costs(GPU, TRUE)
    blank = [row_of(case, 1.0) for case in cases]
    times = {
        row.case.key: subject.predict_seconds(device, row)
        for subject in list_fit_targets(blank, GPU)
        for row in subject.rows
    }
    return tuple(
        row_of(case, times[case.key] * float(np.exp(extra(case) + noise * draw.normal())))
        for case in cases
    )


def row_of(case: BenchCase, seconds: float) -> BenchRow:
    """Return a row that took so long."""
    return BenchRow(
        case=case, median_s=seconds, p10_s=seconds, p90_s=seconds, num_samples=7, under_load=True
    )


def bench(*rows: BenchRow) -> BenchResult:
    """Return rows as a file of the made-up device holds them."""
    return BenchResult(MACHINE, rows)


def unloaded(rows: tuple[BenchRow, ...]) -> tuple[BenchRow, ...]:
    """Return the same rows as if the device had been at ease."""
    return tuple(msgspec.structs.replace(row, under_load=False) for row in rows)
