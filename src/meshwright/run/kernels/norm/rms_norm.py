"""Root-mean-square normalisation of rows, alone or of a sum, with one kernel for each direction.

    y = x · rstd · weight,   rstd = 1 / √(mean(x²) + eps)

A row stays in registers from its load to its store; statistics are float32 and results are rounded
once. Backward, with g = dy · weight and n = x · rstd:

    dx = rstd · (g - n · mean(g · n)),   d(weight) = Σ over rows of dy · n

A fixed number of programs share the rows. Each adds up its part of d(weight) in registers, and a
second small kernel adds up the parts in a fixed order, so equal inputs give equal bits.

Bytes moved, the floor, per element of x: forward 2 accesses (x, y), of a sum 4 (x, residual, y,
total); backward 3 (x, dy, dx), of a sum 4 (total, dy, dtotal, dx). Parts of d(weight) add a few
hundred rows of float32.

Letters: D the normalised last axis; all leading ones together are rows.
"""

# Autograd hands over arguments by position.
# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.autograd import apply_autograd
from meshwright.run.kernels.norm.rms_norm_cpu import rms_norm_cpu
from meshwright.run.kernels.norm.rms_norm_kernel import (
    rms_norm_backward_kernel,
    rms_norm_kernel,
    sum_partials_kernel,
)
from meshwright.run.kernels.triton_compat import (
    KernelBackend,
    make_pdl_launch_options,
    should_use_triton,
)

MAX_WIDTH = 16384
"""A row has to fit into the registers of one program."""


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    unit_offset: bool = False,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Normalise the last axis of x, whatever the leading ones.

    Without a weight rows are only brought to length √D. `unit_offset` multiplies by 1 + weight
    (Gemma). Heads of a fused projection may be given as a strided view; they are not copied.
    """
    if not should_use_triton(backend, x):
        alone = rms_norm_cpu if x.device.type == "cpu" else rms_norm_reference
        return alone(x, weight, eps, unit_offset=unit_offset)
    _check(x, weight)
    normed: torch.Tensor = apply_autograd(_RmsNorm, x, weight, eps, unit_offset)
    return normed


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    unit_offset: bool = False,
    backend: KernelBackend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised sum of x and residual, and the sum: the residual stream goes on.

    Keeps the sum and one number per row for the backward pass, which gives one tensor as the
    gradient of both inputs.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        what = f"{tuple(residual.shape)} {residual.dtype} beside x of {tuple(x.shape)} {x.dtype}"
        raise InputError([Problem("residual", what, "give both the same shape and type")])
    if not should_use_triton(backend, x):
        total = x + residual
        return rms_norm(total, weight, eps, unit_offset=unit_offset, backend=backend), total
    _check(x, weight)
    both: tuple[torch.Tensor, torch.Tensor] = apply_autograd(
        _AddRmsNorm, x, residual, weight, eps, unit_offset
    )
    return both


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, unit_offset: bool = False
) -> torch.Tensor:
    """Do the same with torch operations."""
    exact = x.double() if x.dtype == torch.float64 else x.float()
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        factor = weight.to(exact.dtype)
        normed = normed * (factor + 1 if unit_offset else factor)
    return normed.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same with torch operations."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, unit_offset=unit_offset), total


def _check(x: torch.Tensor, weight: torch.Tensor | None) -> None:
    width = x.shape[-1]
    problems = []
    if not 1 <= width <= MAX_WIDTH:
        what = f"rows of {width} elements do not fit into a program's registers"
        problems.append(Problem("x", what, f"use at most {MAX_WIDTH}, or backend='torch'"))
    if weight is not None and tuple(weight.shape) != (width,):
        what = f"shape {tuple(weight.shape)} for rows of {width}"
        problems.append(Problem("weight", what, f"give it shape ({width},)"))
    if problems:
        raise InputError(problems)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, unit_offset: bool
    ) -> torch.Tensor:
        x, rows = _as_rows(x)
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = _forward(x, rows, None, weight, eps, unit_offset, normed, None)
        ctx.save_for_backward(x, weight, rstd)
        ctx.rows, ctx.unit_offset = rows, unit_offset
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = _backward(x, ctx.rows, grads[0], None, weight, rstd, ctx.unit_offset)
        return dx, dweight, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        unit_offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty_like(normed)
        x, rows = _as_rows(x.contiguous())
        rstd = _forward(x, rows, residual.contiguous(), weight, eps, unit_offset, normed, total)
        ctx.save_for_backward(total, weight, rstd)
        ctx.rows, ctx.unit_offset = rows, unit_offset
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, weight, rstd = ctx.saved_tensors
        dnormed, dtotal = grads
        if dnormed is None:
            return dtotal, dtotal, None, None, None
        dx, dweight = _backward(total, ctx.rows, dnormed, dtotal, weight, rstd, ctx.unit_offset)
        return dx, dx, dweight, None, None


class _Rows(NamedTuple):
    """How rows lie: r begins at (r // inner) · outer_stride + (r % inner) · inner_stride."""

    number: int
    inner: int
    outer_stride: int
    inner_stride: int


def _as_rows(x: torch.Tensor) -> tuple[torch.Tensor, _Rows]:
    """See x as rows, without a copy where two strides can say how they lie."""
    width = x.shape[-1]
    number = x.numel() // width
    if not x.is_contiguous() and x.dim() >= 3 and x.stride(-1) == 1 and _flattens(x):
        return x, _Rows(number, x.shape[-2], x.stride(-3), x.stride(-2))
    return x.contiguous(), _Rows(number, 1, width, 0)


def _flattens(x: torch.Tensor) -> bool:
    """Whether the axes before the last two can be seen as one."""
    return all(
        x.stride(axis) == x.shape[axis + 1] * x.stride(axis + 1) for axis in range(x.dim() - 3)
    )


class _Launch(NamedTuple):
    rows: int
    """Rows of a tile."""
    width: int
    """Columns of a tile: the width of a row, rounded up to a power of two."""
    warps: int


def _launch(width: int) -> _Launch:
    """Choose tiles of 16 elements per thread: two loads of 16 bytes each in bfloat16.

    Short rows share a tile. From 8192 columns on a thread takes more, for 16 warps are enough to
    keep the memory busy and more would leave each too few registers.
    """
    columns = max(16, 1 << (width - 1).bit_length())
    rows = max(1, 2048 // columns)
    return _Launch(rows, columns, min(16, max(4, rows * columns // 512)))


def _forward(
    x: torch.Tensor,
    rows: _Rows,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    normed: torch.Tensor,
    total: torch.Tensor | None,
) -> torch.Tensor:
    width = normed.shape[-1]
    shape = _launch(width)
    rstd = torch.empty(rows.number, dtype=torch.float32, device=normed.device)
    if rows.number:
        rms_norm_kernel[(-(-rows.number // shape.rows),)](
            x,
            residual,
            weight,
            normed,
            total,
            rstd,
            rows.number,
            rows.outer_stride,
            rows.inner_stride,
            eps,
            INNER=rows.inner,
            D=width,
            ROWS=shape.rows,
            COLUMNS=shape.width,
            UNIT_OFFSET=unit_offset,
            num_warps=shape.warps,
            **make_pdl_launch_options(x),
        )
    return rstd


def _backward(
    x: torch.Tensor,
    rows: _Rows,
    dnormed: torch.Tensor,
    dtotal: torch.Tensor | None,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    width = dnormed.shape[-1]
    shape = _launch(width)
    dx = torch.empty(dnormed.shape, dtype=x.dtype, device=dnormed.device)
    programs = max(1, min(_programs(dx.device, shape), -(-rows.number // shape.rows)))
    parts = dweight = None
    if weight is not None:
        parts = torch.empty(programs, width, dtype=torch.float32, device=dx.device)
        dweight = torch.empty_like(weight)
    rms_norm_backward_kernel[(programs,)](
        x,
        dnormed.contiguous(),
        None if dtotal is None else dtotal.contiguous(),
        weight,
        rstd,
        dx,
        parts,
        rows.number,
        rows.outer_stride,
        rows.inner_stride,
        INNER=rows.inner,
        D=width,
        ROWS=shape.rows,
        COLUMNS=shape.width,
        UNIT_OFFSET=unit_offset,
        AHEAD=shape.width < MAX_WIDTH,  # two rows of the widest do not fit into registers
        num_warps=shape.warps,
    )
    if parts is not None and dweight is not None:
        sum_partials_kernel(parts, dweight)
    return dx, dweight


def _programs(device: torch.device, shape: _Launch) -> int:
    """Count programs of the backward pass: 16 warps on each multiprocessor, 20 for short rows.

    A thread holds about 100 registers (its part of d(weight), one row under work and one on its
    way), so that no more than 16 to 20 warps fit. On an H200 heads of 128 reach 91 % of copy with
    20 and 87 % with 16.
    """
    if device.type != "cuda":
        return 3  # interpreted: more than one, so that parts have to be added up
    each = max(1, (20 if shape.rows > 1 else 16) // shape.warps)
    return each * int(torch.cuda.get_device_properties(device).multi_processor_count)
