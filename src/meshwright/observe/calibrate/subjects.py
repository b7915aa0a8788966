"""What is fitted shape by shape: products of each precision, grouped products, attention.

A subject asks the cost functions themselves for the time of a row, so a fitted constant means in a
prediction what it meant in the fit. Constants stand in the order in which few rows free them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from meshwright.observe.bench.attention import WINDOW
from meshwright.observe.bench.case import Row
from meshwright.observe.bench.products import PARTS
from meshwright.observe.calibrate.residuals import Place
from meshwright.predict.cost.attention import Mask, attention_kind, attention_s
from meshwright.predict.cost.curves import (
    AttentionCurve,
    Calibration,
    Part,
    ProductCurve,
    ResidualFamily,
)
from meshwright.predict.cost.device import DeviceCosts
from meshwright.predict.cost.grouped import grouped_matmul_s
from meshwright.predict.cost.matmul import LinearPart, linear_s
from meshwright.spec.cluster import Gpu

GROUPED = "grouped_"
ROWS_PER_CONSTANT = 3
"""Fewer rows than this for each constant free only the first ones."""


class Constant(NamedTuple):
    """One number to be found."""

    start: float
    least: float
    most: float


# Bounds are what the constants mean: shares end at 1, times at what no kernel takes.
_PRODUCT = {
    "efficiency": Constant(0.8, 0.02, 1.0),
    "bandwidth": Constant(0.8, 0.02, 1.0),
    "launch_s": Constant(2.5e-6, 5e-7, 3e-5),
    "fill_k": Constant(150.0, 1.0, 3000.0),
    "gradient_ratio": Constant(0.97, 0.4, 1.0),
    "weight_ratio": Constant(1.0, 0.4, 1.5),
    "tail": Constant(0.2, 1e-3, 1.0),
    "split_penalty": Constant(2.5, 1e-2, 20.0),
    "tile_penalty": Constant(0.02, 1e-4, 0.5),
}
_GROUPED = {name: _PRODUCT[name] for name in _PRODUCT if name not in ("split_penalty",)}
_ATTENTION = {
    "efficiency": Constant(0.7, 0.01, 1.0),
    "softmax_dims": Constant(200.0, 1.0, 3000.0),
    "fill_keys": Constant(200.0, 1.0, 3000.0),
    "tail": Constant(0.6, 1e-3, 1.0),
    "launch_s": Constant(5e-6, 5e-7, 5e-5),
    "wave": Constant(0.2, 1e-3, 1.0),
}
_ON_HOST = {"fill_k": 10.0, "fill_keys": 10.0, "softmax_dims": 30.0, "tail": 0.01, "wave": 0.01}
"""Where constants start for a processor: it has nothing to fill and to drain."""
PAD_DIMS = 64
"""To a multiple of which attention kernels round heads up (measured for H200 and cuDNN)."""
MEASURED_STORE_BYTES = 2.0
"""Rows of weight gradients store 16 bits once, as the trainer does; nothing is added up."""


class Subject(NamedTuple):
    """One curve to fit."""

    title: str
    family: ResidualFamily
    name: str
    """Precision or direction."""
    rows: tuple[Row, ...]
    constants: Mapping[str, Constant]
    curve: Callable[[Mapping[str, float]], ProductCurve | AttentionCurve]
    into: Callable[[Calibration, ProductCurve | AttentionCurve], Calibration]
    """Puts the curve into a calibration."""
    seconds: Callable[[DeviceCosts, Row], float]
    """What the cost models say of a row."""
    place: Callable[[Row], Place]


def subjects(rows: Sequence[Row], gpu: Gpu) -> tuple[Subject, ...]:
    """Return every curve that rows of a device tell something of."""
    found = list[Subject]()
    products = [
        row
        for row in rows
        if row.case.family == "products" and row.case.name.removeprefix(GROUPED) in PARTS
    ]
    dense = [row for row in products if "precision" in row.case.sizes]
    for precision in dict.fromkeys(row.case.word("precision") for row in dense):
        mine = tuple(row for row in dense if row.case.word("precision") == precision)
        if precision in gpu.precisions:
            found.append(_product(precision, mine))
    grouped = tuple(row for row in products if row.case.name.startswith(GROUPED))
    if grouped and "bf16" in gpu.precisions:
        found.append(_grouped(grouped))
    parts: tuple[Part, ...] = ("forward", "backward")
    for part in parts:
        # No prediction is asked for documents side by side.
        mine = tuple(
            row
            for row in rows
            if (row.case.family, row.case.name) == ("attention", part)
            and row.case.word("mask") != "packed"
        )
        if mine:
            found.append(_attention(part, mine))
    return tuple(_on_host(one) for one in found) if gpu.kind == "cpu" else tuple(found)


def _on_host(subject: Subject) -> Subject:
    starts = {
        name: one._replace(start=_ON_HOST.get(name, one.start))
        for name, one in subject.constants.items()
    }
    return subject._replace(constants=starts)


def _product(precision: str, rows: tuple[Row, ...]) -> Subject:
    def into(found: Calibration, curve: ProductCurve | AttentionCurve) -> Calibration:
        assert isinstance(curve, ProductCurve)
        others = tuple(one for one in found.products if one.precision != precision)
        return msgspec.structs.replace(found, products=(*others, curve))

    return Subject(
        title=f"products {precision}",
        family="products",
        name=precision,
        rows=rows,
        constants=_PRODUCT,
        curve=partial(_product_curve, precision),
        into=into,
        seconds=_product_s,
        place=_product_place,
    )


def _product_curve(precision: str, constants: Mapping[str, float]) -> ProductCurve:
    given: dict[str, Any] = {"split_penalty": _PRODUCT["split_penalty"].start, **constants}
    return ProductCurve(precision=precision, accumulate_bytes=MEASURED_STORE_BYTES, **given)


def _part(name: str) -> LinearPart:
    part = name.removeprefix(GROUPED)
    assert part in ("forward", "input_gradient", "weight_gradient"), name
    return part  # type: ignore[return-value]


def _product_s(device: DeviceCosts, row: Row) -> float:
    m, n, k = (row.case.size(side) for side in "mnk")
    return linear_s(device, m, n, k, row.case.word("precision"), part=_part(row.case.name))


def _turned(part: LinearPart, m: float, n: float, k: float) -> tuple[float, float, float]:
    """Return the sides of the very product, as the cost models see it."""
    return {
        "forward": (m, n, k), "input_gradient": (m, k, n), "weight_gradient": (n, k, m)
    }[part]  # fmt: skip


def _product_place(row: Row) -> Place:
    part = _part(row.case.name)
    return Place(part, _turned(part, *(row.case.size(side) for side in "mnk")))


def _grouped(rows: tuple[Row, ...]) -> Subject:
    def into(found: Calibration, curve: ProductCurve | AttentionCurve) -> Calibration:
        assert isinstance(curve, ProductCurve)
        return msgspec.structs.replace(found, grouped=curve)

    return Subject(
        title="grouped products",
        family="grouped",
        name="bf16",
        rows=rows,
        constants=_GROUPED,
        curve=partial(_product_curve, "bf16"),
        into=into,
        seconds=_grouped_s,
        place=_grouped_place,
    )


def _grouped_s(device: DeviceCosts, row: Row) -> float:
    experts, tokens, n, k = (row.case.size(name) for name in ("experts", "tokens", "n", "k"))
    return grouped_matmul_s(device, experts, tokens, n, k, part=_part(row.case.name))


def _grouped_place(row: Row) -> Place:
    part = _part(row.case.name)
    experts, tokens, n, k = (row.case.size(name) for name in ("experts", "tokens", "n", "k"))
    return Place(part, (experts, *_turned(part, tokens, n, k)))


def _attention(part: Part, rows: tuple[Row, ...]) -> Subject:
    def curve(constants: Mapping[str, float]) -> AttentionCurve:
        given: dict[str, Any] = dict(constants)
        return AttentionCurve(kernel="native", part=part, pad_dims=PAD_DIMS, **given)

    def into(found: Calibration, curve: ProductCurve | AttentionCurve) -> Calibration:
        assert isinstance(curve, AttentionCurve)
        others = tuple(one for one in found.attention if (one.kernel, one.part) != ("native", part))
        return msgspec.structs.replace(found, attention=(*others, curve))

    return Subject(
        title=f"attention {part}",
        family="attention",
        name=part,
        rows=rows,
        constants=_ATTENTION,
        curve=curve,
        into=into,
        seconds=partial(_attention_s, part),
        place=_attention_place,
    )


def _attention_s(part: Part, device: DeviceCosts, row: Row) -> float:
    sizes = {name: row.case.size(name) for name in ("batch", "heads", "kv_heads", "head_dim")}
    mask: Mask = "full" if row.case.word("mask") == "full" else "causal"
    window = WINDOW if row.case.word("mask") == "window" else None
    return attention_s(
        device, seq=row.case.size("length"), mask=mask, window=window, part=part, **sizes
    )


def _attention_place(row: Row) -> Place:
    batch, heads, width, length = (
        row.case.size(name) for name in ("batch", "heads", "head_dim", "length")
    )
    mask: Mask = "full" if row.case.word("mask") == "full" else "causal"
    kind = attention_kind(mask, width, windowed=row.case.word("mask") == "window")
    return Place(kind, (batch * heads, length, length, width, width))
