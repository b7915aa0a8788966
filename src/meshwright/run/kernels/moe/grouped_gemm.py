"""Matrix products of rows that belong to groups, each with weights of its own: experts' products.

    y[r] = weight[g] · x[r] + bias[g]     for the rows r of group g

Rows are sorted by group; `ends_X` holds the row after each group's last (int32, on the device), so
nothing waits for the host. Weights lie as [X, out, in] like those of a linear layer. All three
products then read both factors as they lie, and contiguous along the sum (forward) or along the
output (both gradients), which are the layouts that tensor cores take 16-bit numbers in.

Floor: 2·N·O·I operations each for the product, the rows' gradient and the weights' gradient.

`select_grouped_gemm_kernel` says which kernel computes a product and why: `triton`
(`grouped_gemm_kernel`), `library` (torch's own CUTLASS kernels) or `reference` (a loop over groups,
which waits for the host).

Letters: N rows, X groups (experts), O fan out, I fan in.
"""

# Autograd's own functions are untyped, and take their arguments by position.
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.moe import grouped_gemm_kernel
from meshwright.run.kernels.triton_compat import HAS_TRITON, KernelBackend
from meshwright.run.kernels.weight_grad_store import compute_or_delay_wgrad, get_delayable_leaf

GroupedGemmKind = Literal["forward", "dgrad", "wgrad"]
GroupedGemmKernel = Literal["reference", "library", "triton"]

PREFERRED_KERNELS: dict[GroupedGemmKind, GroupedGemmKernel] = {
    "forward": "triton",
    "dgrad": "triton",
    "wgrad": "triton",
}
"""Which of the two is faster on an H200 (2026-11-15, benchmarks/grouped_matmul.py; shape of
Qwen3-30B-A3B): in 14 of 15 cases Triton's, by 4 to 19 %, with 75 to 96 % of a dense product's rate
against 69 to 88 %. The other, the input gradient of gate_up for 32k tokens, is 1 % slower."""


class GroupedGemmCase(NamedTuple):
    """What decides which kernel computes a product."""

    kind: GroupedGemmKind
    dtype: torch.dtype
    groups: int
    fan_in: int
    fan_out: int
    has_bias: bool = False
    capability: tuple[int, int] | None = None
    """The GPU's; None away from one."""


class GroupedGemmChoice(NamedTuple):
    """A kernel, and why it was chosen."""

    kernel: GroupedGemmKernel
    reason: str


def select_grouped_gemm_kernel(case: GroupedGemmCase) -> GroupedGemmChoice:
    """Pick a kernel; nothing is measured here, so equal cases always compute equal bits."""
    if case.capability is None:
        return GroupedGemmChoice("reference", "no GPU")
    obstacle = _library_obstacle(case)
    if not HAS_TRITON:
        if obstacle is None and not case.has_bias:
            return GroupedGemmChoice("library", "Triton is not installed")
        return GroupedGemmChoice("reference", "Triton is not installed")
    if obstacle is not None:
        return GroupedGemmChoice("triton", f"torch's grouped_mm {obstacle}")
    if case.has_bias and case.kind == "forward":
        return GroupedGemmChoice("triton", "adds the bias without a second pass")
    if case.capability[0] != 9:
        return GroupedGemmChoice(
            "library", "made for Blackwell; Triton's kernels were not measured there"
        )
    return GroupedGemmChoice(PREFERRED_KERNELS[case.kind], "measured faster on an H200")


def _library_obstacle(case: GroupedGemmCase) -> str | None:
    """Say what keeps torch's grouped_mm from this product; it has the rules of its TMA copies."""
    if case.dtype != torch.bfloat16:
        return "takes nothing but bfloat16"
    if case.capability is None or case.capability[0] not in {9, 10}:
        return "waits for the host on GPUs other than Hopper and Blackwell"
    if case.fan_in % 8 or case.fan_out % 8:
        return "needs widths that are multiples of 8"
    if case.groups >= 1024:
        return "takes fewer than 1024 groups"
    return None


def grouped_gemm(
    x_NI: Tensor,
    weight_XOI: Tensor,
    ends_X: Tensor,
    *,
    bias_XO: Tensor | None = None,
    backend: KernelBackend = "auto",
) -> Tensor:
    """Return y_NO, differentiable; the last group ends with the last row.

    `backend="torch"` takes the loop over groups, "triton" the Triton kernels for all products.
    """
    _check(x_NI, weight_XOI, ends_X, bias_XO)
    y: Tensor = _GroupedMatmul.apply(x_NI, weight_XOI, ends_X, bias_XO, backend)
    return y


def grouped_gemm_reference(
    x_NI: Tensor, weight_XOI: Tensor, ends_X: Tensor, bias_XO: Tensor | None = None
) -> Tensor:
    """Compute the same with one torch product per group."""
    parts = []
    for group, rows in enumerate(_groups(ends_X)):
        bias = None if bias_XO is None else bias_XO[group]
        parts.append(functional.linear(x_NI[rows], weight_XOI[group], bias))
    return torch.cat(parts)


def grouped_forward(
    kernel: GroupedGemmKernel,
    x_NI: Tensor,
    weight_XOI: Tensor,
    ends_X: Tensor,
    bias_XO: Tensor | None = None,
) -> Tensor:
    """Return y_NO by a kernel of the caller's choice."""
    if kernel == "reference":
        return grouped_gemm_reference(x_NI, weight_XOI, ends_X, bias_XO)
    if kernel == "triton":
        return grouped_gemm_kernel.launch_forward(x_NI, weight_XOI, ends_X, bias_XO)
    assert bias_XO is None, "torch's grouped_mm adds no bias"
    return functional.grouped_mm(x_NI, weight_XOI.transpose(1, 2), offs=ends_X)


def grouped_dgrad(
    kernel: GroupedGemmKernel, dy_NO: Tensor, weight_XOI: Tensor, ends_X: Tensor
) -> Tensor:
    """Return dx_NI by a kernel of the caller's choice."""
    if kernel == "reference":
        parts = [dy_NO[rows] @ weight_XOI[group] for group, rows in enumerate(_groups(ends_X))]
        return torch.cat(parts)
    if kernel == "triton":
        return grouped_gemm_kernel.launch_dgrad(dy_NO, weight_XOI, ends_X)
    return functional.grouped_mm(dy_NO, weight_XOI, offs=ends_X)


def grouped_wgrad(kernel: GroupedGemmKernel, dy_NO: Tensor, x_NI: Tensor, ends_X: Tensor) -> Tensor:
    """Return dw_XOI by a kernel of the caller's choice; an empty group's part is zero."""
    if kernel == "reference":
        return torch.stack([dy_NO[rows].t() @ x_NI[rows] for rows in _groups(ends_X)])
    if kernel == "triton":
        return grouped_gemm_kernel.launch_wgrad(dy_NO, x_NI, ends_X)
    return functional.grouped_mm(dy_NO.t(), x_NI, offs=ends_X)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_XOI: Tensor,
        ends_X: Tensor,
        bias_XO: Tensor | None,
        backend: KernelBackend,
    ) -> Tensor:
        ctx.leaf = get_delayable_leaf(weight_XOI)
        x_NI, weight_XOI = x_NI.contiguous(), weight_XOI.contiguous()
        ctx.save_for_backward(x_NI, weight_XOI, ends_X)
        ctx.backend = backend
        kernel = resolve_grouped_gemm_kernel(
            "forward", backend, x_NI, weight_XOI, bias_XO is not None
        )
        return grouped_forward(kernel, x_NI, weight_XOI, ends_X, bias_XO)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_NO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        x_NI, weight_XOI, ends_X = ctx.saved_tensors
        dy_NO = dy_NO.contiguous()
        wants_dx, wants_dw, _, wants_db, _ = ctx.needs_input_grad
        dx = dw = db = None
        if wants_dx:
            kernel = resolve_grouped_gemm_kernel("dgrad", ctx.backend, x_NI, weight_XOI)
            dx = grouped_dgrad(kernel, dy_NO, weight_XOI, ends_X)
        if wants_dw:
            kernel = resolve_grouped_gemm_kernel("wgrad", ctx.backend, x_NI, weight_XOI)
            dw = compute_or_delay_wgrad(
                ctx.leaf, partial(grouped_wgrad, kernel, dy_NO, x_NI, ends_X)
            )
        if wants_db:
            db = _bias_gradient(ctx.backend, dy_NO, ends_X)
        return dx, dw, None, db, None


def resolve_grouped_gemm_kernel(
    product: GroupedGemmKind,
    backend: KernelBackend,
    x_NI: Tensor,
    weight_XOI: Tensor,
    bias: bool = False,
) -> GroupedGemmKernel:
    """Return the kernel for a product of these tensors: the one asked for, or the chosen one."""
    if backend == "triton":
        return "triton"
    if backend == "torch":
        return "reference"
    groups, fan_out, fan_in = weight_XOI.shape
    capability = torch.cuda.get_device_capability(x_NI.device) if x_NI.is_cuda else None
    return select_grouped_gemm_kernel(
        GroupedGemmCase(product, x_NI.dtype, groups, fan_in, fan_out, bias, capability)
    ).kernel


def _bias_gradient(backend: KernelBackend, dy_NO: Tensor, ends_X: Tensor) -> Tensor:
    if backend == "triton" or (backend == "auto" and HAS_TRITON and dy_NO.is_cuda):
        return grouped_gemm_kernel.launch_bias_grad(dy_NO, ends_X)
    return torch.stack([dy_NO[rows].sum(0) for rows in _groups(ends_X)])


def _groups(ends_X: Tensor) -> Iterator[slice]:
    if ends_X.is_meta:  # shapes alone: the last group has all rows
        yield from (slice(0, 0) for _ in range(len(ends_X) - 1))
        yield slice(None)
        return
    begin = 0
    for end in ends_X.tolist():
        yield slice(begin, end)
        begin = end


def _check(x_NI: Tensor, weight_XOI: Tensor, ends_X: Tensor, bias_XO: Tensor | None) -> None:
    if x_NI.ndim != 2 or weight_XOI.ndim != 3 or x_NI.shape[1] != weight_XOI.shape[2]:
        what = f"rows {tuple(x_NI.shape)} do not fit weights {tuple(weight_XOI.shape)}"
        raise InputError([Problem("x_NI", what, "give rows [N, I] and weights [X, O, I]")])
    if ends_X.shape != weight_XOI.shape[:1] or ends_X.dtype != torch.int32:
        what = f"{tuple(ends_X.shape)} of {ends_X.dtype} for {weight_XOI.shape[0]} groups"
        raise InputError([Problem("ends_X", what, "give one int32 end for each group")])
    if bias_XO is not None and bias_XO.shape != weight_XOI.shape[:2]:
        what = f"{tuple(bias_XO.shape)} for weights {tuple(weight_XOI.shape)}"
        raise InputError([Problem("bias_XO", what, f"use {tuple(weight_XOI.shape[:2])}")])
