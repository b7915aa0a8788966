"""Bring tokens into the order of their experts, and add up what the experts made of them.

    permute    sorted[row[n, j]] = x[n]                  for the k experts j of token n
    unpermute  out[n] = Σ_j weights[n, j] · y[row[n, j]]

Every kernel works token by token: a program reads a token's row once and writes its k copies, or
reads k rows and writes their sum, formed in float32. Nothing is added up in memory, so that equal
inputs give equal bits, and no number travels to the host.

Bytes moved, the floor, in rows of D: dispatch N + N·k both ways; combine N·k + N forward and
N + 2·N·k backward (the sums' gradient, y, and its gradient).

Letters: N tokens, k experts per token, X experts, D width.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N815, PLR0917

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

MAX_WIDTH = 16384
"""A row has to fit into the registers of one program."""


class TokenPermutation(NamedTuple):
    """Where each token's copies lie once they are sorted by expert."""

    row_Nk: Tensor
    """int32: the sorted row of each token's copy for each of its experts."""
    ends_X: Tensor
    """int32: the sorted row after each expert's last."""


def sort_by_expert(experts_Nk: Tensor, count: int) -> TokenPermutation:
    """Sort token copies by expert, stably: within an expert they keep the order of the tokens."""
    flat = experts_Nk.reshape(-1)
    # A radix sort passes over the keys once per byte: the narrowest key is the fastest.
    key = torch.uint8 if count <= 256 else torch.int16
    keys, slots = torch.sort(flat.to(key), stable=True)
    places = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
    row = torch.empty_like(places).scatter_(0, slots, places)
    experts = torch.arange(count, dtype=torch.int32, device=flat.device).to(key)
    ends = torch.searchsorted(keys, experts, right=True, out_int32=True)
    return TokenPermutation(row.view(experts_Nk.shape), ends)


def permute(x_ND: Tensor, order: TokenPermutation, *, backend: KernelBackend = "auto") -> Tensor:
    """Return a copy of each token for each of its experts, sorted by expert."""
    if x_ND.ndim != 2 or x_ND.shape[0] != order.row_Nk.shape[0]:
        what = f"{tuple(x_ND.shape)} for an order of {order.row_Nk.shape[0]} tokens"
        raise InputError([Problem("x_ND", what, "give one row for each token")])
    if not should_use_triton(backend, x_ND):
        return permute_reference(x_ND, order)
    _check_width(x_ND)
    rows: Tensor = _Dispatch.apply(x_ND, order.row_Nk)
    return rows


def unpermute(
    y_RD: Tensor, order: TokenPermutation, weights_Nk: Tensor, *, backend: KernelBackend = "auto"
) -> Tensor:
    """Return for each token the weighted sum of its copies (R = N·k sorted rows)."""
    if not should_use_triton(backend, y_RD):
        return unpermute_reference(y_RD, order, weights_Nk)
    _check_width(y_RD)
    out: Tensor = _Combine.apply(y_RD, order.row_Nk, weights_Nk)
    return out


def permute_reference(x_ND: Tensor, order: TokenPermutation) -> Tensor:
    """Do the same with torch operations; their gradients are sums in a fixed order, too."""
    tokens, choices = order.row_Nk.shape
    copies = x_ND[:, None].expand(tokens, choices, -1).reshape(-1, x_ND.shape[1])
    return torch.empty_like(copies).index_copy(0, order.row_Nk.reshape(-1).long(), copies)


def unpermute_reference(y_RD: Tensor, order: TokenPermutation, weights_Nk: Tensor) -> Tensor:
    """Do the same with torch operations."""
    precise = torch.promote_types(y_RD.dtype, torch.float32)
    chosen_NkD = y_RD[order.row_Nk.long()].to(precise)
    return (chosen_NkD * weights_Nk.to(precise)[..., None]).sum(1).to(y_RD.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, row_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(row_Nk)
        out = x_ND.new_empty(row_Nk.numel(), x_ND.shape[1])
        launch_per_token(_copy_kernel, row_Nk, x_ND.contiguous(), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        (row_Nk,) = ctx.saved_tensors
        dx = grad_RD.new_empty(row_Nk.shape[0], grad_RD.shape[1])
        launch_per_token(_sum_kernel, row_Nk, grad_RD.contiguous(), row_Nk, dx, WEIGHTED=False)
        return dx, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, row_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        y_RD, weights_Nk = y_RD.contiguous(), weights_Nk.contiguous()
        ctx.save_for_backward(y_RD, row_Nk, weights_Nk)
        out = y_RD.new_empty(row_Nk.shape[0], y_RD.shape[1])
        launch_per_token(_sum_kernel, row_Nk, y_RD, weights_Nk, out, WEIGHTED=True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, Tensor]:
        y_RD, row_Nk, weights_Nk = ctx.saved_tensors
        dy, dweights = torch.empty_like(y_RD), torch.empty_like(weights_Nk)
        launch_per_token(
            _spread_kernel, row_Nk, grad_ND.contiguous(), y_RD, weights_Nk, dy, dweights
        )
        return dy, None, dweights


def launch_per_token(
    kernel: Any, row_Nk: Tensor, first: Tensor, *rest: Tensor, **flags: bool
) -> None:
    """Run a kernel with one program for each token, on rows as wide as the first tensor's."""
    tokens, choices = row_Nk.shape
    if not tokens:
        return
    width = first.shape[1]
    block = triton.next_power_of_2(width)
    # 16 bytes for each thread, up to the 1024 threads that a program may have.
    warps = min(max(block * first.element_size() // 512, 1), 32)
    kernel[(tokens,)](
        row_Nk, first, *rest, width, CHOICES=choices, BLOCK=block, num_warps=warps, **flags
    )


@triton.jit
def _copy_kernel(rows, x, out, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Write a token's row to each of its places."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    value = tl.load(x + token * width + lane, mask=inside)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows + token * CHOICES + choice).to(tl.int64)
        tl.store(out + row * width + lane, value, mask=inside)


@triton.jit
def _sum_kernel(
    rows,
    y,
    weights,
    out,
    width,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Add up a token's rows, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows + token * CHOICES + choice).to(tl.int64)
        value = tl.load(y + row * width + lane, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += value
    tl.store(out + token * width + lane, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _spread_kernel(
    rows, grad, y, weights, dy, dweights, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """Give each of a token's rows its share of the sum's gradient, and each weight its own."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    slope = tl.load(grad + token * width + lane, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows + token * CHOICES + choice).to(tl.int64)
        value = tl.load(y + row * width + lane, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + token * CHOICES + choice).to(tl.float32)
        tl.store(dy + row * width + lane, (slope * weight).to(dy.dtype.element_ty), mask=inside)
        dweight = tl.sum(slope * value, 0).to(dweights.dtype.element_ty)
        tl.store(dweights + token * CHOICES + choice, dweight)


def _check_width(rows: Tensor) -> None:
    if rows.shape[1] > MAX_WIDTH:
        what = f"rows of {rows.shape[1]} values"
        raise InputError([Problem("rows", what, f"use at most {MAX_WIDTH}, or backend='torch'")])
