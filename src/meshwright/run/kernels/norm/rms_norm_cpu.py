"""RMS norm and rotary embedding for a processor, with backward passes written out.

Autograd's own way through `rms_norm_reference` and `apply_rotary_reference` reads and writes every
tensor a dozen times; a small model's step spends as long in them as in its products. Here each does
what the formula needs, mostly in place, in float32 (float64 for float64) with one rounding at the
end.

    y = x · r · w,  r = 1/√(mean x² + eps)
    dx = r · (dy · w − x · r²/D · Σ (dy · w · x)),  dw = Σ_rows dy · x · r

A rotation's gradient is the rotation back: the same with −sin.

Passes over rows of D: norm forward 4, backward 6; rotation 2 either way.
"""
# mypy: allow-untyped-calls

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm_cpu(x: Tensor, weight: Tensor | None, eps: float, *, unit_offset: bool) -> Tensor:
    """Return what `rms_norm_reference` does."""
    normed: Tensor = _Norm.apply(x, weight, eps, unit_offset)
    return normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
    ) -> Tensor:
        exact, factor = _exact(x), _factor(x, weight, unit_offset)
        rstd = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.unit_offset = unit_offset
        normed = exact * rstd
        if factor is not None:
            normed *= factor
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        factor, width = _factor(x, weight, ctx.unit_offset), x.shape[-1]
        rows, slopes = _exact(x).reshape(-1, width), _exact(dy).reshape(-1, width)
        rstd = rstd.reshape(-1, 1)
        both = slopes * rows
        dweight = None
        if factor is None:
            along, dx = both.sum(-1, keepdim=True), slopes.clone()
        else:
            along, dx = both @ factor[:, None], slopes * factor
            if ctx.needs_input_grad[1]:
                dweight = (rstd.t() @ both).view(width).to(weight.dtype)
        dx.addcmul_(rows, along.mul_(rstd.square()).div_(width), value=-1).mul_(rstd)
        return dx.view(x.shape).to(x.dtype), dweight, None, None


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _factor(x: Tensor, weight: Tensor | None, unit_offset: bool) -> Tensor | None:
    if weight is None:
        return None
    factor = weight.to(torch.promote_types(x.dtype, torch.float32))
    return factor + 1 if unit_offset else factor
