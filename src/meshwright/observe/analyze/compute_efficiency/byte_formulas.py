"""How many bytes the calls of operators must move at least, by the shapes that a trace records.

Every tensor that goes in is read once and every one that comes out is written once; what a cache
saves or a poor kernel reads twice is not in it. So the time a device needs for these bytes is a
bound, not a guess. Known are:

    GEMMs            those of `flop_formulas`: factors and result
    compiled         kernels of torch.compile (`triton_…`): each tensor argument once
    pointwise        the operators below: inputs, and a result as large as the largest of them
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.observe.analyze.compute_efficiency.flop_formulas import (
    FLOP_FORMULAS,
    LINEAR_OPERATORS,
)
from meshwright.observe.analyze.spans.intervals import Ints
from meshwright.timeline.readers.parsing.arrow_arrays import take_rows
from meshwright.timeline.timeline import Timeline

DTYPE_BYTES = {
    "double": 8, "long int": 8, "int64_t": 8, "float": 4, "int": 4, "c10::BFloat16": 2,
    "c10::Half": 2, "short int": 2, "bool": 1, "signed char": 1, "unsigned char": 1,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1, "c10::Float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes of an element, by the profiler's words."""
ELEMENTWISE_OPERATORS = frozenset({
    "aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::mul", "aten::mul_", "aten::div",
    "aten::div_", "aten::neg", "aten::pow", "aten::pow_", "aten::sqrt", "aten::sqrt_",
    "aten::rsqrt", "aten::exp", "aten::exp_", "aten::log", "aten::tanh", "aten::sigmoid",
    "aten::sigmoid_", "aten::relu", "aten::relu_", "aten::gelu", "aten::silu", "aten::silu_",
    "aten::threshold_backward", "aten::gelu_backward", "aten::silu_backward",
    "aten::tanh_backward", "aten::sigmoid_backward", "aten::clamp", "aten::clamp_",
    "aten::clamp_min", "aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::copy_",
    "aten::addcmul", "aten::addcmul_", "aten::addcdiv", "aten::addcdiv_", "aten::lerp",
    "aten::lerp_", "aten::abs", "aten::sign", "aten::maximum", "aten::minimum", "aten::eq",
    "aten::ne", "aten::lt", "aten::le", "aten::gt", "aten::ge", "aten::bitwise_and",
    "aten::bitwise_or", "aten::logical_not", "aten::native_dropout", "aten::dropout",
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_batch_norm",
    "aten::cudnn_batch_norm", "aten::native_batch_norm_backward", "aten::_softmax",
    "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
})  # fmt: skip
"""Operators that read what they are given and write one result of the largest input's size."""


class _Arguments(msgspec.Struct):
    dims: list[Any] = msgspec.field(default=[], name="Input Dims")
    types: list[str] = msgspec.field(default=[], name="Input type")


_ATTENTION = re.compile(r"attention|^flash_attn")
_DECODER = msgspec.json.Decoder(_Arguments)


def has_byte_formula(operator: str) -> bool:
    """Whether the bytes of an operator's calls can be told."""
    return (
        operator in FLOP_FORMULAS
        or operator in ELEMENTWISE_OPERATORS
        or operator.startswith("triton_")
    )


def count_minimum_bytes(part: Timeline, rows: Ints) -> Ints:
    """The bytes that each of these calls moves at least; -1 where the trace does not say."""
    names = part.string_column("name")
    texts = take_rows(part.spans.column("extra"), rows).to_pylist()
    operators = [names.values[code] for code in names.codes[rows].tolist()]
    found = [
        _bytes(name, text) if text else -1 for name, text in zip(operators, texts, strict=True)
    ]
    return np.array(found, dtype=np.int64)


def _bytes(operator: str, text: str) -> int:
    try:
        arguments = _DECODER.decode(text)
        tensors = [
            (math.prod(dims) * DTYPE_BYTES[kind], dims)
            for dims, kind in zip(arguments.dims, arguments.types, strict=False)
            if kind in DTYPE_BYTES and isinstance(dims, list)
        ]
        read = sum(size for size, _ in tensors)
        if not read:
            return -1
        if operator.startswith("triton_"):
            return read
        if operator in ELEMENTWISE_OPERATORS:
            # What is changed in place is read and written; a new result is as large.
            return read + max(size for size, _ in tensors)
        return read + _result(operator, arguments.dims) * _width(arguments.types)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return -1


def _result(operator: str, dims: Sequence[Any]) -> int:
    """How many elements a product's result has."""
    if _ATTENTION.search(operator):
        places = (1, 2, 3) if operator.endswith(("_backward", "::bwd")) else (0,)
        return sum(_elements(dims[place]) for place in places)
    if "grouped_mm" in operator:
        return _grouped(*dims[:3])
    if operator == "aten::convolution_backward":
        return _elements(dims[1]) + _elements(dims[2])
    if "convolution" in operator:
        # Padding and stride are not looked at: a result of the image's area, which is the usual.
        image, weight = dims[0], dims[1]
        return _elements(image) // int(image[1]) * int(weight[0])
    if operator in LINEAR_OPERATORS:
        return _elements(dims[0][:-1]) * int(dims[1][0])
    left = 1 if "addmm" in operator or "baddbmm" in operator else 0
    return _elements(dims[left][:-1]) * int(dims[left + 1][-1])


def _grouped(a: Sequence[int], b: Sequence[int], ends: Sequence[int]) -> int:
    """Elements that products of groups give: where the groups share out k, a matrix for each."""
    if len(a) == len(b) == 2:
        return int(ends[0]) * int(a[0]) * int(b[1])
    rows = a[:-1] if len(b) == 3 else a[1:-1]
    return _elements(rows) * int(b[-1])


def _elements(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _width(types: Sequence[str]) -> int:
    """Bytes of an element of the result: those of the widest factor, and two at the least.

    Products of 8-bit numbers give 16-bit ones.
    """
    return max(2, max((DTYPE_BYTES[kind] for kind in types[:2] if kind in DTYPE_BYTES), default=2))
