"""A gated linear unit and the product that reads it, without keeping what lies between them.

    y_NM = glu([gate, up]) · wᵀ_FM

A product keeps its operand for the gradient of its weight, here N·F numbers that cost little to
make again: backward of the unit reads gate and up anyway and computes the activation on its way.
So only the unit's argument is kept, and one pass between the two products of the backward pass
writes d(gate), d(up) and, once more, what the forward product read, to the same bits.

Bytes moved, the floor, beside the products' own, per element of the unit's result: forward 3
accesses as `glu`; backward 6 (gate, up and the incoming gradient read, the other three written),
where running the unit's forward kernel again would make it 8.

Letters: N rows, F the unit's width (its argument has 2F columns, gate first), M the product's.
"""

# Autograd hands over arguments by position.
# ruff: noqa: PLR0917

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.activation.glu import (
    DEFAULT_CLAMP_LIMIT,
    check_glu,
    glu_backward,
    glu_forward,
    glu_reference,
)
from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.gemm.gemm import (
    TORCH_GEMM,
    GemmBackend,
    compute_wgrad_in_dtype,
    view_as_matrix,
)
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton
from meshwright.run.kernels.weight_grad_store import compute_or_delay_wgrad, get_delayable_leaf
from meshwright.spec.model.feedforward import Activation


def glu_linear(
    gate_up: torch.Tensor,
    weight_MF: torch.Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
    gemm: GemmBackend = TORCH_GEMM,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Return glu(gate_up) · weightᵀ over the last axis, in gate_up's format.

    A weight of another format is rounded to gate_up's on the way and gets its gradient in its own,
    or in the one it was told (see `get_grad_dtype`).
    """
    check_glu(gate_up, activation, limit)
    if weight_MF.dim() != 2 or 2 * weight_MF.shape[-1] != gate_up.shape[-1]:
        what = f"shape {tuple(weight_MF.shape)} for {gate_up.shape[-1]} columns of gate and up"
        fix = f"give it shape (any, {gate_up.shape[-1] // 2})"
        raise InputError([Problem("weight", what, fix)])
    triton = should_use_triton(backend, gate_up)
    y: torch.Tensor = _GluLinear.apply(  # type: ignore[no-untyped-call]
        gate_up, weight_MF, activation, limit, gemm, triton
    )
    return y


def glu_linear_reference(
    gate_up: torch.Tensor,
    weight_MF: torch.Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """Do the same with torch operations, and keep what lies between."""
    return glu_reference(gate_up, activation, limit=limit) @ weight_MF.to(gate_up.dtype).t()


class _GluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: torch.Tensor,
        weight_MF: torch.Tensor,
        activation: Activation,
        limit: float | None,
        gemm: GemmBackend,
        triton: bool,
    ) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, weight_MF)
        ctx.activation, ctx.limit, ctx.triton = activation, limit, triton
        ctx.gemm, ctx.gradient_dtype = gemm, get_grad_dtype(weight_MF)
        ctx.leaf = get_delayable_leaf(weight_MF)
        if triton:
            gated = glu_forward(
                gate_up, activation, DEFAULT_CLAMP_LIMIT if limit is None else limit
            )
        else:
            gated = glu_reference(gate_up, activation, limit=limit)
        y_NM = gemm.forward(view_as_matrix(gated), weight_MF.to(gate_up.dtype))
        return y_NM.view(*gate_up.shape[:-1], weight_MF.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        gate_up, weight_MF = ctx.saved_tensors
        dy_NM = view_as_matrix(dy)
        dgated_NF = ctx.gemm.dgrad(dy_NM, weight_MF.to(gate_up.dtype))
        dgated = dgated_NF.view(*gate_up.shape[:-1], weight_MF.shape[1])
        wanted = ctx.needs_input_grad[1]
        if ctx.triton:
            bound = DEFAULT_CLAMP_LIMIT if ctx.limit is None else ctx.limit
            dgate_up, gated = glu_backward(gate_up, dgated, ctx.activation, bound, again=wanted)
        else:
            dgate_up, gated = _plain_ungate(gate_up, dgated, ctx.activation, ctx.limit)
        del dgated, dgated_NF
        dweight = None
        if wanted and gated is not None:
            x_NF, dtype, gemm = view_as_matrix(gated), ctx.gradient_dtype, ctx.gemm
            dweight = compute_or_delay_wgrad(
                ctx.leaf, lambda: compute_wgrad_in_dtype(dy_NM, x_NF, dtype, gemm)
            )
        return dgate_up, dweight, None, None, None, None


def _plain_ungate(
    gate_up: torch.Tensor, dgated: torch.Tensor, activation: Activation, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        argument = gate_up.detach().requires_grad_()
        gated = glu_reference(argument, activation, limit=limit)
    (dgate_up,) = torch.autograd.grad(gated, argument, dgated)
    return dgate_up, gated.detach()
