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
from meshwright.run.kernels.deferred import leaf_of, now_or_late
from meshwright.run.kernels.glu import LIMIT, check, gate, plain_glu, ungate
from meshwright.run.kernels.gradient_format import gradient_format
from meshwright.run.kernels.language import Backend, on_triton
from meshwright.run.kernels.products import TORCH, Products, flat, weight_gradient
from meshwright.spec.model.feedforward import Activation


def glu_linear(
    gate_up: torch.Tensor,
    weight_MF: torch.Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
    products: Products = TORCH,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Return glu(gate_up) · weightᵀ over the last axis, in gate_up's format.

    A weight of another format is rounded to gate_up's on the way and gets its gradient in its own,
    or in the one it was told (see `gradient_format`).
    """
    check(gate_up, activation, limit)
    if weight_MF.dim() != 2 or 2 * weight_MF.shape[-1] != gate_up.shape[-1]:
        what = f"shape {tuple(weight_MF.shape)} for {gate_up.shape[-1]} columns of gate and up"
        fix = f"give it shape (any, {gate_up.shape[-1] // 2})"
        raise InputError([Problem("weight", what, fix)])
    triton = on_triton(backend, gate_up)
    y: torch.Tensor = _GluLinear.apply(  # type: ignore[no-untyped-call]
        gate_up, weight_MF, activation, limit, products, triton
    )
    return y


def plain_glu_linear(
    gate_up: torch.Tensor,
    weight_MF: torch.Tensor,
    activation: Activation,
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """Do the same with torch operations, and keep what lies between."""
    return plain_glu(gate_up, activation, limit=limit) @ weight_MF.to(gate_up.dtype).t()


class _GluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: torch.Tensor,
        weight_MF: torch.Tensor,
        activation: Activation,
        limit: float | None,
        products: Products,
        triton: bool,
    ) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, weight_MF)
        ctx.activation, ctx.limit, ctx.triton = activation, limit, triton
        ctx.products, ctx.gradient_dtype = products, gradient_format(weight_MF)
        ctx.leaf = leaf_of(weight_MF)
        if triton:
            gated = gate(gate_up, activation, LIMIT if limit is None else limit)
        else:
            gated = plain_glu(gate_up, activation, limit=limit)
        y_NM = products.forward(flat(gated), weight_MF.to(gate_up.dtype))
        return y_NM.view(*gate_up.shape[:-1], weight_MF.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        gate_up, weight_MF = ctx.saved_tensors
        dy_NM = flat(dy)
        dgated_NF = ctx.products.input_gradient(dy_NM, weight_MF.to(gate_up.dtype))
        dgated = dgated_NF.view(*gate_up.shape[:-1], weight_MF.shape[1])
        wanted = ctx.needs_input_grad[1]
        if ctx.triton:
            bound = LIMIT if ctx.limit is None else ctx.limit
            dgate_up, gated = ungate(gate_up, dgated, ctx.activation, bound, again=wanted)
        else:
            dgate_up, gated = _plain_ungate(gate_up, dgated, ctx.activation, ctx.limit)
        del dgated, dgated_NF
        dweight = None
        if wanted and gated is not None:
            x_NF, dtype, products = flat(gated), ctx.gradient_dtype, ctx.products
            dweight = now_or_late(ctx.leaf, lambda: weight_gradient(dy_NM, x_NF, dtype, products))
        return dgate_up, dweight, None, None, None, None


def _plain_ungate(
    gate_up: torch.Tensor, dgated: torch.Tensor, activation: Activation, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        argument = gate_up.detach().requires_grad_()
        gated = plain_glu(argument, activation, limit=limit)
    (dgate_up,) = torch.autograd.grad(gated, argument, dgated)
    return dgate_up, gated.detach()
