"""Linear layers: y = x · weightᵀ + bias, and the two products of their backward pass.

All operands are 2-D views of contiguous tensors, so no product copies one; x and the weight are
all that is kept for backward, and of a frozen weight that alone. Who computes the products
(`Products`) and whether in fp8 (`LowPrecision`, see `fp8`) is set on the layer from outside.
"""

from typing import Any, Protocol

import torch
from torch import nn

from meshwright.run.kernels.deferred import leaf_of, now_or_late
from meshwright.run.kernels.gradient_format import gradient_format
from meshwright.run.kernels.products import TORCH, Products, flat, weight_gradient
from meshwright.run.kernels.recorded import recorded
from meshwright.run.nn.unread import unread


class LowPrecision(Protocol):
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
        input_at_hand: bool = False,
    ) -> torch.Tensor:
        """Return x · weightᵀ + bias.

        `input_at_hand` says that x costs backward no memory, since recompute makes it anew or
        another operation keeps it: x is then what is saved, rather than a copy of it.
        """


class AcrossRanks(Protocol):
    """Computes a linear layer of which several ranks have a part each."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        products: Products,
        /,
    ) -> torch.Tensor:
        """Return this rank's part of the result."""


class Linear(nn.Module):
    """A product with a weight [fan_out, fan_in], which is drawn elsewhere (see `initialise`)."""

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
        self.products: Products = TORCH
        self.low_precision: LowPrecision | None = None
        self.across: AcrossRanks | None = None
        """Where the product is one of several ranks, done together with their exchange."""

    @property
    def recipe(self) -> str:
        """How the products are computed: in the format of the operands, or as fp8 names it."""
        return "bf16" if self.low_precision is None else self.low_precision.name

    def forward(self, x: torch.Tensor, *, input_at_hand: bool = False) -> torch.Tensor:
        """Return x · weightᵀ + bias; see `LowPrecision` for what else can be said about x."""
        bias = self.bias if self.adds_bias else None
        if self.across is not None:
            y = self.across(x, self.weight, bias, self.products)
        elif self.low_precision is None:
            y = linear(x, self.weight, bias, products=self.products)
        else:
            y = self.low_precision(x, self.weight, bias, input_at_hand=input_at_hand)
        return y if self.adds_bias or self.bias is None else unread(y, self.bias)

    def extra_repr(self) -> str:
        """Say the sizes and the recipe, as torch prints modules."""
        fan_out, fan_in = self.weight.shape
        return f"{fan_in} → {fan_out}, bias={self.bias is not None}, {self.recipe}"


def use_products(module: nn.Module, products: Products) -> None:
    """Let every linear layer and output head within a module compute its products by these."""
    for each in module.modules():
        if hasattr(each, "products"):
            each.products = products  # type: ignore[assignment]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    products: Products = TORCH,
) -> torch.Tensor:
    """Return x · weightᵀ + bias over the last axis of x, in x's format.

    A weight of another format (float32 next to bfloat16 inputs) is rounded to x's on the way and
    gets its gradient in its own.
    """
    y: torch.Tensor = recorded(_Linear, x, weight, bias, products)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        products: Products,
    ) -> torch.Tensor:
        # A frozen weight has no gradient, for which alone x would be kept.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.products, ctx.gradient_dtype = products, gradient_format(weight)
        ctx.leaf = leaf_of(weight)
        ctx.bias_dtype = None if bias is None else gradient_format(bias)
        x_NK, w_MK = flat(x), weight.to(x.dtype)
        if bias is None:
            y_NM = products.forward(x_NK, w_MK)
        else:  # cuBLAS adds the bias as it writes the product
            y_NM = torch.addmm(bias.to(x.dtype), x_NK, w_MK.t())
        return y_NM.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy_NM, dx, dw, db = flat(dy), None, None, None
        if ctx.needs_input_grad[0]:
            dx = ctx.products.input_gradient(dy_NM, weight.to(ctx.dtype)).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            x_NK, dtype, products = flat(x), ctx.gradient_dtype, ctx.products
            dw = now_or_late(ctx.leaf, lambda: weight_gradient(dy_NM, x_NK, dtype, products))
        if ctx.needs_input_grad[2]:
            db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None
