"""The Triton kernels that write matrices in fp8, and how they are launched.

Whoever calls them allocates what they fill in; `quantize_fp8` does, and says what it all means.
`amax` is the largest magnitude, `scale` what fp8 numbers are multiplied with to get back.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import math

import torch

from meshwright.run.kernels.language import tl, triton

SIDE = 128
"""Side of a tile that is also written transposed: one cache line of fp8 both ways."""
TILE_WARPS = 8
AMAX_BLOCK = 16384
AMAX_PROGRAMS = 1024
STRIP_COLUMNS = 256
STRIP_ROWS = 512
STRIP_STEP = 32
LONGEST_ROW = 65536
"""Elements of a row that one program can hold in registers."""
LEAST_AMAX = 2.0**-100
"""Stands for smaller magnitudes, zero included: with it no scale is zero and no factor infinite."""
_LEAST = tl.constexpr(LEAST_AMAX)
_SIDE = tl.constexpr(SIDE)


def find_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise `amax`, one float32, to the largest magnitude in `x`."""
    count = x.numel()
    programs = min(AMAX_PROGRAMS, triton.cdiv(count, AMAX_BLOCK))
    _find_amax[(programs,)](x, amax.view(torch.int32), count, BLOCK=AMAX_BLOCK, num_warps=8)


def find_amax_of_lines(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Raise `rows` and `columns` to the largest magnitudes of each row and column of `x`."""
    height, width = x.shape
    grid = (triton.cdiv(width, STRIP_COLUMNS), triton.cdiv(height, STRIP_ROWS))
    _find_amax_of_lines[grid](
        x,
        rows.view(torch.int32),
        columns.view(torch.int32),
        height,
        width,
        ROWS=STRIP_ROWS,
        STEP=STRIP_STEP,
        COLUMNS=STRIP_COLUMNS,
        num_warps=8,
    )


def cast(
    x: torch.Tensor,
    amax: tuple[torch.Tensor, torch.Tensor],
    data: torch.Tensor,
    scale: torch.Tensor,
    turned: torch.Tensor | None,
    turned_scale: torch.Tensor | None,
    *,
    by_line: bool,
    largest: float,
    power_of_two: bool,
) -> None:
    """Write `x` and, where asked, its transpose; `amax` is that of all (twice), or by line."""
    height, width = x.shape
    _cast[(triton.cdiv(height, SIDE) * triton.cdiv(width, SIDE),)](
        x,
        *amax,
        data,
        scale,
        data if turned is None else turned,
        scale if turned_scale is None else turned_scale,
        height,
        width,
        BY_LINE=by_line,
        TURN=turned is not None,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        num_warps=TILE_WARPS,
    )


def cast_rows(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, *, largest: float, power_of_two: bool
) -> None:
    """Write `x` with a scale for each row, reading it once."""
    height, width = x.shape
    block = max(128, 1 << math.ceil(math.log2(width)))
    _cast_row[(height,)](
        x,
        data,
        scale,
        width,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        BLOCK=block,
        num_warps=max(1, min(32, block // 512)),
    )


def cast_blocks(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    turned: torch.Tensor | None,
    turned_scale: torch.Tensor | None,
    *,
    square: bool,
    largest: float,
    power_of_two: bool,
) -> None:
    """Write `x` with a scale for each 1×128 (along what is contiguous) or 128×128 elements."""
    height, width = x.shape
    other = scale if turned_scale is None else turned_scale
    _cast_block[(triton.cdiv(height, SIDE) * triton.cdiv(width, SIDE),)](
        x,
        data,
        scale,
        data if turned is None else turned,
        other,
        height,
        width,
        # A row of scales holds those of one block (1×128), or of one block row (128×128).
        scale.stride(1),
        other.stride(1),
        SQUARE=square,
        TURN=turned is not None,
        LARGEST=largest,
        POWER_OF_TWO=power_of_two,
        num_warps=TILE_WARPS,
    )


@triton.jit
def _scale_for(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the scale that takes the format's largest number to `amax`, or the next power of 2."""
    scale = tl.maximum(amax, _LEAST) * (1.0 / LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _narrow(value, scale, LARGEST: tl.constexpr):
    """Divide by the scale and saturate; NaN stays NaN."""
    value = value.to(tl.float32) * (1.0 / scale)
    return tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _raise(pointer, magnitude, mask):
    """Take maxima in memory: non-negative floats are ordered as their bits are, in any order."""
    tl.atomic_max(pointer, magnitude.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def _find_amax(x, amax, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        inside = lane < count - start
        most = tl.maximum(
            most, tl.abs(tl.load(x + start + lane, mask=inside, other=0).to(tl.float32))
        )
    _raise(amax, tl.max(most, axis=0), None)


@triton.jit
def _find_amax_of_lines(
    x,
    row_amax,
    column_amax,
    height,
    width,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Go down a strip of columns: their maxima stay in registers, those of rows leave each step."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROWS
    most = tl.zeros((STEP, COLUMNS), tl.float32)
    for start in range(first, tl.minimum(first + ROWS, height), STEP):
        row = start + tl.arange(0, STEP)
        inside = (row < height)[:, None] & (column < width)[None, :]
        here = x + row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.abs(tl.load(here, mask=inside, other=0).to(tl.float32))
        _raise(row_amax + row, tl.max(value, axis=1), row < height)
        most = tl.maximum(most, value)
    _raise(column_amax + column, tl.max(most, axis=0), column < width)


@triton.jit
def _tile(height, width):
    """Return where this program's tile is, its rows and columns, and which of them exist."""
    down = tl.program_id(0) // tl.cdiv(width, _SIDE)
    across = tl.program_id(0) % tl.cdiv(width, _SIDE)
    row = down * _SIDE + tl.arange(0, _SIDE)
    column = across * _SIDE + tl.arange(0, _SIDE)
    return down, across, row, column, (row < height)[:, None] & (column < width)[None, :]


@triton.jit
def _cast(
    x,
    row_amax,
    column_amax,
    data,
    scale,
    turned,
    turned_scale,
    height,
    width,
    BY_LINE: tl.constexpr,
    TURN: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write one tile, and once more transposed, from one read."""
    down, across, row, column, inside = _tile(height, width)
    far = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + far, mask=inside, other=0)
    if BY_LINE:
        row_scale = _scale_for(
            tl.load(row_amax + row, mask=row < height, other=0.0), LARGEST, POWER_OF_TWO
        )
        if across == 0:
            tl.store(scale + row, row_scale, mask=row < height)
        narrow = _narrow(value, row_scale[:, None], LARGEST)
    else:
        one_scale = _scale_for(tl.load(row_amax), LARGEST, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            tl.store(scale, one_scale)
        narrow = _narrow(value, one_scale, LARGEST)
    tl.store(data + far, narrow.to(data.dtype.element_ty), mask=inside)
    if TURN:
        # Transposed before it is narrowed: shared memory turns 16-bit numbers as it loads them
        # (ldmatrix), while bytes would be fetched one by one.
        if BY_LINE:
            column_scale = _scale_for(
                tl.load(column_amax + column, mask=column < width, other=0.0), LARGEST, POWER_OF_TWO
            )
            if down == 0:
                tl.store(turned_scale + column, column_scale, mask=column < width)
            narrow = _narrow(tl.trans(value), column_scale[:, None], LARGEST)
        else:
            narrow = _narrow(tl.trans(value), one_scale, LARGEST)
        there = turned + column.to(tl.int64)[:, None] * height + row[None, :]
        tl.store(there, narrow.to(turned.dtype.element_ty), mask=tl.trans(inside))


@triton.jit
def _cast_row(
    x, data, scale, width, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr
):
    """Hold a row in registers, find its scale and write it."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    far = row.to(tl.int64) * width + column
    value = tl.load(x + far, mask=column < width, other=0).to(tl.float32)
    row_scale = _scale_for(tl.max(tl.abs(value), axis=0), LARGEST, POWER_OF_TWO)
    tl.store(scale + row, row_scale)
    narrow = _narrow(value, row_scale, LARGEST)
    tl.store(data + far, narrow.to(data.dtype.element_ty), mask=column < width)


@triton.jit
def _cast_block(
    x,
    data,
    scale,
    turned,
    turned_scale,
    height,
    width,
    scale_stride,
    turned_stride,
    SQUARE: tl.constexpr,
    TURN: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write one tile with its own scale, or with one for each line of it, in both directions."""
    down, across, row, column, inside = _tile(height, width)
    far = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + far, mask=inside, other=0)
    magnitude = tl.abs(value.to(tl.float32))
    if SQUARE:
        one_scale = _scale_for(tl.max(magnitude), LARGEST, POWER_OF_TWO)
        tl.store(scale + down * scale_stride + across, one_scale)
        narrow = _narrow(value, one_scale, LARGEST)
    else:
        row_scale = _scale_for(tl.max(magnitude, axis=1), LARGEST, POWER_OF_TWO)
        tl.store(scale + across * scale_stride + row, row_scale, mask=row < height)
        narrow = _narrow(value, row_scale[:, None], LARGEST)
    tl.store(data + far, narrow.to(data.dtype.element_ty), mask=inside)
    if TURN:
        if SQUARE:
            tl.store(turned_scale + across * turned_stride + down, one_scale)
            narrow = _narrow(tl.trans(value), one_scale, LARGEST)
        else:
            column_scale = _scale_for(tl.max(magnitude, axis=0), LARGEST, POWER_OF_TWO)
            here = turned_scale + down * turned_stride + column
            tl.store(here, column_scale, mask=column < width)
            # Read back in the order of the transposed tile: with scales at hand in the order of
            # the first, Triton would narrow in that order and transpose bytes.
            tl.debug_barrier()
            column_scale = tl.load(here, mask=column < width, other=1.0)
            narrow = _narrow(tl.trans(value), column_scale[:, None], LARGEST)
        there = turned + column.to(tl.int64)[:, None] * height + row[None, :]
        tl.store(there, narrow.to(turned.dtype.element_ty), mask=tl.trans(inside))
