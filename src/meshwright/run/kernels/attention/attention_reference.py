"""Attention written out: every feature, any device, scores in full. The reference of the others.

Scores, softmax and weighted sum run in fp32 (fp64 for fp64 inputs); memory grows with T².

Shapes: B sequences, T positions, H query heads, K key and value heads (G = H / K queries share
one), E head width, S positions attended to.
"""

import math

import torch
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences


def attention_reference(
    q_BTHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    documents: PackedSequences | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ + what the options add) v."""
    batch, length, _, width = q_BTHE.shape
    kv_heads, kind = k_BSKE.shape[2], torch.promote_types(q_BTHE.dtype, torch.float32)
    q_BTKGE = q_BTHE.to(kind).reshape(batch, length, kv_heads, -1, width)
    scores = torch.einsum("btkge,bske->bkgts", q_BTKGE, k_BSKE.to(kind))
    scores = scores * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi is not None:
        steps = torch.arange(length, device=scores.device)
        behind_TS = (steps[None, :] - steps[:, None]).to(kind)
        scores = scores + alibi.to(kind).view(kv_heads, -1, 1, 1) * behind_TS
    mask = make_attention_mask(
        batch, length, scores.device, causal=causal, window=window, chunk=chunk, documents=documents
    )
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -math.inf)
    if sinks is not None:
        column = sinks.to(kind).view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, length, 1)
        scores = torch.cat((scores, column), -1)
    shares = scores.softmax(-1)
    if sinks is not None:
        shares = shares[..., :-1]
    out = torch.einsum("bkgts,bske->btkge", shares, v_BSKE.to(kind))
    return out.flatten(2, 3).to(q_BTHE.dtype)


def make_attention_mask(
    batch: int,
    length: int,
    device: torch.device,
    *,
    causal: bool,
    window: int | None,
    chunk: int | None,
    documents: PackedSequences | None,
) -> Tensor | None:
    """Return which positions each token sees, (B or 1, T, S), or None where it sees all."""
    steps = torch.arange(length, device=device)
    behind_TS = steps[:, None] - steps[None, :]
    parts = []
    if causal:
        parts.append((behind_TS >= 0)[None])
    if window is not None:
        near = behind_TS < window
        parts.append((near if causal else near & (behind_TS > -window))[None])
    if documents is not None:
        ids_BT = documents.ids(batch, length)
        parts.append(ids_BT[:, :, None] == ids_BT[:, None, :])
    if chunk is not None:
        places = steps[None] if documents is None else documents.positions(batch, length)
        pieces = places // chunk
        parts.append(pieces[:, :, None] == pieces[:, None, :])
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask
