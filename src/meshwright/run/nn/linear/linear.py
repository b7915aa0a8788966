"""Linear layers: y = x · weightᵀ + bias, and the two products of their backward pass.

All operands are 2-D views of contiguous tensors, so no product copies one; x and the weight are
all that is kept for backward, and of a frozen weight that alone. Who computes the products
(`GemmBackend`) and whether in fp8 (`LinearMethod`, see `fp8`) is set on the layer from outside.
"""
# mypy: allow-untyped-calls

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.run.kernels.autograd import apply_autograd, get_grad_dtype
from meshwright.run.kernels.gemm.gemm import (
    TORCH_GEMM,
    GemmBackend,
    compute_wgrad_in_dtype,
    view_as_matrix,
)
from meshwright.run.kernels.weight_grad_store import compute_or_delay_wgrad, get_delayable_leaf


def attach_unused_parameter(y: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor itself."""
    same: Tensor = _Unread.apply(y, parameter)
    return same


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, parameter: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = parameter.shape, get_grad_dtype(parameter)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slope,) = grads
        return slope, torch.zeros(ctx.shape, dtype=ctx.dtype, device=slope.device)


class LinearMethod(Protocol):
    """Computes a linear layer, forward and backward, in a narrower format."""

    @property
    def name(self) -> str:
        """What a layer shows as its `recipe`."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        input_is_free: bool = False,
    ) -> torch.Tensor:
        """Return x · weightᵀ + bias.

        `input_is_free` says that x costs backward no memory, since recompute makes it anew or
        another operation keeps it: x is then what is saved, rather than a copy of it.
        """


class OverlappedLinearMethod(Protocol):
    """Computes a linear layer of which several ranks have a part each."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gemm: GemmBackend,
        /,
    ) -> torch.Tensor:
        """Return this rank's part of the result."""


class Linear(nn.Module):
    """A GEMM with a weight [fan_out, fan_in], which `weight_init` fills."""

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(fan_out, fan_in, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(fan_out, device=device, dtype=dtype))
        self.adds_bias = True
        """Of ranks that each compute a part of the sum, only one adds the bias."""
        self.gemm: GemmBackend = TORCH_GEMM
        self.linear_method: LinearMethod | None = None
        self.tp_overlap: OverlappedLinearMethod | None = None
        """Where the product is one of several ranks, done together with their exchange."""

    @property
    def recipe(self) -> str:
        """How the products are computed: in the format of the operands, or as fp8 names it."""
        return "bf16" if self.linear_method is None else self.linear_method.name

    def forward(self, x: torch.Tensor, *, input_is_free: bool = False) -> torch.Tensor:
        """Return x · weightᵀ + bias; see `LinearMethod` for what else can be said about x."""
        bias = self.bias if self.adds_bias else None
        if self.tp_overlap is not None:
            y = self.tp_overlap(x, self.weight, bias, self.gemm)
        elif self.linear_method is None:
            y = linear(x, self.weight, bias, gemm=self.gemm)
        else:
            y = self.linear_method(x, self.weight, bias, input_is_free=input_is_free)
        return y if self.adds_bias or self.bias is None else attach_unused_parameter(y, self.bias)

    def extra_repr(self) -> str:
        """Say the sizes and the recipe, as torch prints modules."""
        fan_out, fan_in = self.weight.shape
        return f"{fan_in} → {fan_out}, bias={self.bias is not None}, {self.recipe}"


def set_gemm_backend(module: nn.Module, gemm: GemmBackend) -> None:
    """Let every linear layer and output head within a module compute its products by these."""
    for each in module.modules():
        if hasattr(each, "gemm"):
            each.gemm = gemm  # type: ignore[assignment]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gemm: GemmBackend = TORCH_GEMM,
) -> torch.Tensor:
    """Return x · weightᵀ + bias over the last axis of x, in x's format.

    A weight of another format (float32 next to bfloat16 inputs) is rounded to x's on the way and
    gets its gradient in its own.
    """
    y: torch.Tensor = apply_autograd(LinearFunction, x, weight, bias, gemm)
    return y


class LinearFunction(torch.autograd.Function):
    """A linear layer's GEMMs, with the gradients of x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gemm: GemmBackend,
    ) -> torch.Tensor:
        """Return x · weightᵀ + bias."""
        # A frozen weight has no gradient, for which alone x would be kept.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.gemm, ctx.gradient_dtype = gemm, get_grad_dtype(weight)
        ctx.leaf = get_delayable_leaf(weight)
        ctx.bias_dtype = None if bias is None else get_grad_dtype(bias)
        x_NK, w_MK = view_as_matrix(x), weight.to(x.dtype)
        if bias is None:
            y_NM = gemm.forward(x_NK, w_MK)
        else:  # cuBLAS adds the bias as it writes the product
            y_NM = torch.addmm(bias.to(x.dtype), x_NK, w_MK.t())
        return y_NM.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the arguments; those that are not needed are None."""
        x, weight = ctx.saved_tensors
        dy_NM, dx, dw, db = view_as_matrix(dy), None, None, None
        if ctx.needs_input_grad[0]:
            dx = ctx.gemm.dgrad(dy_NM, weight.to(ctx.dtype)).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            x_NK, dtype, gemm = view_as_matrix(x), ctx.gradient_dtype, ctx.gemm
            dw = compute_or_delay_wgrad(
                ctx.leaf, lambda: compute_wgrad_in_dtype(dy_NM, x_NK, dtype, gemm)
            )
        if ctx.needs_input_grad[2]:
            db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None
