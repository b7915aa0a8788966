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
from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import (
    AttentionCurve,
    AttentionKernel,
    GemmCurve,
    LaunchCurve,
    PassDirection,
)
from meshwright.predict.cost.gemm_rate import (
    INPUT_BYTES,
    GemmRate,
    build_gemm_rate,
    build_grouped_gemm_rate,
)
from meshwright.predict.cost.residual_correction import ResidualCorrection
from meshwright.spec.catalog.hardware import list_gpus
from meshwright.spec.cluster import Gpu
from meshwright.spec.serialization import decode

Curve = TypeVar("Curve", GemmCurve, AttentionCurve)

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
SUBSTITUTE_OPS = {"loss_in_place": "softmax", "accumulate": "optimizer"}
"""Classes of work that only some devices were measured at, with what they are most like."""
FRAMEWORK_INDEPENDENT_OPS = (
    "optimizer", "accumulate", "cross_entropy", "cross_entropy_backward", "loss_in_place",
)  # fmt: skip
"""Classes of work that run alike in any software."""
_FARTHEST = "h100-80g-sxm"
"""Whose curves a device of any other make borrows."""


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
    memory_efficiency: Mapping[str, float]
    """Share of the bandwidth by class of elementwise work."""
    attention_curves: Mapping[tuple[str, str], AttentionCurve]
    """Curves by kernel and direction."""
    attention_corrections: Mapping[str, ResidualCorrection]
    """What the native curves leave, by direction."""
    gemm_rates: dict[str, GemmRate]
    """Product rates by precision, filled as they are asked for."""
    grouped_gemm_rates: dict[str, GemmRate]
    """The same of grouped products."""

    def get_gemm_rate(self, precision: str) -> GemmRate:
        """Return the rate of products in a precision."""
        rate = self.gemm_rates.get(precision)
        if rate is None:
            rate = self.gemm_rates[precision] = build_gemm_rate(
                self.gpu, self.calibration, precision
            )
        return rate

    def get_grouped_gemm_rate(self, precision: str) -> GemmRate:
        """Return the rate of grouped products: their own, or from that of dense ones."""
        rate = self.grouped_gemm_rates.get(precision)
        if rate is None:
            rate = build_grouped_gemm_rate(self.gpu, self.calibration, precision)
            self.grouped_gemm_rates[precision] = rate
        return rate

    def get_attention_curve(self, kernel: AttentionKernel, part: PassDirection) -> AttentionCurve:
        """Return the curve of a kernel in one direction; every device has a native one."""
        curve = self.attention_curves.get((kernel, part))
        return curve if curve is not None else self.attention_curves["native", part]


@lru_cache(maxsize=256)
def build_device_costs(gpu: Gpu, calibration: Calibration | None = None) -> DeviceCosts:
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
            gpu = msgspec.structs.replace(gpu, **calibration.peaks.known_peaks)
    return _ready(gpu, defaults, basis)


@lru_cache(maxsize=256)
def apply_sustained_load(costs: DeviceCosts) -> DeviceCosts:
    """Return the constants of the same device after seconds of full load, at its power limit.

    Products and attention slow down by `sustained_slowdown`; work bound by memory does not.
    """
    slowdown = costs.sustained_slowdown
    return scale_costs(costs, products=slowdown, low=slowdown, attention=slowdown)


@lru_cache(maxsize=1024)
def scale_costs(
    costs: DeviceCosts,
    *,
    products: float = 1.0,
    low: float = 1.0,
    attention: float = 1.0,
    elementwise: float = 1.0,
    read_share: float | None = None,
) -> DeviceCosts:
    """Return the same device with some kinds of work taking longer by a factor.

    `low` is for products of eight bits or fewer, `products` for all others; `read_share` is the
    share of the bandwidth at which products read, where it is not their own. The optimizer's one
    pass over its states is fused everywhere, and the loss was measured as PyTorch runs it: both
    keep their speed, and so do sums of gradients.
    """
    found = costs.calibration
    changed = msgspec.structs.replace(
        found,
        products=tuple(
            _reading(
                _faster(curve, 1 / (low if INPUT_BYTES[curve.precision] < 2 else products)),
                read_share,
            )
            for curve in found.products
        ),
        grouped=found.grouped and _faster(found.grouped, 1 / products),
        attention=tuple(_faster(curve, 1 / attention) for curve in found.attention),
        memory=tuple(
            curve
            if curve.op in FRAMEWORK_INDEPENDENT_OPS
            else msgspec.structs.replace(curve, efficiency=curve.efficiency / elementwise)
            for curve in found.memory
        ),
        sustained_slowdown=1.0,
    )
    return _ready(costs.gpu, changed, costs.basis)


@cache
def list_measured_devices() -> Mapping[str, Calibration]:
    """Return the built-in calibrations by the name of the device they were measured on."""
    text = files("meshwright.predict.cost").joinpath("devices.toml").read_text(encoding="utf-8")
    return {
        name: decode(Calibration, {"gpu": name, **data}, f"devices.toml: {name}")
        for name, data in tomllib.loads(text).items()
    }


def find_closest_device(gpu: Gpu) -> str:
    """Return the measured device whose curves `gpu` uses: itself, or its nearest relative."""
    if gpu.name in list_measured_devices():
        return gpu.name
    return _RELATIVE.get(gpu.arch.rstrip("af"), _FARTHEST)


def _defaults(gpu: Gpu) -> tuple[Calibration, str]:
    name = find_closest_device(gpu)
    found = list_measured_devices()[name]
    if name == gpu.name:
        return found, "measured"
    ratio = _share_reached(gpu) / _share_reached(list_gpus()[name])
    return _scaled(found, ratio), f"transferred from {name}"


def _share_reached(gpu: Gpu) -> float:
    """Return the share of its peak that the best published product reaches on a chip.

    Without one, an AMD chip takes the mean of the AMD chips that have one, and any other the
    share of its relative.
    """
    known = [gpu, list_gpus()[find_closest_device(gpu)]]
    if gpu.vendor == "amd" and gpu.kind == "gpu":
        known = [gpu, *(other for other in list_gpus().values() if other.arch.startswith("gfx"))]
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


def _reading(curve: GemmCurve, share: float | None) -> GemmCurve:
    """Return a curve whose operands come at a share of the bandwidth."""
    return curve if share is None else msgspec.structs.replace(curve, bandwidth=share)


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
        link=new.link,
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
        memory_efficiency=_with_near({curve.op: curve.efficiency for curve in calibration.memory}),
        attention_curves={(c.kernel, c.part): c for c in calibration.attention},
        attention_corrections={
            one.name: ResidualCorrection(one)
            for one in calibration.residuals
            if one.family == "attention"
        },
        gemm_rates={},
        grouped_gemm_rates={},
    )


def _with_near(known: dict[str, float]) -> dict[str, float]:
    """Give a class of work that nobody measured the share of the one most like it."""
    return {**{op: known[near] for op, near in SUBSTITUTE_OPS.items()}, **known}
