"""Queries and keys of a fused projection normed head by head, then rotated, in one kernel each way.

What `rms_norm` and `rotary` do one after the other, for models that norm queries and keys (Qwen3,
Gemma 3, GLM): each element travels once where separate kernels would take it out and back twice,
and backward writes the fused projection's gradient directly. Rounded once.

Bytes moved, the floor, per element of q and k: forward 2 accesses, backward 3 (itself, the incoming
and the outgoing gradient), and 2 for v.

Letters: B batch, T positions, H query heads, K key/value heads, E elements of a head, and
C = (H + 2K)·E the width of a fused projection (all q, then all k, then all v).
"""

# Autograd hands over arguments by position; so do calls that name a projection's sizes.
# ruff: noqa: PLR0917

from typing import Any, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.autograd import apply_autograd
from meshwright.run.kernels.norm.rms_norm import rms_norm, rms_norm_reference
from meshwright.run.kernels.norm.rms_norm_kernel import sum_partials_kernel
from meshwright.run.kernels.rotary.qk_norm_rope_backward_kernel import qk_norm_rope_backward_kernel
from meshwright.run.kernels.rotary.qk_norm_rope_kernel import qk_norm_rope_kernel
from meshwright.run.kernels.rotary.rotary import (
    QKVSizes,
    QKVTensors,
    apply_rotary,
    apply_rotary_reference,
    check_qkv,
)
from meshwright.run.kernels.rotary.rotary_kernel import next_power_of_2, select_rotary_tile
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton

TILE = 2048
"""Elements of a program of the forward pass: four accesses of 16 bytes per thread, in bfloat16.
The fastest of those tried on an H200 (2048 to 8192, 2 to 8 warps): 89 % of copy, others 71–87."""
BACKWARD_TILE = 2048
"""The same of the backward pass, where a thread also holds weights, their gradients, and what
comes next."""
WARPS = 2
BACKWARD_WARPS = 4
WARPS_EACH = 20
"""Warps of the backward pass on each multiprocessor: as many as registers allow (87 % of copy on
an H200, with 16 of them 83 %)."""
PREFETCH = True
"""Whether the backward pass asks for its next tile before it works on one; not where neighbours
turn, for to sort them takes the registers."""
MAX_WIDTH = BACKWARD_TILE
"""Elements of a head that leave the backward pass enough registers; wider ones are normed and
rotated by two kernels."""


class QKNorms(NamedTuple):
    """How heads are normed: what `rms_norm` is told, for queries and for keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    unit_offset: bool = False


def split_qkv_norm_rope(
    qkv_BTC: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: QKNorms,
    *,
    interleaved: bool = False,
    backend: KernelBackend = "auto",
) -> QKVTensors:
    """Return q (B,T,H,E), k and v (B,T,K,E) of a fused projection, q and k normed and rotated.

    With Triton q and k are new and v lies in the memory of qkv, which is kept for backward.
    """
    sizes = QKVSizes(heads, kv_heads, head_dim)
    check_qkv(qkv_BTC, sizes, cos, sin)
    _check_weights(norms, head_dim)
    if not should_use_triton(backend, qkv_BTC) or next_power_of_2(head_dim) > MAX_WIDTH:
        return _one_after_the_other(qkv_BTC, sizes, cos, sin, norms, interleaved, backend)
    three: QKVTensors = apply_autograd(
        _SplitNormRotate,
        qkv_BTC,
        norms.q_weight,
        norms.k_weight,
        sizes,
        cos,
        sin,
        norms,
        interleaved,
    )
    return three


def split_qkv_norm_rope_reference(
    qkv_BTC: torch.Tensor,
    sizes: QKVSizes,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: QKNorms,
    *,
    interleaved: bool = False,
) -> QKVTensors:
    """Do the same with torch operations."""
    q, k, v = sizes.split(qkv_BTC)
    q = rms_norm_reference(q, norms.q_weight, norms.eps, unit_offset=norms.unit_offset)
    k = rms_norm_reference(k, norms.k_weight, norms.eps, unit_offset=norms.unit_offset)
    q, k = (apply_rotary_reference(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return q, k, v


def _one_after_the_other(
    qkv_BTC: torch.Tensor,
    sizes: QKVSizes,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: QKNorms,
    interleaved: bool,
    backend: KernelBackend,
) -> QKVTensors:
    every = qkv_BTC.view(*qkv_BTC.shape[:-1], -1, sizes.head_dim)
    # One operation, whose gradient is put together in one pass.
    q, k, v = torch.split(every, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=-2)
    offset = norms.unit_offset
    q = rms_norm(q, norms.q_weight, norms.eps, unit_offset=offset, backend=backend)
    k = rms_norm(k, norms.k_weight, norms.eps, unit_offset=offset, backend=backend)
    q, k = (apply_rotary(x, cos, sin, interleaved=interleaved, backend=backend) for x in (q, k))
    return q, k, v


def _check_weights(norms: QKNorms, head_dim: int) -> None:
    problems = [
        Problem(where, f"shape {tuple(weight.shape)} for heads of {head_dim} elements", fix)
        for where, weight in (("q_weight", norms.q_weight), ("k_weight", norms.k_weight))
        for fix in (f"give it shape ({head_dim},)",)
        if tuple(weight.shape) != (head_dim,)
    ]
    if problems:
        raise InputError(problems)


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BTC: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        sizes: QKVSizes,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: QKNorms,
        interleaved: bool,
    ) -> QKVTensors:
        qkv_BTC, cos, sin = qkv_BTC.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(qkv_BTC, q_weight, k_weight, cos, sin)
        # No tensor outside of what is saved: it would never be let go.
        ctx.sizes, ctx.interleaved = sizes, interleaved
        ctx.eps, ctx.unit_offset = norms.eps, norms.unit_offset
        batch, positions, _ = qkv_BTC.shape
        turning = sizes.heads + sizes.kv_heads
        out = qkv_BTC.new_empty(batch, positions, turning, sizes.head_dim)
        if out.numel():
            options = _options(sizes, cos, interleaved, norms.unit_offset, TILE, WARPS)
            angle_batch = cos.stride(0) if cos.dim() == 3 else 0
            blocks = batch * -(-positions // options["TOKENS"])
            qk_norm_rope_kernel[(blocks * (turning // options["HEADS"]),)](
                qkv_BTC, out, q_weight, k_weight, cos, sin, positions, angle_batch, norms.eps,
                **options,
            )  # fmt: skip
        v = sizes.split(qkv_BTC.detach())[2]
        return out[:, :, : sizes.heads], out[:, :, sizes.heads :], v

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        qkv_BTC, q_weight, k_weight, cos, sin = ctx.saved_tensors
        sizes = ctx.sizes
        dq, dk, dv = (each if each.stride(-1) == 1 else each.contiguous() for each in grads)
        options = _options(
            sizes, cos, ctx.interleaved, ctx.unit_offset, BACKWARD_TILE, BACKWARD_WARPS
        )
        blocks = qkv_BTC.shape[0] * -(-qkv_BTC.shape[1] // options["TOKENS"])
        # Each program keeps to a share of the heads, so that all shares have as many programs.
        shares = sizes.width // (options["HEADS"] * sizes.head_dim)
        programs = shares * max(1, min(blocks, _programs(qkv_BTC.device) // shares))
        dqkv = torch.empty_like(qkv_BTC)
        width = 2 * sizes.head_dim
        parts = torch.empty(programs, width, dtype=torch.float32, device=dqkv.device)
        dweights = torch.empty(width, dtype=q_weight.dtype, device=dqkv.device)
        qk_norm_rope_backward_kernel[(programs,)](
            qkv_BTC, dq, dk, dv, dqkv, q_weight, k_weight, cos, sin, parts, blocks,
            qkv_BTC.shape[1], *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            cos.stride(0) if cos.dim() == 3 else 0, ctx.eps,
            AHEAD=PREFETCH and not ctx.interleaved, **options,
        )  # fmt: skip
        sum_partials_kernel(parts, dweights)
        dq_weight, dk_weight = dweights[: sizes.head_dim], dweights[sizes.head_dim :]
        return dqkv, dq_weight, dk_weight.to(k_weight.dtype), None, None, None, None, None


def _options(
    sizes: QKVSizes,
    cos: torch.Tensor,
    interleaved: bool,
    unit_offset: bool,
    elements: int,
    warps: int,
) -> dict[str, Any]:
    half = cos.shape[-1]
    tile = select_rotary_tile(*sizes, elements)
    return {
        "H": sizes.heads,
        "K": sizes.kv_heads,
        "E": sizes.head_dim,
        "HALF": half,
        "TOKENS": tile.tokens,
        "HEADS": tile.heads,
        "HALF_COLUMNS": next_power_of_2(half),
        "COLUMNS": next_power_of_2(sizes.head_dim),
        "INTERLEAVED": interleaved,
        "UNIT_OFFSET": unit_offset,
        "num_warps": warps,
    }


def _programs(device: torch.device) -> int:
    """Count programs of the backward pass that run at a time."""
    if device.type != "cuda":
        return 24  # interpreted: more than one for the same heads, so that parts are added up
    each = WARPS_EACH // BACKWARD_WARPS
    return each * int(torch.cuda.get_device_properties(device).multi_processor_count)
