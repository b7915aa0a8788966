"""`DeviceCosts`: the constants of one device, ready to be used; and how each device gets them.

A device with measured curves uses its own. One without takes those of its nearest relative by
architecture, as shares of its own peaks, and says so in `basis`. A `Calibration` replaces either,
curve by curve. The times themselves are computed by the sibling modules.
"""

import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import TypeVar

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.cost.curves import (
    AttentionCurve,
    AttentionKernel,
    Calibration,
    LaunchCurve,
    Part,
    ProductCurve,
    ResidualFamily,
)
from meshwright.predict.cost.residuals import Correction
from meshwright.spec.catalog.hardware import gpus
from meshwright.spec.cluster import Gpu
from meshwright.spec.read import read

Curve = TypeVar("Curve", ProductCurve, AttentionCurve)

INPUT_BYTES = {
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8-tensorwise": 1.0,
    "fp8-rowwise": 1.0,
    "fp8-blockwise": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "fp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int8": 1.0,
}
"""Bytes of one input element with its share of the scales."""
# Precisions without a curve of their own use the curve of a near one at their own peak.
_LIKE = {
    "fp16": "bf16",
    "tf32": "bf16",
    "fp32": "bf16",
    "fp8": "fp8-tensorwise",
    "fp8-rowwise": "fp8-tensorwise",
    "fp8-blockwise": "fp8-tensorwise",
    "mxfp8": "fp8-tensorwise",
    "int8": "fp8-tensorwise",
    "fp4": "nvfp4",
    "mxfp4": "nvfp4",
    "fp8-tensorwise": "bf16",
    "nvfp4": "fp8-tensorwise",
}
# The nearest measured relative of each architecture.
_RELATIVE = {
    "sm_70": "a100-80g-sxm",
    "sm_80": "a100-80g-sxm",
    "sm_86": "l40s",
    "sm_89": "l40s",
    "sm_90": "h100-80g-sxm",
    "sm_100": "b200-180g-sxm",
    "sm_103": "b300-288g-sxm",
    "sm_120": "rtx-pro-6000-server",
}
NEAR = {"loss_in_place": "softmax"}
"""Classes of work that only some devices were measured at, with what they are most like."""
TILES = ((128, 256), (128, 128), (64, 128))
"""Rows and columns of a tile, long side along the longer side of the result."""
_FARTHEST = "h100-80g-sxm"
"""Whose curves a device of any other make borrows."""


class ProductRate(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A `ProductCurve` in the units of one device."""

    flops_per_sm: float
    bytes_per_s: float
    input_bytes: float
    word: int
    launch_s: float
    fill_k: float
    tail: float
    tile_efficiency: tuple[float, float, float]
    split_flops_per_element: float
    accumulate_bytes: float
    gradient_ratio: float
    correction: Correction | None = None


class DeviceCosts(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """Everything the cost models know of one device; compared by identity, so it caches well."""

    gpu: Gpu
    """The device."""
    basis: str
    """`measured`, or `transferred from` the relative whose curves it borrows."""
    calibration: Calibration
    """The constants in use."""
    sms: int
    """Streaming multiprocessors that tiles are spread over."""
    bytes_per_s: float
    """Peak memory bandwidth."""
    attention_peak_flops: float
    """Dense peak that attention's products are measured against: bf16, or fp16 where bf16 lacks."""
    sustained_slowdown: float
    """How much longer large products take under lasting load; no cost here includes it."""
    launch: LaunchCurve
    """What launching costs."""
    grouped_efficiency: float
    """Efficiency of a grouped product over a dense one."""
    grouped_launch_s: float
    """Time a grouped product takes on top."""
    memory_efficiency: Mapping[str, float]
    """Share of the bandwidth by class of elementwise work."""
    attention_curves: Mapping[tuple[str, str], AttentionCurve]
    """Curves by kernel and direction."""
    attention_corrections: Mapping[str, Correction]
    """What the native curves leave, by direction."""
    rates: dict[str, ProductRate]
    """Product rates by precision, filled as they are asked for."""
    grouped_rates: dict[str, ProductRate]
    """The same of grouped products."""

    def product(self, precision: str) -> ProductRate:
        """Return the rate of products in a precision."""
        rate = self.rates.get(precision)
        if rate is None:
            rate = self.rates[precision] = _rate(self, precision)
        return rate

    def grouped(self, precision: str) -> ProductRate:
        """Return the rate of grouped products: their own, or from that of dense ones."""
        rate = self.grouped_rates.get(precision)
        if rate is None:
            rate = self.grouped_rates[precision] = _grouped_rate(self, precision)
        return rate

    def attention(self, kernel: AttentionKernel, part: Part) -> AttentionCurve:
        """Return the curve of a kernel in one direction; every device has a native one."""
        curve = self.attention_curves.get((kernel, part))
        return curve if curve is not None else self.attention_curves["native", part]


@lru_cache(maxsize=256)
def costs_for(gpu: Gpu, calibration: Calibration | None = None) -> DeviceCosts:
    """Return the constants of a device, the measured ones of `calibration` before the defaults."""
    defaults, basis = _defaults(gpu)
    if calibration is not None:
        if calibration.gpu != gpu.name:
            raise InputError(
                [
                    Problem(
                        "calibration.gpu",
                        f"{calibration.gpu!r} was measured, {gpu.name!r} is asked for",
                        "measure this device, or leave the calibration out",
                    )
                ]
            )
        defaults, basis = _merged(defaults, calibration), f"calibrated: {calibration.source}"
        if calibration.peaks is not None:
            gpu = msgspec.structs.replace(gpu, **calibration.peaks.given)
    return _ready(gpu, defaults, basis)


@lru_cache(maxsize=256)
def under_load(costs: DeviceCosts) -> DeviceCosts:
    """Return the constants of the same device after seconds of full load, at its power limit.

    Products and attention slow down by `sustained_slowdown`; work bound by memory does not.
    """
    slowdown = costs.sustained_slowdown
    return slowed(costs, products=slowdown, low=slowdown, attention=slowdown)


@lru_cache(maxsize=1024)
def slowed(
    costs: DeviceCosts,
    *,
    products: float = 1.0,
    low: float = 1.0,
    attention: float = 1.0,
    elementwise: float = 1.0,
) -> DeviceCosts:
    """Return the same device with some kinds of work taking longer by a factor.

    `low` is for products of eight bits or fewer, `products` for all others. The optimizer's one
    pass over its states is fused everywhere, and the loss was measured as PyTorch runs it: both
    keep their speed.
    """
    found = costs.calibration
    changed = msgspec.structs.replace(
        found,
        products=tuple(
            _faster(curve, 1 / (low if INPUT_BYTES[curve.precision] < 2 else products))
            for curve in found.products
        ),
        grouped=found.grouped and _faster(found.grouped, 1 / products),
        attention=tuple(_faster(curve, 1 / attention) for curve in found.attention),
        memory=tuple(
            curve
            if curve.op in ("optimizer", "cross_entropy", "cross_entropy_backward", "loss_in_place")
            else msgspec.structs.replace(curve, efficiency=curve.efficiency / elementwise)
            for curve in found.memory
        ),
        sustained_slowdown=1.0,
    )
    return _ready(costs.gpu, changed, costs.basis)


@cache
def measured_devices() -> Mapping[str, Calibration]:
    """Return the built-in calibrations by the name of the device they were measured on."""
    text = files("meshwright.predict.cost").joinpath("devices.toml").read_text(encoding="utf-8")
    return {
        name: read(Calibration, {"gpu": name, **data}, f"devices.toml: {name}")
        for name, data in tomllib.loads(text).items()
    }


def relative_of(gpu: Gpu) -> str:
    """Return the measured device whose curves `gpu` uses: itself, or its nearest relative."""
    if gpu.name in measured_devices():
        return gpu.name
    return _RELATIVE.get(gpu.arch.rstrip("af"), _FARTHEST)


def _defaults(gpu: Gpu) -> tuple[Calibration, str]:
    name = relative_of(gpu)
    found = measured_devices()[name]
    if name == gpu.name:
        return found, "measured"
    ratio = _share_reached(gpu) / _share_reached(gpus()[name])
    return _scaled(found, ratio), f"transferred from {name}"


def _share_reached(gpu: Gpu) -> float:
    """Return the share of its peak that the best published product reaches on a chip.

    Without one, an AMD chip takes the mean of the AMD chips that have one, and any other the
    share of its relative.
    """
    known = [gpu, gpus()[relative_of(gpu)]]
    if gpu.vendor == "amd" and gpu.kind == "gpu":
        known = [gpu, *(other for other in gpus().values() if other.arch.startswith("gfx"))]
    shares = [
        other.bf16_measured_flops / other.bf16_flops
        for other in known
        if other.bf16_measured_flops is not None and other.bf16_flops is not None
    ]
    if gpu.bf16_measured_flops is not None:
        return shares[0]
    return sum(shares) / len(shares) if shares else 1.0


def _scaled(found: Calibration, ratio: float) -> Calibration:
    """Return the same curves with every product and attention faster by a ratio."""
    return msgspec.structs.replace(
        found,
        products=tuple(_faster(curve, ratio) for curve in found.products),
        attention=tuple(_faster(curve, ratio) for curve in found.attention),
        grouped=found.grouped and _faster(found.grouped, ratio),
        residuals=(),  # they are of one chip's kernels
    )


def _faster(curve: Curve, ratio: float) -> Curve:
    """Return a curve faster by a ratio, its errors unknown."""
    efficiency = min(1.0, curve.efficiency * ratio)
    return msgspec.structs.replace(curve, efficiency=efficiency, error=None, bias=None)


def _merged(defaults: Calibration, new: Calibration) -> Calibration:
    return msgspec.structs.replace(
        defaults,
        gpu=new.gpu,
        source=new.source,
        products=tuple({c.precision: c for c in (*defaults.products, *new.products)}.values()),
        attention=tuple(
            {(c.kernel, c.part): c for c in (*defaults.attention, *new.attention)}.values()
        ),
        memory=tuple({c.op: c for c in (*defaults.memory, *new.memory)}.values()),
        launch=new.launch or defaults.launch,
        grouped=new.grouped or defaults.grouped,
        residuals=new.residuals,
        software=new.software,
        peaks=new.peaks,
        **{
            name: given
            for name in ("grouped_efficiency", "grouped_launch_s", "sustained_slowdown")
            if (given := getattr(new, name)) is not None
        },
    )


def _ready(gpu: Gpu, calibration: Calibration, basis: str) -> DeviceCosts:
    assert calibration.launch is not None, "built-in calibrations are complete"
    return DeviceCosts(
        gpu=gpu,
        basis=basis,
        calibration=calibration,
        sms=gpu.sms or 1,
        bytes_per_s=gpu.memory_bytes_per_s,
        attention_peak_flops=gpu.bf16_flops or gpu.fp16_flops or gpu.peak_flops("fp32"),
        sustained_slowdown=calibration.sustained_slowdown or 1.0,
        launch=calibration.launch,
        grouped_efficiency=calibration.grouped_efficiency or 1.0,
        grouped_launch_s=calibration.grouped_launch_s or 0.0,
        memory_efficiency=_with_near({curve.op: curve.efficiency for curve in calibration.memory}),
        attention_curves={(c.kernel, c.part): c for c in calibration.attention},
        attention_corrections={
            one.name: Correction(one) for one in calibration.residuals if one.family == "attention"
        },
        rates={},
        grouped_rates={},
    )


def _with_near(known: dict[str, float]) -> dict[str, float]:
    """Give a class of work that nobody measured the share of the one most like it."""
    return {**{op: known[near] for op, near in NEAR.items()}, **known}


def _rate(costs: DeviceCosts, precision: str) -> ProductRate:
    curves: dict[str, ProductCurve] = {c.precision: c for c in costs.calibration.products}
    like = precision
    while like not in curves:
        like = _LIKE[like]
    return _rate_of(costs, curves[like], precision, _correction(costs, "products", like))


def _grouped_rate(costs: DeviceCosts, precision: str) -> ProductRate:
    own = costs.calibration.grouped
    if own is not None and own.precision == precision:
        return _rate_of(costs, own, precision, _correction(costs, "grouped", precision))
    dense = costs.product(precision)
    return msgspec.structs.replace(
        dense,
        flops_per_sm=dense.flops_per_sm * costs.grouped_efficiency,
        launch_s=dense.launch_s + costs.grouped_launch_s,
        correction=None,
    )


def _correction(costs: DeviceCosts, family: ResidualFamily, name: str) -> Correction | None:
    for one in costs.calibration.residuals:
        if (one.family, one.name) == (family, name):
            return Correction(one)
    return None


def _rate_of(
    costs: DeviceCosts, curve: ProductCurve, precision: str, correction: Correction | None
) -> ProductRate:
    first, second, third = (
        1.0 / (1.0 + curve.tile_penalty * (128 / rows + 128 / columns - 1.5))
        for rows, columns in TILES
    )
    flops_per_sm = curve.efficiency * costs.gpu.peak_flops(precision) / costs.sms
    return ProductRate(
        flops_per_sm=flops_per_sm,
        bytes_per_s=curve.bandwidth * costs.bytes_per_s,
        input_bytes=INPUT_BYTES[precision],
        word=round(16 / int(INPUT_BYTES[precision] * 2) * 2),
        launch_s=curve.launch_s,
        fill_k=curve.fill_k,
        tail=curve.tail,
        tile_efficiency=(first, second, third),
        split_flops_per_element=4.0 * curve.split_penalty / costs.bytes_per_s * flops_per_sm,
        accumulate_bytes=curve.accumulate_bytes,
        gradient_ratio=curve.gradient_ratio,
        correction=correction,
    )
