"""The kernels of root-mean-square normalisation; `rms_norm` says what they compute.

`INNER`, `outer_stride` and `inner_stride` tell how the rows of x lie; all other tensors are dense.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import torch

from meshwright.run.kernels.triton_compat import tl, triton, wait_for_inputs


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["number"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    rstd,
    number,
    outer_stride,
    inner_stride,
    eps,
    INNER: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalise a tile of rows, after adding those of `residual` where there is one."""
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < number)[:, None] & (column < D)[None, :]
    dense = row.to(tl.int64)[:, None] * D + column[None, :]
    here = _starts(row, outer_stride, inner_stride, INNER)[:, None] + column[None, :]
    value = tl.load(x + here, mask=inside, other=0.0)
    if residual is not None:
        value = value.to(tl.float32) + tl.load(residual + dense, mask=inside, other=0.0)
        # What goes on is the rounded sum, and the backward pass sees only that one.
        value = value.to(total.dtype.element_ty)
        tl.store(total + dense, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)
    tl.store(rstd + row, scale, mask=row < number)
    value *= scale[:, None]
    if weight is not None:
        value *= _factor(weight, column, D, UNIT_OFFSET)
    tl.store(normed + dense, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    x,
    dnormed,
    dtotal,
    weight,
    rstd,
    dx,
    parts,
    number,
    outer_stride,
    inner_stride,
    INNER: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Work through every so many tiles of rows; leave dx, and this program's part of d(weight).

    With `AHEAD` the rows of the next round are asked for before those of this one are worked on,
    so that the memory is never without requests.
    """
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    column = tl.arange(0, COLUMNS)
    if weight is not None:
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        if ROWS > 1:
            # Threads share the weight of short rows: once is cheaper. A wide one fills registers.
            factor = _factor(weight, column, D, UNIT_OFFSET)
    if AHEAD:
        next_x, next_dy, next_through, next_scale = _fetch(
            x, dnormed, dtotal, rstd, first, number, outer_stride, inner_stride,
            INNER, D, ROWS, COLUMNS,
        )  # fmt: skip
    for begin in range(first, number, step):
        if AHEAD:
            raw_x, raw_dy, raw_through, scale = next_x, next_dy, next_through, next_scale
            next_x, next_dy, next_through, next_scale = _fetch(
                x, dnormed, dtotal, rstd, begin + step, number, outer_stride, inner_stride,
                INNER, D, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            raw_x, raw_dy, raw_through, scale = _fetch(
                x, dnormed, dtotal, rstd, begin, number, outer_stride, inner_stride,
                INNER, D, ROWS, COLUMNS,
            )  # fmt: skip
        value = raw_x.to(tl.float32) * scale[:, None]
        gradient = raw_dy.to(tl.float32)
        if weight is not None:
            part += gradient * value
            if ROWS > 1:
                gradient *= factor
            else:
                gradient *= _factor(weight, column, D, UNIT_OFFSET)
        along = tl.sum(gradient * value, axis=1) / D
        gradient = (gradient - value * along[:, None]) * scale[:, None]
        if dtotal is not None:
            gradient += raw_through.to(tl.float32)
        row = begin + tl.arange(0, ROWS)
        inside = (row < number)[:, None] & (column < D)[None, :]
        dense = row.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(dx + dense, gradient.to(dx.dtype.element_ty), mask=inside)
    if weight is not None:
        place = parts + tl.program_id(0) * D + column
        tl.store(place, tl.sum(part, axis=0), mask=column < D)


def sum_partials_kernel(parts: torch.Tensor, dweight: torch.Tensor) -> None:
    """Add up the programs' parts of d(weight), a row each, in a fixed order."""
    programs, width = parts.shape
    # All rows of a few columns at a time: a loop would wait for the memory in every round.
    rows = min(1024, triton.next_power_of_2(programs))
    _add_parts[(-(-width // 16),)](parts, dweight, programs, D=width, ROWS=rows, num_warps=16)


@triton.jit
def _add_parts(parts, dweight, programs, D: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * 16 + tl.arange(0, 16)
    lane = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, 16), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + lane
        inside = (row < programs)[:, None] & (column < D)[None, :]
        total += tl.load(parts + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    value = tl.sum(total, axis=0).to(dweight.dtype.element_ty)
    tl.store(dweight + column, value, mask=column < D)


@triton.jit
def _starts(row, outer_stride, inner_stride, INNER: tl.constexpr):
    """Return where rows of x begin, in elements."""
    if INNER == 1:
        start = row.to(tl.int64) * outer_stride
    else:
        start = (row // INNER).to(tl.int64) * outer_stride + (row % INNER) * inner_stride
    return start


@triton.jit
def _factor(weight, column, D: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Load what normalised rows are multiplied with."""
    factor = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    return factor[None, :]


@triton.jit
def _fetch(
    x,
    dnormed,
    dtotal,
    rstd,
    begin,
    number,
    outer_stride,
    inner_stride,
    INNER: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load all that a tile of rows needs, as it lies in memory."""
    row = begin + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < number)[:, None] & (column < D)[None, :]
    dense = row.to(tl.int64)[:, None] * D + column[None, :]
    here = _starts(row, outer_stride, inner_stride, INNER)[:, None] + column[None, :]
    scale = tl.load(rstd + row, mask=row < number, other=0.0)
    value = tl.load(x + here, mask=inside, other=0.0)
    gradient = tl.load(dnormed + dense, mask=inside, other=0.0)
    if dtotal is not None:
        through = tl.load(dtotal + dense, mask=inside, other=0.0)
    else:
        through = gradient
    return value, gradient, through, scale
