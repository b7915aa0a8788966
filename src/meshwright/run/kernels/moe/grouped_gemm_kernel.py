"""The products of `grouped_gemm` as persistent Triton kernels, fed by tensor-memory copies.

Rows are sorted by group and `ends_X` holds, on the device, the row after each group's last: no
number ever travels to the host. A fixed number of programs walk over the tiles of all groups.

A group's last tile reaches into the rows of the next group. Reading them does no harm in
`grouped_gemm_kernel`, whose results for them are not stored; everywhere else the copy itself has to
stop at the group's end. It does by a descriptor whose row axis is 2³⁰ long: row r of a group that
ends at row e is given as 2³⁰ - e + r, so that rows past the end fall out of bounds (read as zeros,
not written), and two axes before it, of coordinates 2³⁰ and e, bring the address back, which wraps
around at 2⁶⁴ (the idea is that of triton.tools.ragged_tma).

Floor: 2·N·O·I operations for each product. A tile of 128×256 gets 85 operations out of each byte
it reads, so the second-level cache has to give 7.6 TB/s at 650 TFLOP/s.

Letters: N rows, X groups, O fan out, I fan in.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from meshwright.run.kernels.triton_compat import tl, triton

_ENDLESS = 2**30
"""Length of the row axis of a group; no tensor here has as many rows."""
_OUTER_AXIS = 0x7FFF0000
"""Length of the two axes that bring an address back: any that is above all coordinates."""
_WRAP = 2**34
"""2³⁰ steps of this many elements are 2⁶⁴, nothing as far as an address is concerned."""
_COPY_BYTES = 16
"""Rows have to begin at multiples of this for the tensor-memory copies."""


class GroupedGemmTiles(NamedTuple):
    """How a product is cut: a program's output tile, its step along the sum, its resources."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs_per_sm: int = 1
    """Programs that share a multiprocessor: one fetches and stores while the other multiplies."""


HALF_PRECISION_TILES = GroupedGemmTiles(128, 256, 64, warps=8, stages=3)
"""For 16-bit numbers: 144 KiB of operands under way, and 64 KiB of a tile being stored."""
SINGLE_PRECISION_TILES = GroupedGemmTiles(64, 64, 32, warps=4, stages=2)
"""For float32, which is multiplied without tensor cores: exactness is why it was chosen."""


def select_grouped_tiles(dtype: torch.dtype) -> GroupedGemmTiles:
    """Return the cut that a product of this kind of number gets."""
    return HALF_PRECISION_TILES if dtype.itemsize == 2 else SINGLE_PRECISION_TILES


def launch_forward(
    x_NI: torch.Tensor,
    weight_XOI: torch.Tensor,
    ends_X: torch.Tensor,
    bias_XO: torch.Tensor | None = None,
    tiles: GroupedGemmTiles | None = None,
) -> torch.Tensor:
    """Return y_NO: each row times its group's weights transposed, plus its group's bias."""
    return _times(x_NI, weight_XOI, ends_X, bias_XO, True, tiles)


def launch_dgrad(
    dy_NO: torch.Tensor,
    weight_XOI: torch.Tensor,
    ends_X: torch.Tensor,
    tiles: GroupedGemmTiles | None = None,
) -> torch.Tensor:
    """Return dx_NI: each row times its group's weights as they lie."""
    return _times(dy_NO, weight_XOI, ends_X, None, False, tiles)


def launch_wgrad(
    dy_NO: torch.Tensor,
    x_NI: torch.Tensor,
    ends_X: torch.Tensor,
    tiles: GroupedGemmTiles | None = None,
) -> torch.Tensor:
    """Return dw_XOI: for each group, the sum over its rows of dyᵀ · x; zeros for an empty one."""
    tiles = tiles or select_grouped_tiles(x_NI.dtype)
    (rows, fan_out), fan_in, groups = dy_NO.shape, x_NI.shape[1], ends_X.shape[0]
    if rows == 0:
        return x_NI.new_zeros(groups, fan_out, fan_in)
    dy, x = _aligned(dy_NO), _aligned(x_NI)
    out = x.new_empty(groups, fan_out, x.shape[1])
    grouped_wgrad_kernel[(_programs(x, tiles),)](
        _ragged(dy, tiles.depth, tiles.rows),
        _ragged(x, tiles.depth, tiles.columns),
        _descriptor(out, [1, tiles.rows, tiles.columns]),
        ends_X,
        groups,
        fan_out,
        fan_in,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        PRECISION=_precision(x.dtype),
        ENDLESS=_ENDLESS,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out if fan_in == x.shape[1] else out[..., :fan_in].contiguous()


def launch_bias_grad(dy_NO: torch.Tensor, ends_X: torch.Tensor) -> torch.Tensor:
    """Return db_XO: for each group, the sum of its rows."""
    fan_out, groups = dy_NO.shape[1], ends_X.shape[0]
    out = dy_NO.new_empty(groups, fan_out)
    block = 128
    grouped_bias_grad_kernel[(groups, triton.cdiv(fan_out, block))](
        dy_NO.contiguous(), out, ends_X, fan_out, ROWS=64, COLUMNS=block
    )
    return out


def _times(
    x_NK: torch.Tensor,
    weight_XOI: torch.Tensor,
    ends_X: torch.Tensor,
    bias_XO: torch.Tensor | None,
    out_first: bool,
    tiles: GroupedGemmTiles | None,
) -> torch.Tensor:
    tiles = tiles or select_grouped_tiles(x_NK.dtype)
    rows, groups = x_NK.shape[0], weight_XOI.shape[0]
    columns = weight_XOI.shape[1 if out_first else 2]
    if rows == 0:
        return x_NK.new_empty(0, columns)
    x, weight = _aligned(x_NK), _aligned(weight_XOI)
    room = _round_up(columns, x.dtype)
    y = x.new_empty(rows, room)
    across = [tiles.columns, tiles.depth] if out_first else [tiles.depth, tiles.columns]
    grouped_gemm_kernel[(_programs(x, tiles),)](
        _descriptor(x, [tiles.rows, tiles.depth]),
        _descriptor(weight, [1, *across]),
        _ragged(y, tiles.rows, tiles.columns),
        bias_XO.contiguous() if bias_XO is not None else ends_X,
        ends_X,
        groups,
        x_NK.shape[1],
        columns,
        GROUPS=triton.next_power_of_2(groups),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        OUT_FIRST=out_first,
        HAS_BIAS=bias_XO is not None,
        PRECISION=_precision(x.dtype),
        ENDLESS=_ENDLESS,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return y if room == columns else y[:, :columns].contiguous()


def _descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _ragged(rows: torch.Tensor, row_block: int, column_block: int) -> Any:
    """Describe rows whose copies stop at the end of a group; see the head of this file."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    stride = rows.stride(0)
    shape = [_OUTER_AXIS, _OUTER_AXIS, _ENDLESS, rows.shape[1]]
    strides = [_WRAP - stride, stride, stride, 1]
    return TensorDescriptor(rows, shape, strides, [1, 1, row_block, column_block])


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with rows that the copies can take; widened rows end in zeros."""
    spare = _round_up(tensor.shape[-1], tensor.dtype) - tensor.shape[-1]
    if spare:
        return functional.pad(tensor, (0, spare))
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _COPY_BYTES == 0 else tensor.clone()


def _round_up(width: int, dtype: torch.dtype) -> int:
    step = _COPY_BYTES // dtype.itemsize
    return -(-width // step) * step


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _programs(tensor: torch.Tensor, tiles: GroupedGemmTiles) -> int:
    if not tensor.is_cuda:
        return 2  # the interpreter's: enough for each to walk over several tiles
    return (
        torch.cuda.get_device_properties(tensor.device).multi_processor_count
        * tiles.programs_per_sm
    )


@triton.jit
def grouped_gemm_kernel(
    x_desc,
    w_desc,
    y_desc,
    bias,
    ends,
    groups,
    depth,
    columns,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OUT_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    ENDLESS: tl.constexpr,
):
    """Multiply each row with its group's weights, [columns, depth] of them or [depth, columns]."""
    lane = tl.arange(0, GROUPS)
    lane_end = tl.load(ends + lane, mask=lane < groups, other=0)
    lane_begin = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < groups), other=0)
    across = tl.cdiv(columns, COLUMNS)
    lane_tiles = tl.cdiv(lane_end - lane_begin, ROWS) * across
    lane_last = tl.cumsum(lane_tiles, 0)
    tiles = tl.sum(lane_tiles, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Groups whose tiles all come before this one: their number is this tile's group.
        done = (lane_last <= tile) & (lane < groups)
        group = tl.sum(done.to(tl.int32), 0)
        first = tl.max(tl.where(done, lane_last, 0), 0)
        begin = tl.max(tl.where(done, lane_end, 0), 0)
        end = tl.load(ends + group)
        row = begin + (tile - first) // across * ROWS
        column = (tile - first) % across * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, depth, DEPTH):
            x = x_desc.load([row, k])
            if OUT_FIRST:
                w = w_desc.load([group, column, k]).reshape(COLUMNS, DEPTH).T
            else:
                w = w_desc.load([group, k, column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(x, w, total, input_precision=PRECISION)
        if HAS_BIAS:
            lanes = column + tl.arange(0, COLUMNS)
            shift = tl.load(bias + group * columns + lanes, mask=lanes < columns, other=0.0)
            total += shift.to(tl.float32)[None, :]
        y = total.to(y_desc.dtype).reshape(1, 1, ROWS, COLUMNS)
        y_desc.store([ENDLESS, end, ENDLESS - end + row, column], y)


@triton.jit
def grouped_wgrad_kernel(
    dy_desc,
    x_desc,
    dw_desc,
    ends,
    groups,
    fan_out,
    fan_in,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    ENDLESS: tl.constexpr,
):
    """Sum over each group's rows: dw[g] = dy[rows of g]ᵀ · x[rows of g]."""
    across = tl.cdiv(fan_in, COLUMNS)
    per_group = tl.cdiv(fan_out, ROWS) * across
    for tile in range(tl.program_id(0), groups * per_group, tl.num_programs(0)):
        group = tile // per_group
        row = tile % per_group // across * ROWS
        column = tile % per_group % across * COLUMNS
        begin = tl.load(ends + group - 1, mask=group > 0, other=0)
        end = tl.load(ends + group)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(begin, end, DEPTH):
            at = ENDLESS - end + k
            dy = dy_desc.load([ENDLESS, end, at, row]).reshape(DEPTH, ROWS)
            x = x_desc.load([ENDLESS, end, at, column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(dy.T, x, total, input_precision=PRECISION)
        dw_desc.store([group, row, column], total.to(dw_desc.dtype).reshape(1, ROWS, COLUMNS))


@triton.jit
def grouped_bias_grad_kernel(dy, out, ends, fan_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up one group's rows, in some of their columns."""
    group = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < fan_out)[None, :]
        here = dy + row.to(tl.int64)[:, None] * fan_out + column[None, :]
        total += tl.load(here, mask=inside, other=0.0).to(tl.float32)
    summed = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(out + group * fan_out + column, summed, mask=column < fan_out)
