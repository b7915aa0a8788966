"""The experts' last product and the weighted sum of what it gives, without keeping the product.

    y[r] = down[g] · act[r]                        for the rows r of expert g
    out[n] = Σ_j weights[n, j] · y[row[n, j]]

A weight's gradient is the product of out's gradient with y. Formed as (downᵀ · d(out)) · act it
needs what backward has anyway, so y, k rows as wide as the model for each token, is not kept. With
g[r] = d(out) of r's token and t[r] = down[g]ᵀ · g[r]:

    d(weight of r) = t[r] · act[r],   d(act)[r] = weight · t[r],
    d(down) = Σ_r g[r] ⊗ (weight · act[r])

Bytes moved, the floor, beside the products' own: forward as `unpermute`; backward N·D + N·k·D for g
and 4·N·k·F for what lies between the products (t and act read, d(act) and weight · act written).

Letters: N tokens, k experts per token, R = N·k sorted rows, X experts, D width, F inner width.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.run.kernels.moe.grouped_gemm import (
    grouped_dgrad,
    grouped_forward,
    grouped_gemm,
    grouped_gemm_reference,
    grouped_wgrad,
    resolve_grouped_gemm_kernel,
)
from meshwright.run.kernels.moe.token_permutation import (
    TokenPermutation,
    launch_per_token,
    permute,
    unpermute,
    unpermute_reference,
)
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton
from meshwright.run.kernels.weight_grad_store import compute_or_delay_wgrad, get_delayable_leaf


def grouped_down_proj_combine(
    act_RF: Tensor,
    down_XDF: Tensor,
    order: TokenPermutation,
    weights_Nk: Tensor,
    *,
    bias_XD: Tensor | None = None,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Return out_ND, differentiable; with a bias the product is kept after all."""
    if not should_use_triton(backend, act_RF):
        y_RD = grouped_gemm(act_RF, down_XDF, order.ends_X, bias_XO=bias_XD, backend="torch")
        return unpermute_reference(y_RD, order, weights_Nk)
    if bias_XD is not None:
        y_RD = grouped_gemm(act_RF, down_XDF, order.ends_X, bias_XO=bias_XD, backend=backend)
        return unpermute(y_RD, order, weights_Nk, backend=backend)
    out: Tensor = _ExpertOutput.apply(act_RF, down_XDF, *order, weights_Nk, backend)
    return out


def grouped_down_proj_combine_reference(
    act_RF: Tensor,
    down_XDF: Tensor,
    order: TokenPermutation,
    weights_Nk: Tensor,
    *,
    bias_XD: Tensor | None = None,
) -> Tensor:
    """Compute the same with torch operations."""
    y_RD = grouped_gemm_reference(act_RF, down_XDF, order.ends_X, bias_XD)
    return unpermute_reference(y_RD, order, weights_Nk)


class _ExpertOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        act_RF: Tensor,
        down_XDF: Tensor,
        row_Nk: Tensor,
        ends_X: Tensor,
        weights_Nk: Tensor,
        backend: KernelBackend,
    ) -> Tensor:
        act_RF, weights_Nk = act_RF.contiguous(), weights_Nk.contiguous()
        ctx.save_for_backward(act_RF, down_XDF, row_Nk, ends_X, weights_Nk)
        ctx.backend, ctx.leaf = backend, get_delayable_leaf(down_XDF)
        kernel = resolve_grouped_gemm_kernel("forward", backend, act_RF, down_XDF)
        y_RD = grouped_forward(kernel, act_RF, down_XDF, ends_X)
        return unpermute(y_RD, TokenPermutation(row_Nk, ends_X), weights_Nk, backend="triton")

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout_ND: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, Tensor, None]:
        act_RF, down_XDF, row_Nk, ends_X, weights_Nk = ctx.saved_tensors
        g_RD = permute(dout_ND, TokenPermutation(row_Nk, ends_X), backend="triton")
        kernel = resolve_grouped_gemm_kernel("dgrad", ctx.backend, act_RF, down_XDF)
        t_RF = grouped_dgrad(kernel, g_RD, down_XDF, ends_X)
        weighted_RF, dweights_Nk = torch.empty_like(act_RF), torch.empty_like(weights_Nk)
        launch_per_token(_weigh_kernel, row_Nk, t_RF, act_RF, weights_Nk, weighted_RF, dweights_Nk)
        ddown = None
        if ctx.needs_input_grad[1]:
            kernel = resolve_grouped_gemm_kernel("wgrad", ctx.backend, act_RF, down_XDF)
            late = partial(grouped_wgrad, kernel, g_RD, weighted_RF, ends_X)
            ddown = compute_or_delay_wgrad(ctx.leaf, late)
        return t_RF, ddown, None, None, dweights_Nk, None


@triton.jit
def _weigh_kernel(
    rows, t, act, weights, weighted, dweights, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """Finish a token's rows between the two products; t becomes the gradient of act in place."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    for choice in tl.static_range(CHOICES):
        here = tl.load(rows + token * CHOICES + choice).to(tl.int64) * width + lane
        slope = tl.load(t + here, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(act + here, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + token * CHOICES + choice).to(tl.float32)
        tl.store(t + here, (weight * slope).to(t.dtype.element_ty), mask=inside)
        tl.store(weighted + here, (weight * value).to(weighted.dtype.element_ty), mask=inside)
        dweight = tl.sum(slope * value, 0).to(dweights.dtype.element_ty)
        tl.store(dweights + token * CHOICES + choice, dweight)
