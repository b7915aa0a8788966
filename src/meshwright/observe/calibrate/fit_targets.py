"""What is fitted shape by shape: products of each precision, grouped products, attention.

A subject asks the cost functions themselves for the time of a row, so a fitted constant means in a
prediction what it meant in the fit. Constants stand in the order in which few rows free them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.kernels.attention import WINDOW
from meshwright.observe.bench.kernels.gemm import GEMM_PASSES
from meshwright.observe.calibrate.residual_fit import ResidualPoint
from meshwright.predict.cost.attention import AttentionMask, attention_s, get_attention_kind
from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import AttentionCurve, GemmCurve, PassDirection, ResidualFamily
from meshwright.predict.cost.device_costs import DeviceCosts
from meshwright.predict.cost.gemm import LinearPart, linear_s
from meshwright.predict.cost.grouped_gemm import grouped_gemm_s
from meshwright.spec.cluster import Gpu

GROUPED = "grouped_"
ROWS_PER_CONSTANT = 3
"""Fewer rows than this for each constant free only the first ones."""


class FitConstant(NamedTuple):
    """One number to be found."""

    start: float
    min_value: float
    max_value: float


# Bounds are what the constants mean: shares end at 1, times at what no kernel takes.
_PRODUCT = {
    "efficiency": FitConstant(0.8, 0.02, 1.0),
    "bandwidth": FitConstant(0.8, 0.02, 1.0),
    "launch_s": FitConstant(2.5e-6, 5e-7, 3e-5),
    "fill_k": FitConstant(150.0, 1.0, 3000.0),
    "gradient_ratio": FitConstant(0.97, 0.4, 1.0),
    "weight_ratio": FitConstant(1.0, 0.4, 1.5),
    "tail": FitConstant(0.2, 1e-3, 1.0),
    "split_penalty": FitConstant(2.5, 1e-2, 20.0),
    "tile_penalty": FitConstant(0.02, 1e-4, 0.5),
}
_GROUPED = {name: _PRODUCT[name] for name in _PRODUCT if name not in ("split_penalty",)}
_ATTENTION = {
    "efficiency": FitConstant(0.7, 0.01, 1.0),
    "softmax_dims": FitConstant(200.0, 1.0, 3000.0),
    "fill_keys": FitConstant(200.0, 1.0, 3000.0),
    "tail": FitConstant(0.6, 1e-3, 1.0),
    "launch_s": FitConstant(5e-6, 5e-7, 5e-5),
    "wave": FitConstant(0.2, 1e-3, 1.0),
}
_ON_HOST = {"fill_k": 10.0, "fill_keys": 10.0, "softmax_dims": 30.0, "tail": 0.01, "wave": 0.01}
"""Where constants start for a processor: it has nothing to fill and to drain."""
PAD_DIMS = 64
"""To a multiple of which attention kernels round heads up (measured for H200 and cuDNN)."""
MEASURED_STORE_BYTES = 2.0
"""Rows of weight gradients store 16 bits once, as the trainer does; nothing is added up."""


class FitTarget(NamedTuple):
    """One curve to fit."""

    title: str
    family: ResidualFamily
    name: str
    """Precision or direction."""
    rows: tuple[BenchRow, ...]
    constants: Mapping[str, FitConstant]
    curve: Callable[[Mapping[str, float]], GemmCurve | AttentionCurve]
    apply_curve: Callable[[Calibration, GemmCurve | AttentionCurve], Calibration]
    """Puts the curve into a calibration."""
    predict_seconds: Callable[[DeviceCosts, BenchRow], float]
    """What the cost models say of a row."""
    locate_row: Callable[[BenchRow], ResidualPoint]


def list_fit_targets(rows: Sequence[BenchRow], gpu: Gpu) -> tuple[FitTarget, ...]:
    """Return every curve that rows of a device tell something of."""
    found = list[FitTarget]()
    products = [
        row
        for row in rows
        if row.case.family == "gemm" and row.case.name.removeprefix(GROUPED) in GEMM_PASSES
    ]
    dense = [row for row in products if "precision" in row.case.sizes]
    for precision in dict.fromkeys(row.case.text("precision") for row in dense):
        mine = tuple(row for row in dense if row.case.text("precision") == precision)
        if precision in gpu.precisions:
            found.append(_product(precision, mine))
    grouped = tuple(row for row in products if row.case.name.startswith(GROUPED))
    if grouped and "bf16" in gpu.precisions:
        found.append(_grouped(grouped))
    parts: tuple[PassDirection, ...] = ("forward", "backward")
    for part in parts:
        # No prediction is asked for documents side by side.
        mine = tuple(
            row
            for row in rows
            if (row.case.family, row.case.name) == ("attention", part)
            and row.case.text("mask") != "packed"
        )
        if mine:
            found.append(_attention(part, mine))
    return tuple(_on_host(one) for one in found) if gpu.kind == "cpu" else tuple(found)


def _on_host(subject: FitTarget) -> FitTarget:
    starts = {
        name: one._replace(start=_ON_HOST.get(name, one.start))
        for name, one in subject.constants.items()
    }
    return subject._replace(constants=starts)


def _product(precision: str, rows: tuple[BenchRow, ...]) -> FitTarget:
    def into(found: Calibration, curve: GemmCurve | AttentionCurve) -> Calibration:
        assert isinstance(curve, GemmCurve)
        others = tuple(one for one in found.products if one.precision != precision)
        return msgspec.structs.replace(found, products=(*others, curve))

    return FitTarget(
        title=f"gemm {precision}",
        family="products",
        name=precision,
        rows=rows,
        constants=_PRODUCT,
        curve=partial(_product_curve, precision),
        apply_curve=into,
        predict_seconds=_product_s,
        locate_row=_product_place,
    )


def _product_curve(precision: str, constants: Mapping[str, float]) -> GemmCurve:
    given: dict[str, Any] = {"split_penalty": _PRODUCT["split_penalty"].start, **constants}
    return GemmCurve(precision=precision, accumulate_bytes=MEASURED_STORE_BYTES, **given)


def _part(name: str) -> LinearPart:
    part = name.removeprefix(GROUPED)
    assert part in ("forward", "input_gradient", "weight_gradient"), name
    return part  # type: ignore[return-value]


def _product_s(device: DeviceCosts, row: BenchRow) -> float:
    m, n, k = (row.case.size(side) for side in "mnk")
    return linear_s(device, m, n, k, row.case.text("precision"), part=_part(row.case.name))


def _turned(part: LinearPart, m: float, n: float, k: float) -> tuple[float, float, float]:
    """Return the sides of the very product, as the cost models see it."""
    return {
        "forward": (m, n, k), "input_gradient": (m, k, n), "weight_gradient": (n, k, m)
    }[part]  # fmt: skip


def _product_place(row: BenchRow) -> ResidualPoint:
    part = _part(row.case.name)
    return ResidualPoint(part, _turned(part, *(row.case.size(side) for side in "mnk")))


def _grouped(rows: tuple[BenchRow, ...]) -> FitTarget:
    def into(found: Calibration, curve: GemmCurve | AttentionCurve) -> Calibration:
        assert isinstance(curve, GemmCurve)
        return msgspec.structs.replace(found, grouped=curve)

    return FitTarget(
        title="grouped gemm",
        family="grouped",
        name="bf16",
        rows=rows,
        constants=_GROUPED,
        curve=partial(_product_curve, "bf16"),
        apply_curve=into,
        predict_seconds=_grouped_s,
        locate_row=_grouped_place,
    )


def _grouped_s(device: DeviceCosts, row: BenchRow) -> float:
    experts, tokens, n, k = (row.case.size(name) for name in ("experts", "tokens", "n", "k"))
    return grouped_gemm_s(device, experts, tokens, n, k, part=_part(row.case.name))


def _grouped_place(row: BenchRow) -> ResidualPoint:
    part = _part(row.case.name)
    experts, tokens, n, k = (row.case.size(name) for name in ("experts", "tokens", "n", "k"))
    return ResidualPoint(part, (experts, *_turned(part, tokens, n, k)))


def _attention(part: PassDirection, rows: tuple[BenchRow, ...]) -> FitTarget:
    def curve(constants: Mapping[str, float]) -> AttentionCurve:
        given: dict[str, Any] = dict(constants)
        return AttentionCurve(kernel="native", part=part, pad_dims=PAD_DIMS, **given)

    def into(found: Calibration, curve: GemmCurve | AttentionCurve) -> Calibration:
        assert isinstance(curve, AttentionCurve)
        others = tuple(one for one in found.attention if (one.kernel, one.part) != ("native", part))
        return msgspec.structs.replace(found, attention=(*others, curve))

    return FitTarget(
        title=f"attention {part}",
        family="attention",
        name=part,
        rows=rows,
        constants=_ATTENTION,
        curve=curve,
        apply_curve=into,
        predict_seconds=partial(_attention_s, part),
        locate_row=_attention_place,
    )


def _attention_s(part: PassDirection, device: DeviceCosts, row: BenchRow) -> float:
    sizes = {name: row.case.size(name) for name in ("batch", "heads", "kv_heads", "head_dim")}
    mask: AttentionMask = "full" if row.case.text("mask") == "full" else "causal"
    window = WINDOW if row.case.text("mask") == "window" else None
    return attention_s(
        device, seq=row.case.size("length"), mask=mask, window=window, part=part, **sizes
    )


def _attention_place(row: BenchRow) -> ResidualPoint:
    batch, heads, width, length = (
        row.case.size(name) for name in ("batch", "heads", "head_dim", "length")
    )
    mask: AttentionMask = "full" if row.case.text("mask") == "full" else "causal"
    kind = get_attention_kind(mask, width, windowed=row.case.text("mask") == "window")
    return ResidualPoint(kind, (batch * heads, length, length, width, width))
