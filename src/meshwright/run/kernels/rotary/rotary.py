"""Rotary positions: pairs of each head's elements turned by angles that grow with the position.

    one' = one · cos - two · sin,   two' = two · cos + one · sin

Pairs are (i, i + R/2) of the first R elements of a head, or neighbours with `interleaved`; elements
from R on stay as they are. The gradient is turned back by the same angles.

    apply_rotary            of one tensor, into a new one
    split_qkv_apply_rotary  of a fused projection's queries and keys, in place, handed on as q, k
                            and v; backward fuses their gradients in the same pass

Bytes moved, the floor: every element that turns is read and written once, also in place. Backward
of `split_qkv_apply_rotary` reads dq, dk, dv once and writes d(qkv) once, where separate operations
would take two more passes to put it together. Cosines and sines are small and come from a cache.

Letters: B batch, T positions, H query heads, K key/value heads, E elements of a head, R of them
rotated, C = (H + 2K)·E the width of a fused projection (all q, then all k, then all v).
"""

# Autograd hands over arguments by position; so do calls that name a projection's sizes.
# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.autograd import apply_autograd
from meshwright.run.kernels.rotary.rotary_cpu import apply_rotary_cpu, split_qkv_apply_rotary_cpu
from meshwright.run.kernels.rotary.rotary_kernel import launch_rotary
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton

QKVTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def apply_rotary(
    x_BTHE: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: KernelBackend = "auto",
) -> torch.Tensor:
    """Rotate the first 2·cos.shape[-1] elements of every head.

    cos and sin have shape (T, R/2), or (B, T, R/2) where sequences differ; they get no gradient.
    x may be a strided view; the result is dense.
    """
    _check_angles(x_BTHE.shape[:2], x_BTHE.shape[-1], cos, sin)
    if not should_use_triton(backend, x_BTHE):
        alone = apply_rotary_cpu if x_BTHE.device.type == "cpu" else apply_rotary_reference
        return alone(x_BTHE, cos, sin, interleaved=interleaved)
    turned: torch.Tensor = apply_autograd(_Rotate, x_BTHE, cos, sin, interleaved)
    return turned


def split_qkv_apply_rotary(
    qkv_BTC: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: KernelBackend = "auto",
) -> QKVTensors:
    """Return q (B,T,H,E), k and v (B,T,K,E) of a fused projection, q and k rotated.

    With Triton q, k and v lie in the memory of qkv, rotated in place; only a leaf that asks for a
    gradient is copied first. qkv counts as modified: autograd refuses to go back through an
    operation that had kept its value. q, k and v are one operation's results and have no history
    as views, so nobody may write into them where gradients are needed. Backward accepts gradients
    with any strides and writes d(qkv), contiguous, in one pass.
    """
    sizes = QKVSizes(heads, kv_heads, head_dim)
    check_qkv(qkv_BTC, sizes, cos, sin)
    if not should_use_triton(backend, qkv_BTC):
        if qkv_BTC.device.type == "cpu":
            return split_qkv_apply_rotary_cpu(
                qkv_BTC, heads, kv_heads, cos, sin, interleaved=interleaved
            )
        return split_qkv_apply_rotary_reference(
            qkv_BTC, heads, kv_heads, head_dim, cos, sin, interleaved
        )
    three: QKVTensors = apply_autograd(_SplitRotate, qkv_BTC, sizes, cos, sin, interleaved)
    return three


def apply_rotary_reference(
    x_BTHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Do the same with torch operations."""
    half = cos.shape[-1]
    exact = x_BTHE.double() if x_BTHE.dtype == torch.float64 else x_BTHE.float()
    # A length-1 axis for the heads.
    cos, sin = (each.to(exact.dtype).unsqueeze(-2) for each in (cos, sin))
    turning, rest = exact[..., : 2 * half], exact[..., 2 * half :]
    if interleaved:
        one, two = turning[..., 0::2], turning[..., 1::2]
    else:
        one, two = turning[..., :half], turning[..., half:]
    pair = one * cos - two * sin, two * cos + one * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1).to(x_BTHE.dtype)


def split_qkv_apply_rotary_reference(
    qkv_BTC: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> QKVTensors:
    """Do the same with torch operations, out of place."""
    q, k, v = QKVSizes(heads, kv_heads, head_dim).split(qkv_BTC)
    return (
        apply_rotary_reference(q, cos, sin, interleaved=interleaved),
        apply_rotary_reference(k, cos, sin, interleaved=interleaved),
        v,
    )


class QKVSizes(NamedTuple):
    """How a fused projection is divided."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Columns of the projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def split(self, qkv_BTC: torch.Tensor) -> QKVTensors:
        """See q, k and v in it."""
        every = qkv_BTC.view(*qkv_BTC.shape[:-1], -1, self.head_dim)
        keys, values = self.heads, self.heads + self.kv_heads
        return every[..., :keys, :], every[..., keys:values, :], every[..., values:, :]


def _check_angles(shape: torch.Size, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    problems = []
    if cos.shape != sin.shape:
        what = f"shape {tuple(sin.shape)} beside cos of {tuple(cos.shape)}"
        problems.append(Problem("sin", what, "give both the same shape"))
    wanted = (shape[1], half), (shape[0], shape[1], half)
    if tuple(cos.shape) not in wanted:
        what = f"shape {tuple(cos.shape)} for {shape[0]} sequences of {shape[1]} positions"
        problems.append(Problem("cos", what, f"give it shape {wanted[0]} or {wanted[1]}"))
    if 2 * half > head_dim:
        what = f"{half} pairs do not fit into heads of {head_dim} elements"
        problems.append(Problem("cos", what, f"use at most {head_dim // 2} angles per position"))
    if problems:
        raise InputError(problems)


def check_qkv(qkv_BTC: torch.Tensor, sizes: QKVSizes, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Refuse a projection that is not as wide as its heads, or angles that do not fit it."""
    if qkv_BTC.dim() != 3 or qkv_BTC.shape[-1] != sizes.width:
        what = (
            f"shape {tuple(qkv_BTC.shape)} for {sizes.heads} query and {sizes.kv_heads} key/value "
            f"heads of {sizes.head_dim} elements"
        )
        fix = f"give it shape (batch, positions, {sizes.width})"
        raise InputError([Problem("qkv", what, fix)])
    _check_angles(qkv_BTC.shape[:2], sizes.head_dim, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x_BTHE, cos, sin, interleaved, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        dx = _rotated(grads[0], cos, sin, ctx.interleaved, backward=True)
        return dx, None, None, None


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTC: torch.Tensor,
        sizes: QKVSizes,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
    ) -> QKVTensors:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if (qkv_BTC.is_leaf and qkv_BTC.requires_grad) or not qkv_BTC.is_contiguous():
            room = qkv_BTC.detach().clone(memory_format=torch.contiguous_format)
        else:
            # A detached alias: results must not be taken for views of the argument. It shares the
            # argument's version, which is how autograd learns that the value has changed.
            room = qkv_BTC.detach()
            increment_version(room)
        _rotate_in_place(room, sizes, cos, sin, interleaved)
        return sizes.split(room)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _fused_gradient(grads, cos, sin, ctx.interleaved), None, None, None, None


def _rotated(
    x_BTHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, *, backward: bool
) -> torch.Tensor:
    out = torch.empty(x_BTHE.shape, dtype=x_BTHE.dtype, device=x_BTHE.device)
    launch_rotary((x_BTHE, None, None), out, cos, sin, interleaved, backward=backward)
    return out


def _rotate_in_place(
    qkv_BTC: torch.Tensor, sizes: QKVSizes, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> None:
    q, k, _ = sizes.split(qkv_BTC)
    launch_rotary((q, k, None), qkv_BTC, cos, sin, interleaved, backward=False)


def _fused_gradient(
    three: QKVTensors, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    dq, dk, dv = three
    width = sum(each.shape[-2] * each.shape[-1] for each in three)
    out = torch.empty(*dq.shape[:2], width, dtype=dq.dtype, device=dq.device)
    launch_rotary((dq, dk, dv), out, cos, sin, interleaved, backward=True)
    return out
