"""`quantize_model`: quantize the linear layers of a served model to 8 or 4 bits.

    fp8     e4m3, a scale for each output; inputs get a scale for each token as they come
    int4    four bits with a scale and an offset for each group of 128 inputs (64 or 32 where 128
            does not divide them); inputs stay as they are

Embeddings, the output head, norms and routers keep their format. So does the product that makes
keys and values of latents: it is absorbed into queries, and multiplied as it is.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.fp8.quantization import Fp8Matrix, quantize_rowwise
from meshwright.run.kernels.fp8.scaled_mm import scaled_mm
from meshwright.run.kernels.gemm.gemm import view_as_matrix
from meshwright.run.kernels.gemm.int4_gemm import (
    Int4Matrix,
    int4_linear,
    quantize_int4,
    select_group_size,
)
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.spec.name_suggestions import build_unknown_name_problem

QuantizedFormat = Literal["fp8", "int4"]
_ABSORBED = "kv_up"
_MULTIPLE = 16
"""Sides of a matrix that Hopper's products in fp8 ask for."""


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """What became of a model's linear layers."""

    format: QuantizedFormat
    quantized_layers: tuple[str, ...]
    """Those that are quantised."""
    skipped: dict[str, str]
    """Those that are not, and why."""
    quantized_bytes: int
    """What the quantised layers take."""
    original_bytes: int


class Fp8LinearMethod:
    """Multiplies by a weight in fp8, inputs rounded to fp8 token by token."""

    name = "fp8-weights"

    def __init__(self, scale_M1: Tensor) -> None:
        self.scale = scale_M1

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, input_is_free: bool = False
    ) -> Tensor:
        """Return x · weightᵀ + bias."""
        del input_is_free
        rows = quantize_rowwise(view_as_matrix(x)).direct
        y = scaled_mm(
            rows, Fp8Matrix(weight, self.scale, "row"), dtype=x.dtype, bias=bias, fast_accum=True
        )
        return y.view(*x.shape[:-1], len(weight))


class Int4LinearMethod:
    """Multiplies by a weight of four bits."""

    name = "int4-weights"

    def __init__(self, scale: Tensor, low: Tensor) -> None:
        self.scale, self.low = scale, low

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, input_is_free: bool = False
    ) -> Tensor:
        """Return x · weightᵀ + bias."""
        del input_is_free
        y = int4_linear(view_as_matrix(x), Int4Matrix(weight, self.scale, self.low), bias)
        return y.view(*x.shape[:-1], len(weight))


@torch.no_grad()
def quantize_model(decoder: Decoder, kind: QuantizedFormat) -> QuantizationResult:
    """Replace the weights of linear layers, one at a time, by ones of fewer bits."""
    if kind not in get_args(QuantizedFormat):
        raise InputError(
            [
                build_unknown_name_problem(
                    "format of weights", kind, get_args(QuantizedFormat), "kind"
                )
            ]
        )
    if any(isinstance(part, MoELayer) for part in decoder.modules()):
        what = f"experts have no {kind} here, and are most of the weights"
        raise InputError([Problem(decoder.model.name, what, "serve it in bf16")])
    layers = {
        name: part for name, part in decoder.layers.named_modules() if isinstance(part, Linear)
    }
    left: dict[str, str] = {}
    before = after = 0
    for name, layer in layers.items():
        if why := _why_not(name, layer, kind):
            left[name] = why
            continue
        before += layer.weight.nbytes
        after += _make(layer, kind)
    done = tuple(name for name in layers if name not in left)
    return QuantizationResult(kind, done, left, after, before)


def _make(layer: Linear, kind: QuantizedFormat) -> int:
    """Quantise one layer; return the bytes it takes."""
    if kind == "fp8":
        made = quantize_rowwise(layer.weight.detach()).direct
        layer.linear_method = Fp8LinearMethod(made.scale)
        data, extra = made.data, made.scale.nbytes
    else:
        codes = quantize_int4(layer.weight.detach())
        layer.linear_method = Int4LinearMethod(codes.scale, codes.offset)
        data, extra = codes.codes, codes.scale.nbytes + codes.offset.nbytes
    layer.weight = nn.Parameter(data, requires_grad=False)
    return data.nbytes + extra


def _why_not(name: str, layer: Linear, kind: QuantizedFormat) -> str:
    """Say why a layer keeps its format; empty where it need not."""
    outputs, inputs = layer.weight.shape
    if name.rsplit(".", maxsplit=1)[-1] == _ABSORBED:
        return "it is absorbed into queries"
    if layer.linear_method is not None:
        return f"it is quantised already, as {layer.recipe}"
    if kind == "fp8" and (outputs % _MULTIPLE or inputs % _MULTIPLE):
        return f"{outputs}×{inputs} has a side that is no multiple of {_MULTIPLE}"
    if kind == "int4" and select_group_size(inputs) is None:
        return f"rows of {inputs} cannot be cut into groups"
    return ""
