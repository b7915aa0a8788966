"""`unread`: gives a parameter that a rank holds but does not use a gradient of noughts.

Of ranks that each compute a part of a sum only the first adds the bias. Gradients are reduced as
backward brings them, in an order that all ranks must share, so the others have to bring one too,
and at the same point.
"""

# Autograd's own functions are untyped.
# mypy: allow-untyped-calls

from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.gradient_format import gradient_format


def unread(y: Tensor, parameter: Tensor) -> Tensor:
    """Return the tensor itself."""
    same: Tensor = _Unread.apply(y, parameter)
    return same


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, parameter: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = parameter.shape, gradient_format(parameter)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slope,) = grads
        return slope, torch.zeros(ctx.shape, dtype=ctx.dtype, device=slope.device)
