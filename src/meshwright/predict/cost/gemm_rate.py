"""`GemmRate`: the curve of matrix products in the units of one device."""

import msgspec

from meshwright.predict.cost.calibration import Calibration
from meshwright.predict.cost.curves import GemmCurve, ResidualFamily
from meshwright.predict.cost.residual_correction import ResidualCorrection
from meshwright.spec.cluster import Gpu

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
TILES = ((128, 256), (128, 128), (64, 128))
"""Rows and columns of a tile, long side along the longer side of the result."""
UNSPLIT_TILES = 2
"""How many of them there are for products whose k is never split."""
CPU_TILES = ((16, 64), (16, 32), (8, 16))
"""What a processor's kernels keep in registers at a time."""


class GemmRate(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A `GemmCurve` in the units of one device."""

    flops_per_sm: float
    bytes_per_s: float
    input_bytes: float
    elements_per_word: int
    launch_s: float
    fill_k: float
    tail: float
    tile_efficiency: tuple[float, ...]
    split_flops_per_element: float
    accumulate_bytes: float
    gradient_ratio: float
    weight_ratio: float
    """Of weight gradients, over forward products."""
    tiles: tuple[tuple[int, int], ...] = TILES
    allows_split_k: bool = True
    """Whether k may be split where there are few tiles."""
    correction: ResidualCorrection | None = None


def build_gemm_rate(gpu: Gpu, calibration: Calibration, precision: str) -> GemmRate:
    """Return how fast products of a precision run, by their own curve or a near one's."""
    curves: dict[str, GemmCurve] = {c.precision: c for c in calibration.products}
    like = precision
    while like not in curves:
        like = _LIKE[like]
    return _rate_of(gpu, curves[like], precision, _correction(calibration, "products", like))


def build_grouped_gemm_rate(gpu: Gpu, calibration: Calibration, precision: str) -> GemmRate:
    """Return how fast grouped products run, by their own curve or from that of dense ones."""
    own = calibration.grouped
    if own is not None and own.precision == precision:
        return _rate_of(gpu, own, precision, _correction(calibration, "grouped", precision))
    dense = build_gemm_rate(gpu, calibration, precision)
    return msgspec.structs.replace(
        dense,
        flops_per_sm=dense.flops_per_sm * (calibration.grouped_efficiency or 1.0),
        launch_s=dense.launch_s + (calibration.grouped_launch_s or 0.0),
        correction=None,
    )


def _correction(
    calibration: Calibration, family: ResidualFamily, name: str
) -> ResidualCorrection | None:
    for one in calibration.residuals:
        if (one.family, one.name) == (family, name):
            return ResidualCorrection(one)
    return None


def _rate_of(
    gpu: Gpu, curve: GemmCurve, precision: str, correction: ResidualCorrection | None
) -> GemmRate:
    tiles = CPU_TILES if gpu.kind == "cpu" else TILES[:UNSPLIT_TILES] if curve.whole else TILES
    rows, columns = tiles[0]
    largest = 128 / rows + 128 / columns
    tile_efficiency = tuple(
        1.0 / (1.0 + curve.tile_penalty * (128 / rows + 128 / columns - largest))
        for rows, columns in tiles
    )
    flops_per_sm = curve.efficiency * gpu.peak_flops(precision) / (gpu.sms or 1)
    return GemmRate(
        flops_per_sm=flops_per_sm,
        bytes_per_s=curve.bandwidth * gpu.memory_bytes_per_s,
        input_bytes=INPUT_BYTES[precision],
        elements_per_word=round(16 / int(INPUT_BYTES[precision] * 2) * 2),
        launch_s=curve.launch_s,
        fill_k=curve.fill_k,
        tail=curve.tail,
        tile_efficiency=tile_efficiency,
        split_flops_per_element=4.0 * curve.split_penalty / gpu.memory_bytes_per_s * flops_per_sm,
        accumulate_bytes=curve.accumulate_bytes,
        gradient_ratio=curve.gradient_ratio,
        weight_ratio=curve.gradient_ratio * curve.weight_ratio,
        tiles=tiles,
        allows_split_k=not curve.whole,
        correction=correction,
    )
