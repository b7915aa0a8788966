"""FLOPs of the matrix products, convolutions and attentions that a trace names with their shapes.

Taken from the arguments of operators (`Input Dims`, `Input type`, `Concrete Inputs`), which a
profile has when it was made with `record_shapes=True`. A multiplication and an addition are two
FLOPs. Knows operators; does not know kernels.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from meshwright.observe.analyze.spans import Ints, where
from meshwright.observe.analyze.steps import on_host
from meshwright.timeline.once import once
from meshwright.timeline.readers.arrow_arrays import taken
from meshwright.timeline.timeline import Timeline

Shape = Sequence[int]


class Call(NamedTuple):
    """What a trace says of one call of an operator."""

    dims: Sequence[Shape]
    given: Sequence[str]
    """Values of what is no tensor, as text."""


class Products(NamedTuple):
    """Calls of operators whose FLOPs are known, in the order of the timeline."""

    row: Ints
    """Row in the rank's timeline."""
    flops: npt.NDArray[Any]
    dtype: tuple[str, ...]
    """Element type of the first factor of each: `bf16`, `fp16`, `fp32`, `fp8`, …"""
    shape: tuple[str, ...]
    """Shapes of the factors of each: `[3072, 16384] [16384, 768]`."""


class _Arguments(msgspec.Struct):
    dims: list[Any] = msgspec.field(default=[], name="Input Dims")
    types: list[str] = msgspec.field(default=[], name="Input type")
    given: list[Any] = msgspec.field(default=[], name="Concrete Inputs")


class _Texts(msgspec.Struct, gc=False):
    """The same, not decoded: most calls say what one before them said."""

    dims: Raw = msgspec.field(default=Raw(b"[]"), name="Input Dims")
    types: Raw = msgspec.field(default=Raw(b"[]"), name="Input type")
    given: Raw = msgspec.field(default=Raw(b"[]"), name="Concrete Inputs")


_DECODER = msgspec.json.Decoder(_Texts)
_DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64",
    "signed char": "int8", "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2fnuz": "fp8",
}  # fmt: skip


def _product(left: int) -> Callable[[Call], float | None]:
    """[.., m, k] times [.., k, n], the factors being arguments `left` and `left + 1`."""

    def flops(call: Call) -> float | None:
        a, b = call.dims[left], call.dims[left + 1]
        return 2.0 * math.prod(a) * b[-1] if len(a) >= 2 and len(b) >= 2 else None

    return flops


def _linear(call: Call) -> float | None:
    """[.., k] times the transpose of [n, k]."""
    a, weight = call.dims[0], call.dims[1]
    return 2.0 * math.prod(a) * weight[0] if a and len(weight) == 2 else None


def _convolution(stride: int, padding: int, dilation: int) -> Callable[[Call], float | None]:
    """Forward; the numbers are the places of its settings among the arguments."""

    def flops(call: Call) -> float | None:
        image, weight = call.dims[0], call.dims[1]
        settings = [_whole(call.given[place]) for place in (stride, padding, dilation)]
        spatial = len(weight) - 2
        if spatial < 1 or len(image) != len(weight) or any(len(s) == 0 for s in settings):
            return None
        sizes = [s * spatial if len(s) == 1 else s for s in settings]
        out = [
            (size + 2 * pad - hole * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, hole in zip(image[2:], weight[2:], *sizes, strict=True)
        ]
        return float(2 * image[0] * math.prod(out) * math.prod(weight))

    return flops


def _convolution_backward(call: Call) -> float | None:
    """One product the size of the forward one for each of the two gradients that are asked for."""
    out, weight = call.dims[0], call.dims[2]
    if len(weight) < 3 or len(out) != len(weight):
        return None
    asked = str(call.given[-1])
    gradients = asked.strip("[]").split(",")[:2]
    number = sum(text.strip() == "True" for text in gradients) if "True" in asked else 2
    return 2.0 * number * out[0] * math.prod(out[2:]) * math.prod(weight)


def _attention(first: int, products: int) -> Callable[[Call], float | None]:
    """Attention of shapes [batch, heads, sequence, width], `products` products of scores' size.

    Forward has 2 and backward 5 (it makes the scores again). A causal mask, where the trace says
    that there is one, leaves half.
    """

    def flops(call: Call) -> float | None:
        query, key = call.dims[first], call.dims[first + 1]
        if len(query) != 4 or len(key) != 4:
            return None
        full = 2.0 * products * math.prod(query) * key[2]
        causal = any(str(value) == "True" for value in call.given)
        return full / 2 if causal else full

    return flops


FLOPS: dict[str, Callable[[Call], float | None]] = {
    "aten::mm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::_int_mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::_addmm_activation": _product(1),
    "aten::linear": _linear,
    "aten::convolution": _convolution(3, 4, 5),
    "aten::_convolution": _convolution(3, 4, 5),
    "aten::cudnn_convolution": _convolution(3, 2, 4),
    "aten::miopen_convolution": _convolution(4, 3, 5),
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention(0, 2),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 2),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 5),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 5),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 5),
}
"""Operators that are counted. Where one calls another, the inner one is."""


@once
def products(part: Timeline) -> Products:
    """The calls of one rank's operators whose FLOPs are known."""
    if "extra" not in part.known or "extra" not in part.spans.column_names:
        return Products(np.zeros(0, dtype=np.int64), np.zeros(0), (), ())
    names = part.strings("name")
    rows = np.flatnonzero(on_host(part) & where(names, FLOPS.__contains__))
    texts = taken(part.spans.column("extra"), rows).to_pylist()
    found = []
    for row, code, text in zip(rows.tolist(), names.codes[rows].tolist(), texts, strict=True):
        counted = _count(names.values[code], text)
        if counted is not None:
            found.append((row, *counted))
    return Products(
        np.array([call[0] for call in found], dtype=np.int64),
        np.array([call[1] for call in found], dtype=np.float64),
        tuple(call[2] for call in found),
        tuple(call[3] for call in found),
    )


def _count(name: str, text: str | None) -> tuple[float, str, str] | None:
    """FLOPs, element type and shapes of one call; None where the trace does not say enough."""
    if not text:
        return None
    try:
        said = _DECODER.decode(text)
    except msgspec.MsgspecError:
        return None
    return _counted(name, bytes(said.dims), bytes(said.types), bytes(said.given))


@lru_cache(1 << 14)
def _counted(name: str, dims: bytes, types: bytes, given: bytes) -> tuple[float, str, str] | None:
    try:
        arguments = _Arguments(
            msgspec.json.decode(dims, type=list[Any]),
            msgspec.json.decode(types, type=list[str]),
            msgspec.json.decode(given, type=list[Any]),
        )
        flops = FLOPS[name](Call(arguments.dims, arguments.given))
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None
    if flops is None:
        return None
    typed = next((kind for kind in arguments.types if kind in _DTYPES), "")
    shapes = [str(shape) for shape in arguments.dims if isinstance(shape, list) and len(shape) > 1]
    return flops, _DTYPES.get(typed, ""), " ".join(shapes[:2])


def _whole(text: object) -> list[int]:
    """`[1, 2]` or `1` as whole numbers."""
    digits = str(text).strip("[]")
    return [int(number) for number in digits.split(",")] if digits else []
