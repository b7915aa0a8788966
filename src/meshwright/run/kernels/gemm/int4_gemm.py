"""Products with weights of four bits, in groups that share a scale: y = x · wᵀ + bias.

    w = scale · code + low,  code from 0 to 15, scale and low one for each group along a row

Two codes share a byte: in a group of G, byte i holds code i below and code i + G/2 above, so that a
program gets two runs of neighbours from one load. Codes are exact in the inputs' type; a group's
scale multiplies its float32 sum, and its `low` the sum of the inputs.

Bytes moved, the floor, for few tokens: K·M/2 of codes and 2·K·M/G numbers of scales and lows. For
many tokens the products decide; the weight is then written out once and multiplied by cuBLAS.

Letters: N tokens, K inputs, M outputs, G inputs of a group.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# Some of torch's own methods are untyped.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale; the first that divides a row is taken."""
SMALL_BATCH = 128
"""Tokens up to which codes are multiplied as they are."""
TILE_TOKENS, TILE_OUTPUTS, WARPS, STAGES = 64, 32, 4, 4
"""Largest tile of a program. Not yet tuned on a GPU."""


class Int4Matrix(NamedTuple):
    """A matrix [M, K] in four bits."""

    codes: Tensor
    """uint8 [M, K / 2]."""
    scale: Tensor
    """[M, K / G], in the type that the matrix had."""
    offset: Tensor
    """[M, K / G]: what code 0 stands for."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return 2 * self.codes.shape[1] // self.scale.shape[1]


def select_group_size(inputs: int) -> int | None:
    """Return how many inputs share a scale in a row of so many; None where no group fits."""
    return next((group for group in GROUP_SIZES if inputs % group == 0), None)


def quantize_int4(weight_MK: Tensor) -> Int4Matrix:
    """Write a matrix in four bits, each group from its least to its largest number."""
    group = select_group_size(weight_MK.shape[1])
    if group is None:
        what = f"rows of {weight_MK.shape[1]} values"
        raise InputError([Problem("weight", what, f"use a multiple of {GROUP_SIZES[-1]}")])
    exact: Tensor = weight_MK.float().unflatten(1, (-1, group))
    least, largest = exact.aminmax(dim=-1)
    # Rounded first, so that codes are the best ones for the numbers that are kept.
    low = least.to(weight_MK.dtype)
    scale = ((largest - low.float()) / 15).clamp(min=1e-10).to(weight_MK.dtype)
    codes = (exact - low.float()[..., None]) / scale.float()[..., None]
    whole = codes.round().clamp(0, 15).to(torch.uint8)
    below, above = whole[..., : group // 2], whole[..., group // 2 :]
    return Int4Matrix((below | above << 4).flatten(1).contiguous(), scale, low)


def dequantize_int4(matrix: Int4Matrix) -> Tensor:
    """Return the numbers that a matrix stands for, in its scales' type."""
    pairs = matrix.codes.unflatten(1, (-1, matrix.group_size // 2))
    codes = torch.cat((pairs & 15, pairs >> 4), -1).float()
    exact: Tensor = codes * matrix.scale.float()[..., None] + matrix.offset.float()[..., None]
    return exact.flatten(1).to(matrix.scale.dtype)


def int4_linear(
    x_NK: Tensor,
    matrix: Int4Matrix,
    bias_M: Tensor | None = None,
    *,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Return x · wᵀ + bias."""
    tokens, outputs = len(x_NK), len(matrix.codes)
    if not should_use_triton(backend, x_NK) or tokens > SMALL_BATCH or not tokens:
        return functional.linear(x_NK, dequantize_int4(matrix).to(x_NK.dtype), bias_M)
    x_NK = x_NK.contiguous()
    y_NM = x_NK.new_empty(tokens, outputs)
    rows = min(TILE_TOKENS, max(16, triton.next_power_of_2(tokens)))
    grid = (triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(tokens, rows))
    _multiply[grid](
        x_NK, matrix.codes, matrix.scale, matrix.offset, bias_M, y_NM, tokens, outputs,
        x_NK.shape[1], GROUP=matrix.group_size, ROWS=rows, COLUMNS=TILE_OUTPUTS,
        EXACT=x_NK.dtype == torch.float32, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return y_NM


@triton.jit
def _multiply(
    x,
    codes,
    scale,
    low,
    bias,
    y,
    tokens,
    outputs,
    inputs,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Multiply a tile of tokens with a tile of outputs, group by group."""
    HALF: tl.constexpr = GROUP // 2
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, HALF)
    in_rows, in_columns = row < tokens, column < outputs
    groups = inputs // GROUP
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    x_at = x + row.to(tl.int64)[:, None] * inputs + place[None, :]
    codes_at = codes + column.to(tl.int64)[:, None] * (inputs // 2) + place[None, :]
    group_at = column.to(tl.int64) * groups
    for group in range(groups):
        below = tl.load(x_at + group * GROUP, mask=in_rows[:, None], other=0.0)
        above = tl.load(x_at + group * GROUP + HALF, mask=in_rows[:, None], other=0.0)
        both = tl.load(codes_at + group * HALF, mask=in_columns[:, None], other=0)
        first = (both & 15).to(below.dtype)
        second = (both >> 4).to(below.dtype)
        part = tl.dot(below, tl.trans(first), input_precision=PRECISION)
        part = tl.dot(above, tl.trans(second), part, input_precision=PRECISION)
        sums = tl.sum(below.to(tl.float32), 1) + tl.sum(above.to(tl.float32), 1)
        grown = tl.load(scale + group_at + group, mask=in_columns, other=0.0).to(tl.float32)
        least = tl.load(low + group_at + group, mask=in_columns, other=0.0).to(tl.float32)
        total += part * grown[None, :] + sums[:, None] * least[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    y_at = y + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
