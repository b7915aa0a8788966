"""Attention over paged keys and values written out in torch: the reference of the kernels.

Any device, every option, scores in full, in fp32 (fp64 for fp64 queries). On processors it is also
what serves. What pages hold beyond a row's length is never used, be it NaN.

Shapes: R rows (sequences), N queries of all rows, T queries of one, H query heads, K key/value
heads, E head width, B blocks of a row at most, S keys.
"""

# Tensors that lie beside each other in every call are handed over by position.
# ruff: noqa: PLR0917

import math
from typing import NamedTuple

import torch
from torch import Tensor

_SCORES = 1 << 22
"""Scores that are held at a time, where rows are computed together."""


class ScoreModifiers(NamedTuple):
    """What becomes of scores."""

    scale: float
    """Multiplies them."""
    window: int | None = None
    """Each query sees this many positions, its own included."""
    chunk: int | None = None
    """Attention starts afresh every so many positions."""
    softcap: float | None = None
    """Scores are squashed by tanh to this range."""
    sinks: Tensor | None = None
    """A logit per query head that takes attention without giving value."""
    alibi: Tensor | None = None
    """A slope per query head, times the (negative) distance added to the scores."""


def paged_decode_reference(
    q_NHE: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    shaping: ScoreModifiers,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend with as many queries for each row, the last of its keys."""
    rows = len(lengths_R)
    keys = int(lengths_R.max()) if rows else 0
    k, v = (_gathered(cache, tables_RB, keys) for cache in (k_cache, v_cache))
    q_RTHE = q_NHE.view(rows, -1, *q_NHE.shape[1:]) if rows else q_NHE[:, None]
    behind_T = torch.arange(-q_RTHE.shape[1], 0, device=q_NHE.device)
    places_RT = lengths_R[:, None] + behind_T
    return paged_attend_reference(q_RTHE, k, v, places_RT, shaping, k_scale, v_scale).flatten(0, 1)


def paged_prefill_reference(
    q_NHE: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    starts_R1: Tensor,
    shaping: ScoreModifiers,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend with each row's queries, the last of its keys; zeros where no row has a query."""
    out = torch.zeros(*q_NHE.shape[:2], v_cache.shape[-1], dtype=q_NHE.dtype, device=q_NHE.device)
    starts = starts_R1.tolist()
    # Rows of the same shape at a time: short prompts would cost more calls than products.
    alike: dict[tuple[int, int], list[int]] = {}
    for row, length in enumerate(lengths_R.tolist()):
        alike.setdefault((starts[row + 1] - starts[row], length), []).append(row)
    for (many, length), rows in alike.items():
        if not many or not length:
            continue
        most = max(1, _SCORES // (q_NHE.shape[1] * many * length))
        places_T = torch.arange(length - many, length, device=q_NHE.device)
        for first in range(0, len(rows), most):
            rows_R = torch.tensor(rows[first : first + most], device=q_NHE.device)
            lie_RT = starts_R1[rows_R].long()[:, None] + torch.arange(many, device=q_NHE.device)
            k, v = (_gathered(cache, tables_RB[rows_R], length) for cache in (k_cache, v_cache))
            places_RT = places_T.expand(len(rows_R), -1)
            out[lie_RT] = paged_attend_reference(
                q_NHE[lie_RT], k, v, places_RT, shaping, k_scale, v_scale
            )
    return out


def _gathered(cache: Tensor, tables_RB: Tensor, keys: int) -> Tensor:
    """Return the first keys of each row, (R, S, …); blocks that are no blocks are read as any."""
    block = cache.shape[1]
    blocks = tables_RB[:, : -(-keys // block)].long().clamp(0, len(cache) - 1)
    # Torch indexes no 8-bit floats.
    held = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return held[blocks].flatten(1, 2)[:, :keys].view(cache.dtype)


def paged_attend_reference(
    q_RTHE: Tensor,
    k_RSKE: Tensor,
    v_RSKE: Tensor,
    places_RT: Tensor,
    shaping: ScoreModifiers,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend with queries at places to the keys from 0 on; a query before all keys gets zeros."""
    kind = torch.promote_types(q_RTHE.dtype, torch.float32)
    rows, many, heads, width = q_RTHE.shape
    kv_heads, keys = k_RSKE.shape[2], k_RSKE.shape[1]
    key_S = torch.arange(keys, device=q_RTHE.device)
    behind_RTS = places_RT[:, :, None] - key_S
    seen_RTS = behind_RTS >= 0
    if shaping.window is not None:
        seen_RTS &= behind_RTS < shaping.window
    if shaping.chunk is not None:
        pieces_RT = places_RT.div(shaping.chunk, rounding_mode="floor")
        seen_RTS &= pieces_RT[:, :, None] == key_S // shaping.chunk
    q = q_RTHE.to(kind).view(rows, many, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("rtkge,rske->rkgts", q, k_RSKE.to(kind))
    scores *= shaping.scale if k_scale is None else shaping.scale * k_scale.to(kind)
    if shaping.softcap is not None:
        scores = shaping.softcap * torch.tanh(scores / shaping.softcap)
    if shaping.alibi is not None:
        slopes = shaping.alibi.to(kind).view(1, kv_heads, -1, 1, 1)
        scores = scores - slopes * behind_RTS[:, None, None].to(kind)
    scores = scores.masked_fill(~seen_RTS[:, None, None], -math.inf)
    sinks = torch.full((heads,), -math.inf, dtype=kind, device=scores.device)
    if shaping.sinks is not None:
        sinks = shaping.sinks.to(kind)
    column = sinks.view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, many, 1)
    shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    # A row that sees nothing has no softmax, and a weight of nought must hide even a NaN.
    shares = shares.masked_fill(~seen_RTS[:, None, None], 0.0)
    last_R = places_RT.amax(1)
    v = v_RSKE.to(kind).masked_fill((key_S > last_R[:, None])[:, :, None, None], 0.0)
    out = torch.einsum("rkgts,rske->rtkge", shares, v).flatten(2, 3)
    return (out if v_scale is None else out * v_scale.to(kind)).to(q_RTHE.dtype)
