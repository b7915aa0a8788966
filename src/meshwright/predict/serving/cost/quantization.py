"""Number formats in serving: which part of a model is stored in what, and computed in what.

A checkpoint of four bits keeps the attention of sparse models in sixteen, as the published ones
do (gpt-oss, NVIDIA's NVFP4 of DeepSeek, Kimi's int4). A format that the tensor cores lack is
stored all the same and widened on the way: only fewer bytes are read.
"""

from typing import Literal, NamedTuple

import msgspec

from meshwright.spec.cluster import Gpu
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model import Model
from meshwright.spec.model.weights import Weight

WeightFormat = Literal[
    "fp32", "bf16", "fp16", "fp8", "fp8-blockwise", "int8", "int4", "nvfp4", "mxfp4"
]
KvFormat = Literal["fp32", "bf16", "fp8"]

WEIGHT_BYTES: dict[str, float] = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8-blockwise": 1.0, "int8": 1.0,
    "int4": 0.5 + 1 / 16, "nvfp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32,
}  # fmt: skip
"""Bytes of one weight with its share of the scales."""
KV_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
_COMPUTED = {"fp8": "fp8-tensorwise", "int4": None}
_FOUR_BITS = ("int4", "nvfp4", "mxfp4")


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How weights, keys and values are stored."""

    weights: WeightFormat = "bf16"
    kv: KvFormat = "bf16"
    per_channel_scales: bool = False
    """Weights in fp8 have a scale for each output, and inputs one for each token."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("weights", self.weights, tuple(WEIGHT_BYTES))
        bounds.one_of("kv", self.kv, tuple(KV_BYTES))
        bounds.raise_problems()

    @property
    def activation_bytes(self) -> float:
        """Bytes of an activation, and of a weight that keeps its format."""
        return 4.0 if self.weights == "fp32" else 2.0


class QuantizedWeight(NamedTuple):
    """How one matrix is stored and multiplied."""

    compute: str
    """Precision of the product."""
    weight_bytes: float
    """Bytes of one weight."""


def get_quantized_weight(
    model: Model, weight: Weight, formats: Quantization, gpu: Gpu
) -> QuantizedWeight:
    """Return how one matrix of a model is stored and multiplied."""
    if formats.weights == "fp32":
        return QuantizedWeight("fp32", 4.0)
    wide = "bf16" if gpu.bf16_flops is not None else "fp16"
    kept_wide = weight.part == "router" or (
        formats.weights in _FOUR_BITS and model.moe is not None and weight.part == "mixer"
    )
    if kept_wide or formats.weights in ("bf16", "fp16"):
        return QuantizedWeight(wide, 2.0)
    compute = _COMPUTED.get(formats.weights, formats.weights)
    if formats.per_channel_scales and formats.weights == "fp8":
        compute = "fp8-rowwise"
    size = WEIGHT_BYTES[formats.weights]
    if compute is None or compute not in gpu.precisions:
        return QuantizedWeight(wide, size)
    return QuantizedWeight(compute, size)


def get_lm_head_format(gpu: Gpu, formats: Quantization) -> QuantizedWeight:
    """Return how the output head is stored: checkpoints of fewer bits leave it in sixteen."""
    if formats.weights == "fp32":
        return QuantizedWeight("fp32", 4.0)
    return QuantizedWeight("bf16" if gpu.bf16_flops is not None else "fp16", 2.0)
