"""FLOPs of single calls of operators, by the shapes and values that a trace records of them.

A multiplication and an addition are two. Knows the arguments of operators as PyTorch declares them;
what a rule has to assume, it says.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Shape = Sequence[int]
UNKNOWN_MASK_NOTE = "attention whose mask the trace does not record counts in full"
EQUAL_LENGTHS_NOTE = "packed sequences count as of one length, which their longest nearly is"
MIN_LENGTH_RATIO = 0.9
"""Packed sequences count where their mean is this part of the longest; else their squares are not
known."""


class OperatorCall(NamedTuple):
    """What a trace says of one call of an operator."""

    dims: Sequence[Shape]
    non_tensor_args: Sequence[object]
    """Values of what is no tensor, mostly as text; empty where the trace has none."""


class CallFlops(NamedTuple):
    """How much a call computes."""

    flops: float
    assumption: str = ""
    """What was taken for granted; empty where the trace says all."""
    num_gemms: int = 1
    """How many products of one size, each in a kernel of its own."""


FlopFormula = Callable[[OperatorCall], CallFlops | None]
"""None where a trace does not say enough."""


def _product(left: int) -> FlopFormula:
    """[.., m, k] times [.., k, n], the factors being arguments `left` and `left + 1`."""

    def flops(call: OperatorCall) -> CallFlops | None:
        a, b = call.dims[left], call.dims[left + 1]
        return CallFlops(2.0 * math.prod(a) * b[-1]) if len(a) >= 2 and len(b) >= 2 else None

    return flops


def _linear(call: OperatorCall) -> CallFlops | None:
    """[.., k] times the transpose of [n, k]."""
    a, weight = call.dims[0], call.dims[1]
    return CallFlops(2.0 * math.prod(a) * weight[0]) if a and len(weight) == 2 else None


def _grouped(call: OperatorCall) -> CallFlops | None:
    """Products of groups: of rows [m, k] [g, k, n], of columns [g, m, k] [k, n], of k, or all."""
    a, b = call.dims[0], call.dims[1]
    if len(a) not in (2, 3) or len(b) not in (2, 3):
        return None
    rows = a if len(a) == 2 or len(b) == 3 else a[1:]
    return CallFlops(2.0 * math.prod(rows) * b[-1])


def _convolution(stride: int, padding: int, dilation: int, transposed: int = -1) -> FlopFormula:
    """Forward; the numbers are the places of its settings among the arguments."""

    def flops(call: OperatorCall) -> CallFlops | None:
        image, weight = call.dims[0], call.dims[1]
        spatial = len(weight) - 2
        if spatial < 1 or len(image) != len(weight):
            return None
        if transposed >= 0 and str(call.non_tensor_args[transposed]) == "True":
            return CallFlops(2.0 * image[0] * math.prod(image[2:]) * math.prod(weight))
        settings = [_whole(call.non_tensor_args[place]) for place in (stride, padding, dilation)]
        if any(len(setting) == 0 for setting in settings):
            return None
        sizes = [one * spatial if len(one) == 1 else one for one in settings]
        out = [
            (size + 2 * pad - hole * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, hole in zip(image[2:], weight[2:], *sizes, strict=True)
        ]
        return CallFlops(2.0 * image[0] * math.prod(out) * math.prod(weight))

    return flops


def _convolution_backward(call: OperatorCall) -> CallFlops | None:
    """One product the size of the forward one for each of the two gradients that are asked for."""
    out, image, weight = call.dims[:3]
    if len(weight) < 3 or not len(out) == len(image) == len(weight):
        return None
    asked = str(call.non_tensor_args[-1])
    gradients = asked.strip("[]").split(",")[:2]
    number = sum(text.strip() == "True" for text in gradients) if "True" in asked else 2
    transposed = len(call.non_tensor_args) > 7 and str(call.non_tensor_args[7]) == "True"
    places = image[2:] if transposed else out[2:]
    one = 2.0 * out[0] * math.prod(places) * math.prod(weight)
    return CallFlops(number * one, num_gemms=max(number, 1))


@dataclass(frozen=True, slots=True)
class _Attention:
    """Where an attention has what among its arguments; negative places count booleans from behind.

    Forward has two products of the scores' size, backward five: it makes the scores again.
    """

    query: int = 0
    """Key and value follow it."""
    causal: int = -1
    mask_kind: int = 0
    """Place of a whole number that stands for the mask, 0 being none."""
    packed: int = 0
    """Place of the sums of lengths of sequences that lie one behind the other."""
    longest: int = 2
    """How much further the longest of those lengths stands."""
    window: int = 0
    """Place of how far back a token looks; -1 or nothing is everywhere."""
    heads_first: bool = False
    """[batch, heads, sequence, width], with a causal mask from the first corner; else [batch,
    sequence, heads, width], from the last."""

    def __call__(self, call: OperatorCall) -> CallFlops | None:
        query, key, value = call.dims[self.query : self.query + 3]
        if not len(query) == len(key) == len(value):
            return None
        packed = self._packed(call)
        if packed and (len(query) == 3 or query[0] == 1):
            batch, heads = packed, query[-2]
            rows, columns = query[-3] / batch, key[-3] / batch
            if (
                rows
                < MIN_LENGTH_RATIO * _whole(call.non_tensor_args[self.packed + self.longest])[0]
            ):
                return None
        elif len(query) == 4:
            at = (1, 2) if self.heads_first else (2, 1)
            batch, heads, rows, columns = query[0], query[at[0]], query[at[1]], key[at[1]]
        else:
            return None
        causal = self._causal(call.non_tensor_args)
        pairs = batch * heads * self._pairs(call.non_tensor_args, rows, columns, causal is True)
        wide, out = query[-1], value[-1]
        each = 3 * wide + 2 * out if self.query else wide + out
        notes = [UNKNOWN_MASK_NOTE] * (causal is None) + [EQUAL_LENGTHS_NOTE] * (packed > 1)
        return CallFlops(2.0 * pairs * each, "; ".join(notes))

    def _packed(self, call: OperatorCall) -> int:
        """How many sequences lie one behind the other; 0 where each has its row."""
        sums = call.dims[self.packed] if self.packed and len(call.dims) > self.packed else []
        return sums[0] - 1 if len(sums) == 1 and sums[0] > 1 else 0

    def _causal(self, given: Sequence[object]) -> bool | None:
        """Whether there is a causal mask; None where the trace does not say."""
        if self.mask_kind:
            said = str(given[self.mask_kind]) if len(given) > self.mask_kind else ""
            return int(said) > 0 if said.isdigit() else None
        flags = [str(one) for one in given] if self.causal >= 0 else _flags(given)
        place = self.causal if self.causal >= 0 else len(flags) + self.causal
        said = flags[place] if 0 <= place < len(flags) else ""
        return said == "True" if said in ("True", "False") else None

    def _pairs(self, given: Sequence[object], rows: float, columns: float, causal: bool) -> float:
        """How many scores there are to one head."""
        back = _whole(given[self.window]) if self.window and len(given) > self.window else []
        if back and 0 <= back[0] < columns - 1:
            band = min(back[0] + 1.0, columns)
            ahead = 0.0 if causal else band - 1
            return rows * min(band + ahead, columns) - (band * band / 2 if causal else 0.0)
        if not causal:
            return rows * columns
        least = min(rows, columns)
        corner = least * least / 2
        if self.heads_first:
            return corner + max(0.0, rows - columns) * columns
        return rows * columns - rows * rows / 2 if rows <= columns else corner


def _flags(given: Sequence[object]) -> list[str]:
    return [str(one) for one in given if str(one) in ("True", "False")]


def _whole(text: object) -> list[int]:
    """`[1, 2]` or `1` as whole numbers."""
    digits = str(text).strip("[]")
    return [int(number) for number in digits.split(",")] if digits else []


LINEAR_OPERATORS = ("aten::linear", "aiter::gemm_a16w16", "vllm::rocm_unquantized_gemm")
"""Products with the transpose of their second factor."""
FLOP_FORMULAS: dict[str, FlopFormula] = {
    "aten::mm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::_scaled_mm_v2": _product(0),
    "aten::_int_mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::_addmm_activation": _product(1),
    **dict.fromkeys(LINEAR_OPERATORS, _linear),
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm_v2": _grouped,
    "aten::convolution": _convolution(3, 4, 5, 6),
    "aten::_convolution": _convolution(3, 4, 5, 6),
    "aten::cudnn_convolution": _convolution(3, 2, 4),
    "aten::miopen_convolution": _convolution(4, 3, 5),
    "aten::convolution_backward": _convolution_backward,
    # The last boolean of a forward call, or the last but one before `return_debug_mask`.
    "aten::_scaled_dot_product_flash_attention": _Attention(causal=-2, heads_first=True),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(causal=-2, heads_first=True),
    "aten::_scaled_dot_product_efficient_attention": _Attention(heads_first=True),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Attention(
        causal=-2, heads_first=True
    ),
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(1, heads_first=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(1, heads_first=True),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(1, heads_first=True),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _Attention(
        1, heads_first=True
    ),
    "aten::_flash_attention_forward": _Attention(causal=-2, packed=3, window=11),
    "aten::_flash_attention_backward": _Attention(1, packed=6, window=15),
    "aten::_efficient_attention_forward": _Attention(mask_kind=9, packed=4),
    "aten::_efficient_attention_backward": _Attention(1, mask_kind=14, packed=6),
    "flash_attn::_flash_attn_forward": _Attention(causal=5, window=6),
    "flash_attn::_flash_attn_backward": _Attention(1, causal=11, window=12),
    "flash_attn::_flash_attn_varlen_forward": _Attention(causal=9, packed=3, window=10),
    "flash_attn::_flash_attn_varlen_backward": _Attention(1, causal=15, packed=9, window=16),
    "flash_attn_3::fwd": _Attention(causal=24, packed=7, longest=5, window=25),
    "flash_attn_3::bwd": _Attention(1, causal=16, packed=9, longest=4, window=17),
}
"""Operators that are counted. Where one calls another, the inner one is."""
