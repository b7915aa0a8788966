"""Softmax attention behind one function, which picks the kernel by shape and can say why.

    attention(q, k, v, causal=True, window=4096)       computes
    choose(case_of(q, k, v, …))                        Choice(kernel='flash', why='not cudnn: …')

Floor: 4·T·S·E FLOPs per query head forward (half of it where causal), 2.5 times that backward;
bytes are those of q, k, v and the output, as scores never leave the chip.

Shapes: B sequences, T positions, H query heads, K key and value heads, E head width.
"""

from functools import lru_cache

import torch
from torch import Tensor

from meshwright.run.kernels.attention_choice import AttentionCase, Choice, Kernel, choose
from meshwright.run.kernels.attention_fused import Ask, fused_attention
from meshwright.run.kernels.attention_plain import plain_attention
from meshwright.run.kernels.documents import Documents
from meshwright.run.kernels.language import HAS_TRITON

__all__ = [
    "AttentionCase",
    "Choice",
    "Documents",
    "Kernel",
    "attention",
    "case_of",
    "choose",
    "plain_attention",
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
    documents: Documents | None = None,
    alibi: Tensor | None = None,
    prefer: Kernel | None = None,
    varied: bool = False,
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
        varied: Most calls bring new shapes, for which nothing shall be planned.
    """
    batch, length = q_BTHE.shape[:2]
    if chunk is not None and chunk < length:
        if documents is None and length % chunk == 0:
            q, k, v = (t.reshape(-1, chunk, *t.shape[2:]) for t in (q_BTHE, k_BTKE, v_BTKE))
            out = attention(
                q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
                alibi=alibi, prefer=prefer, varied=varied,
            )  # fmt: skip
            return out.reshape(batch, length, *out.shape[2:])
        rows = documents or Documents.of_sequences(batch, length, q_BTHE.device)
        documents = rows.cut(chunk, batch, length)
    window = None if window is None or window >= length else window
    case = case_of(
        q_BTHE, k_BTKE, v_BTKE, causal=causal, window=window, softcap=softcap, sinks=sinks,
        documents=documents, alibi=alibi, varied=varied,
    )  # fmt: skip
    kernel = choose(case, prefer).kernel
    scale = q_BTHE.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "plain":
        return plain_attention(
            q_BTHE, k_BTKE, v_BTKE, causal=causal, window=window, scale=scale, softcap=softcap,
            sinks=sinks, documents=documents, alibi=alibi,
        )  # fmt: skip
    if kernel == "flex":
        # It brings torch's compiler, which takes seconds to import.
        from meshwright.run.kernels.attention_flex import flexible_attention

        return flexible_attention(
            q_BTHE, k_BTKE, v_BTKE, causal=causal, window=window, scale=scale, softcap=softcap,
            sinks=sinks, documents=documents, alibi=alibi,
        )  # fmt: skip
    ask = Ask(kernel, causal, scale, window, documents)
    return fused_attention(q_BTHE, k_BTKE, v_BTKE, ask, sinks)


def case_of(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    alibi: Tensor | None = None,
    varied: bool = False,
) -> AttentionCase:
    """Return what decides the kernel of an attention over these tensors."""
    capability, cudnn = _abilities(q_BTHE.device) if q_BTHE.is_cuda else (None, None)
    return AttentionCase(
        device=q_BTHE.device.type,
        capability=capability,
        cudnn=cudnn,
        dtype=q_BTHE.dtype,
        head_dim=q_BTHE.shape[-1],
        value_dim=v_BTKE.shape[-1],
        length=q_BTHE.shape[1],
        causal=causal,
        window=window is not None and window < q_BTHE.shape[1],
        softcap=softcap is not None,
        sinks=sinks is not None,
        documents=documents is not None,
        alibi=alibi is not None,
        varied=varied,
        backward=q_BTHE.requires_grad or k_BTKE.requires_grad or v_BTKE.requires_grad,
        compiler=HAS_TRITON,
    )


@lru_cache(maxsize=64)
def _abilities(device: torch.device) -> tuple[tuple[int, int], int | None]:
    """Return a CUDA device's compute capability, and cuDNN's version."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_capability(device), cudnn
