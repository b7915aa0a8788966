"""Attention through torch's fused kernels: cuDNN, flash (dense and by documents), the CPU's.

Tensors keep the layout the projections leave, (B, T, heads, width), strided as they come: no head
is repeated, nothing is copied. Bytes moved: q, k, v in, output and one fp32 per query out.

Sinks: with a sink s, shares are exp(score − n) for n = log(exp(s) + Σ exp(score)), so the output is
the kernel's times sigmoid(lse − s), and the kernel's own backward is exact once it is given that
output and n in place of its own: dS = P (dP − rowsum(dO · O)) holds unchanged. The sink's gradient
is −Σ exp(s − n) · rowsum(dO · O).

Shapes: B sequences, T positions, H query heads, K key and value heads, E head width.
"""

# Autograd and torch's kernels take arguments by position, and the kernels have no public names.
# ruff: noqa: PLR0917, SLF001

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.attention.selector import AttentionBackend

aten = torch.ops.aten


class FusedAttentionArgs(NamedTuple):
    """What a fused kernel is asked for beside q, k and v."""

    backend: AttentionBackend
    causal: bool
    scale: float
    window: int | None
    documents: PackedSequences | None
    key_documents: PackedSequences | None = None
    """The same documents among the keys, where these are other tokens than the queries."""


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, ask: FusedAttentionArgs, sinks: Tensor | None
) -> Tensor:
    """Run one of torch's kernels over (B, T, heads, width) tensors."""
    width = v.shape[-1]
    if ask.backend == "flash" and width < q.shape[-1]:
        v = functional.pad(v, (0, q.shape[-1] - width))
    if sinks is None:
        out: Tensor = fused_forward(q, k, v, ask)[0]
    else:
        out = _WithSinks.apply(q, k, v, sinks, ask)  # type: ignore[no-untyped-call]
    return out if out.shape[-1] == width else out[..., :width]


def fused_forward(q: Tensor, k: Tensor, v: Tensor, ask: FusedAttentionArgs) -> tuple[Any, ...]:
    """Return the output in (B, T, H, E), and what the kernel's backward wants."""
    if ask.backend == "flash":
        return _flash_forward(q, k, v, ask)
    heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if ask.backend == "cpu-flash":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            *heads_first, 0.0, ask.causal, scale=ask.scale
        )
        return out.transpose(1, 2), lse
    found = aten._scaled_dot_product_cudnn_attention.default(
        *heads_first, None, True, 0.0, ask.causal, False, scale=ask.scale
    )
    return found[0].transpose(1, 2), *found[1:8]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, ask: FusedAttentionArgs) -> tuple[Any, ...]:
    batch, length = q.shape[:2]
    bounds = _bounds(q, k, ask)
    if ask.documents is not None:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    found = aten._flash_attention_forward.default(
        q, k, v, *bounds, 0.0, ask.causal, False, scale=ask.scale, **_reach(ask)
    )
    out = found[0] if ask.documents is None else found[0].view(batch, length, *found[0].shape[1:])
    return out, *found[1:4]


def _bounds(
    q: Tensor, k: Tensor, ask: FusedAttentionArgs
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return where documents start among queries and among keys, and the most tokens of one."""
    if ask.documents is None:
        return None, None, q.shape[1], k.shape[1]
    keys = ask.key_documents or ask.documents
    return ask.documents.cu_seqlens, keys.cu_seqlens, ask.documents.max_length, keys.max_length


def _reach(ask: FusedAttentionArgs) -> dict[str, int]:
    """Say a window as the flash kernel counts it: positions before and after the token's own."""
    if ask.window is None:
        return {}
    after = 0 if ask.causal else ask.window - 1
    return {"window_size_left": ask.window - 1, "window_size_right": after}


def fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    ask: FusedAttentionArgs,
    saved: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, each as (B, T, heads, width)."""
    if ask.backend == "flash":
        return _flash_backward(grad, q, k, v, out, ask, saved)
    firsts = tuple(tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
    if ask.backend == "cpu-flash":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *firsts, saved[0], 0.0, ask.causal, scale=ask.scale
        )
    else:
        lse, starts_q, starts_k, most_q, most_k, seed, offset = saved
        grads = aten._scaled_dot_product_cudnn_attention_backward.default(
            *firsts, lse, seed, offset, None, starts_q, starts_k, most_q, most_k,
            0.0, ask.causal, scale=ask.scale,
        )  # fmt: skip
    dq, dk, dv = (tensor.transpose(1, 2) for tensor in grads)
    return dq, dk, dv


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    ask: FusedAttentionArgs,
    saved: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    shapes, (lse, seed, unused) = (q.shape, k.shape, v.shape), saved
    bounds = _bounds(q, k, ask)
    if ask.documents is not None:
        grad, q, k, v, out = (tensor.flatten(0, 1) for tensor in (grad, q, k, v, out))
    dq, dk, dv = aten._flash_attention_backward.default(
        grad, q, k, v, out, lse, *bounds, 0.0, ask.causal, seed, unused,
        scale=ask.scale, **_reach(ask),
    )  # fmt: skip
    if ask.documents is not None:
        dq, dk, dv = (each.reshape(shape) for each, shape in zip((dq, dk, dv), shapes, strict=True))
    return dq, dk, dv


class _WithSinks(torch.autograd.Function):
    """A fused kernel whose softmax has one more, learned, entry per head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, ask: FusedAttentionArgs
    ) -> Tensor:
        raw, lse, *saved = fused_forward(q, k, v, ask)
        lse_BTH = transpose_lse_heads_last(lse, q.shape[:3], ask)
        total = torch.logaddexp(lse_BTH, sinks.to(lse.dtype))
        # Multiplied in fp32 and rounded once.
        out = torch.mul(raw, (lse_BTH - total).exp()[..., None], out=torch.empty_like(raw))
        ctx.ask, ctx.saved, ctx.lse_shape = ask, saved, lse.shape
        ctx.save_for_backward(q, k, v, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        q, k, v, sinks, out, total = ctx.saved_tensors
        lse = transpose_lse_heads_first(total, ctx.lse_shape, ctx.ask)
        dq, dk, dv = fused_backward(grad, q, k, v, out, ctx.ask, (lse, *ctx.saved))
        dots_BTH = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        taken = (sinks.to(lse.dtype) - total).exp()
        return dq, dk, dv, -(taken * dots_BTH).sum((0, 1)).to(sinks.dtype), None


def transpose_lse_heads_last(lse: Tensor, shape: torch.Size, ask: FusedAttentionArgs) -> Tensor:
    """Bring a kernel's normalisers to (B, T, H): they come as (B, H, T[, 1]) or (H, B·T)."""
    if ask.backend == "flash" and ask.documents is not None:
        return lse.view(shape[2], *shape[:2]).permute(1, 2, 0)
    return lse.view(shape[0], shape[2], shape[1]).transpose(1, 2)


def transpose_lse_heads_first(
    total_BTH: Tensor, shape: torch.Size, ask: FusedAttentionArgs
) -> Tensor:
    """Bring normalisers back to the kernel's own shape."""
    if ask.backend == "flash" and ask.documents is not None:
        return total_BTH.permute(2, 0, 1).reshape(shape)
    return total_BTH.transpose(1, 2).reshape(shape)
