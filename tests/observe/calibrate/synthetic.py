"""Rows of a device whose true constants are known."""

from collections.abc import Callable

import msgspec
import numpy as np

from meshwright.observe.bench.attention import cases as attention_cases
from meshwright.observe.bench.case import Case, Machine, Row
from meshwright.observe.bench.products import part_at
from meshwright.observe.bench.shapes import Shape, product_shapes
from meshwright.observe.bench.suite import Bench
from meshwright.observe.calibrate.subjects import subjects
from meshwright.predict.cost import AttentionCurve, Calibration, ProductCurve, costs_for
from meshwright.spec.catalog import gpu

GPU = gpu("h200-141g-sxm")
MACHINE = Machine(device="NVIDIA H200", gpu=GPU.name, torch="2.11")
PRODUCT = ProductCurve(
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

Extra = Callable[[Case], float]


def product_cases(number: int, *, after: int = 0, precision: str = "bf16") -> list[Case]:
    """Return designed products."""
    return [
        _case(part_at(place), shape, precision)
        for place, shape in enumerate(product_shapes(number, after=after))
    ]


def _case(part: str, shape: Shape, precision: str) -> Case:
    sizes: dict[str, int | float | str] = {"m": shape.m, "n": shape.n, "k": shape.k}
    return Case(family="products", name=part, sizes={**sizes, "precision": precision})


def forward_attention() -> list[Case]:
    """Return what a bench measures of attention forward, without kernels of another kind."""
    return [
        case
        for case in attention_cases("full", True)
        if case.name == "forward"
        and case.word("mask") in ("causal", "full")
        and case.size("head_dim") < 256
    ]


def measured(
    cases: list[Case], *, noise: float = 0.0, extra: Extra = lambda _: 0.0, seed: int = 0
) -> tuple[Row, ...]:
    """Return rows of the made-up device: its true time, times exp(extra + noise)."""
    draw = np.random.default_rng(seed)
    device = costs_for(GPU, TRUE)
    blank = [row_of(case, 1.0) for case in cases]
    times = {
        row.case.key: subject.seconds(device, row)
        for subject in subjects(blank, GPU)
        for row in subject.rows
    }
    return tuple(
        row_of(case, times[case.key] * float(np.exp(extra(case) + noise * draw.normal())))
        for case in cases
    )


def row_of(case: Case, seconds: float) -> Row:
    """Return a row that took so long."""
    return Row(case=case, seconds=seconds, low_s=seconds, high_s=seconds, samples=7, loaded=True)


def bench(*rows: Row) -> Bench:
    """Return rows as a file of the made-up device holds them."""
    return Bench(MACHINE, rows)


def unloaded(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the same rows as if the device had been at ease."""
    return tuple(msgspec.structs.replace(row, loaded=False) for row in rows)
