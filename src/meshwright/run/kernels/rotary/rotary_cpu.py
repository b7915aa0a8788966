"""Rotary position embedding on the CPU, with explicit backward passes."""
# mypy: allow-untyped-calls
# ruff: noqa: PLR0917

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply_rotary_cpu(x_BTHE: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Return what `apply_rotary_reference` does."""
    turned: Tensor = _Rotate.apply(x_BTHE, cos, sin, interleaved)
    return turned


def split_qkv_apply_rotary_cpu(
    qkv_BTC: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `split_qkv_apply_rotary_reference` does: q, k and v lie in one new tensor."""
    width = qkv_BTC.shape[-1] // (heads + 2 * kv_heads)
    three: tuple[Tensor, Tensor, Tensor] = _SplitRotate.apply(
        qkv_BTC, (heads, kv_heads, kv_heads), width, cos, sin, interleaved
    )
    return three


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved, torch.empty_like(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(dy, cos, -sin, ctx.interleaved, torch.empty_like(dy)), None, None, None


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTC: Tensor,
        parts: tuple[int, int, int],
        width: int,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.parts, ctx.interleaved = parts, interleaved
        every = qkv_BTC.reshape(*qkv_BTC.shape[:-1], -1, width)
        out = every.new_empty(every.shape)
        turning = parts[0] + parts[1]
        _turned(every[..., :turning, :], cos, sin, interleaved, out[..., :turning, :])
        out[..., turning:, :] = every[..., turning:, :]
        three: tuple[Tensor, ...] = out.split(parts, -2)
        return three

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        shape = grads[0].shape
        whole = grads[0].new_empty(*shape[:-2], sum(ctx.parts), shape[-1])
        dq, dk, dv = whole.split(ctx.parts, -2)
        _turned(grads[0], cos, -sin, ctx.interleaved, dq)
        _turned(grads[1], cos, -sin, ctx.interleaved, dk)
        dv.copy_(grads[2])
        return whole.flatten(-2), None, None, None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor) -> Tensor:
    """Write x with its pairs turned into `out`, which may not be x, and return it."""
    kind = torch.promote_types(x.dtype, torch.float32)
    # A length-1 axis for the heads.
    cos, sin = (each.to(kind).unsqueeze(-2) for each in (cos, sin))
    half = cos.shape[-1]
    exact, into = x, out
    if x.dtype != kind:
        exact, into = x.to(kind), torch.empty(x.shape, dtype=kind)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    one, two = exact[..., first], exact[..., second]
    torch.mul(one, cos, out=into[..., first]).addcmul_(two, sin, value=-1)
    torch.mul(two, cos, out=into[..., second]).addcmul_(one, sin)
    if 2 * half < x.shape[-1]:
        into[..., 2 * half :] = exact[..., 2 * half :]
    return out if into is out else out.copy_(into)
