"""Softmax attention behind one function, which picks the kernel by shape and can say why.

    attention(q, k, v, causal=True, window=4096)              computes
    select_attention_backend(make_attention_case(q, k, v))    says which kernel does it, and why

Floor: 4·T·S·E FLOPs per query head forward (half of it where causal), 2.5 times that backward;
bytes are those of q, k, v and the output, as scores never leave the chip.

Shapes: B sequences, T positions, H query heads, K key and value heads, E head width.
"""

from functools import lru_cache

import torch
from torch import Tensor

from meshwright.run.kernels.attention.attention_reference import attention_reference
from meshwright.run.kernels.attention.fused_attention import FusedAttentionArgs, fused_attention
from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.attention.selector import (
    AttentionBackend,
    AttentionBackendChoice,
    AttentionCase,
    select_attention_backend,
)
from meshwright.run.kernels.triton_compat import HAS_TRITON

__all__ = [
    "AttentionBackend",
    "AttentionBackendChoice",
    "AttentionCase",
    "PackedSequences",
    "attention",
    "attention_reference",
    "make_attention_case",
    "select_attention_backend",
]


def attention(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    documents: PackedSequences | None = None,
    alibi: Tensor | None = None,
    prefer: AttentionBackend | None = None,
    dynamic_shapes: bool = False,
) -> Tensor:
    """Return softmax(scale · q kᵀ) v over (B, T, heads, width) tensors, strided as they come.

    Args:
        q_BTHE: Queries; H is a multiple of K.
        k_BTKE: Keys.
        v_BTKE: Values, of their own width.
        causal: Tokens see only what came before.
        window: Each token sees this many positions, itself included.
        chunk: Attention starts afresh every so many positions of a document.
        scale: Multiplier of the scores; None is 1/sqrt(E).
        softcap: Scores are squashed by tanh to this range.
        sinks: A logit per query head that takes attention without giving value.
        documents: Packed documents; none sees another.
        alibi: A slope per query head, times the (negative) distance added to the scores.
        prefer: The kernel to use in place of the fastest.
        dynamic_shapes: Most calls bring new shapes, for which nothing shall be planned.
    """
    batch, length = q_BTHE.shape[:2]
    if chunk is not None and chunk < length:
        if documents is None and length % chunk == 0:
            q, k, v = (t.reshape(-1, chunk, *t.shape[2:]) for t in (q_BTHE, k_BTKE, v_BTKE))
            out = attention(
                q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
                alibi=alibi, prefer=prefer, dynamic_shapes=dynamic_shapes,
            )  # fmt: skip
            return out.reshape(batch, length, *out.shape[2:])
        rows = documents or PackedSequences.from_sequences(batch, length, q_BTHE.device)
        documents = rows.split_by_chunk(chunk, batch, length)
    window = None if window is None or window >= length else window
    case = make_attention_case(
        q_BTHE, k_BTKE, v_BTKE, causal=causal, window=window, softcap=softcap, sinks=sinks,
        documents=documents, alibi=alibi, dynamic_shapes=dynamic_shapes,
    )  # fmt: skip
    kernel = select_attention_backend(case, prefer).backend
    scale = q_BTHE.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "reference":
        return attention_reference(
            q_BTHE, k_BTKE, v_BTKE, causal=causal, window=window, scale=scale, softcap=softcap,
            sinks=sinks, documents=documents, alibi=alibi,
        )  # fmt: skip
    if kernel == "flex":
        # It brings torch's compiler, which takes seconds to import.
        from meshwright.run.kernels.attention.flex import flex_attention

        return flex_attention(
            q_BTHE, k_BTKE, v_BTKE, causal=causal, window=window, scale=scale, softcap=softcap,
            sinks=sinks, documents=documents, alibi=alibi,
        )  # fmt: skip
    ask = FusedAttentionArgs(kernel, causal, scale, window, documents)
    return fused_attention(q_BTHE, k_BTKE, v_BTKE, ask, sinks)


def make_attention_case(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    documents: PackedSequences | None = None,
    alibi: Tensor | None = None,
    dynamic_shapes: bool = False,
) -> AttentionCase:
    """Return what decides the kernel of an attention over these tensors."""
    capability, cudnn = _abilities(q_BTHE.device) if q_BTHE.is_cuda else (None, None)
    return AttentionCase(
        device=q_BTHE.device.type,
        capability=capability,
        cudnn_version=cudnn,
        dtype=q_BTHE.dtype,
        head_dim=q_BTHE.shape[-1],
        value_dim=v_BTKE.shape[-1],
        sequence_length=q_BTHE.shape[1],
        causal=causal,
        has_window=window is not None and window < q_BTHE.shape[1],
        has_softcap=softcap is not None,
        has_sinks=sinks is not None,
        has_documents=documents is not None,
        has_alibi=alibi is not None,
        dynamic_shapes=dynamic_shapes,
        needs_backward=q_BTHE.requires_grad or k_BTKE.requires_grad or v_BTKE.requires_grad,
        has_compiler=HAS_TRITON,
    )


@lru_cache(maxsize=64)
def _abilities(device: torch.device) -> tuple[tuple[int, int], int | None]:
    """Return a CUDA device's compute capability, and cuDNN's version."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_capability(device), cudnn
