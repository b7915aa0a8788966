"""Attention over pages in plain torch: row by row, every feature of every model.

Any device can do it, but it asks the host how long each row is: the kernels of `run/kernels` do the
same without asking, and are what a GPU uses wherever they can.

Shapes: N tokens, R rows, H query heads, K key and value heads, E head width, S keys of a row, L
latent width of keys and values.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.serve.model.cache import LayerCache
from meshwright.run.serve.model.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a layer attends."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether scores are used as they are."""
        return self.softcap is None and self.sinks is None and self.alibi is None


def store(tokens_NKE: Tensor, cache: Tensor, slots_N: Tensor, scale: Tensor | None) -> None:
    """Write one vector per head and token into its slot of a cache (blocks, tokens, heads, width).

    Numbers that fp8 cannot hold become the largest it can.
    """
    kept_N = slots_N >= 0
    slots = slots_N[kept_N]
    size = cache.shape[1]
    values = tokens_NKE[kept_N]
    if scale is not None:
        limit = torch.finfo(cache.dtype).max
        values = (values.float() / scale).clamp(-limit, limit)
    values = values.to(cache.dtype)
    if scale is None:
        cache[slots // size, slots % size] = values
    else:  # indexed writes know nothing of fp8
        cache.view(torch.uint8)[slots // size, slots % size] = values.view(torch.uint8)


def attend(q_NHE: Tensor, layer: LayerCache, step: Step, rule: Rule) -> Tensor:
    """Return what each token reads of the keys and values of its row, (N, H, E)."""
    assert layer.values is not None, "latents are read by attend_latents"
    out = torch.zeros_like(q_NHE)
    tables, lengths = step.tables_RB.tolist(), step.lengths_R.tolist()
    begin = 0
    for table, length, count in zip(tables, lengths, step.row_tokens(), strict=True):
        if length and count:
            k_SKE = _read(layer.keys, table, length, layer.key_scale, q_NHE.dtype)
            v_SKE = _read(layer.values, table, length, layer.value_scale, q_NHE.dtype)
            queries = q_NHE[begin : begin + count]
            out[begin : begin + count] = _row(queries, k_SKE, v_SKE, rule)
        begin += count
    return out


def attend_latents(
    q_NHE: Tensor, layer: LayerCache, step: Step, *, scale: float, latent: int
) -> Tensor:
    """Return the mean of the latents that each head of each token reads, (N, H, L).

    Queries are of the whole width of what is kept: first what meets the latent, then what meets the
    rotary key.
    """
    out = q_NHE.new_zeros(*q_NHE.shape[:2], latent)
    tables, lengths = step.tables_RB.tolist(), step.lengths_R.tolist()
    begin, rule = 0, Rule(scale=scale)
    for table, length, count in zip(tables, lengths, step.row_tokens(), strict=True):
        if length and count:
            kept = _read(layer.keys, table, length, layer.key_scale, q_NHE.dtype)[:, None]
            queries = q_NHE[begin : begin + count]
            out[begin : begin + count] = _row(queries, kept, kept[..., :latent], rule)
        begin += count
    return out


def _read(
    cache: Tensor, table: list[int], length: int, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the first `length` vectors of a row's blocks, in order."""
    blocks = table[: -(-length // cache.shape[1])]
    index = torch.tensor(blocks, device=cache.device)
    if scale is None:
        return cache[index].flatten(0, 1)[:length]
    bytes_ = cache.view(torch.uint8)[index].flatten(0, 1)[:length]
    return (bytes_.view(cache.dtype).float() * scale).to(dtype)


def _row(q_THE: Tensor, k_SKE: Tensor, v_SKV: Tensor, rule: Rule) -> Tensor:
    """Attend from the last T of S positions of one sequence."""
    count, heads, _ = q_THE.shape
    length, kv_heads = k_SKE.shape[:2]
    first = length - count
    if rule.chunk is not None and first // rule.chunk == (length - 1) // rule.chunk:
        # All queries stand in one piece: what lies before it is not read at all.
        cut = first // rule.chunk * rule.chunk
        k_SKE, v_SKV, length, first = k_SKE[cut:], v_SKV[cut:], length - cut, first - cut
        rule = Rule(scale=rule.scale, window=rule.window, softcap=rule.softcap, sinks=rule.sinks,
                    alibi=rule.alibi)  # fmt: skip
    mask_TS = _visible(count, length, rule, q_THE.device)
    if rule.plain and k_SKE.shape[2] == v_SKV.shape[2]:
        mixed = functional.scaled_dot_product_attention(
            q_THE.transpose(0, 1)[None],
            k_SKE.transpose(0, 1)[None],
            v_SKV.transpose(0, 1)[None],
            attn_mask=mask_TS,
            scale=rule.scale,
            enable_gqa=heads != kv_heads,
        )
        return mixed[0].transpose(0, 1)
    kind = torch.promote_types(q_THE.dtype, torch.float32)
    q_KGTE = q_THE.to(kind).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    scores = q_KGTE @ k_SKE.to(kind).permute(1, 2, 0)[:, None] * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.alibi is not None:
        keys = torch.arange(length, device=q_THE.device)
        behind_TS = (keys[None] - keys[first:, None]).to(kind)
        scores = scores + rule.alibi.to(kind).view(kv_heads, -1, 1, 1) * behind_TS
    if mask_TS is not None:
        scores = scores.masked_fill(~mask_TS, -math.inf)
    if rule.sinks is not None:
        column = rule.sinks.to(kind).view(kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat((scores, column), -1)
    shares = scores.softmax(-1)[..., :length]
    out_KGTV = shares @ v_SKV.to(kind).transpose(0, 1)[:, None]
    return out_KGTV.permute(2, 0, 1, 3).flatten(1, 2).to(q_THE.dtype)


def _visible(count: int, length: int, rule: Rule, device: torch.device) -> Tensor | None:
    """Return which of the keys each of the last queries sees; None where each sees all."""
    if count == 1 and rule.window is None and rule.chunk is None:
        return None
    keys = torch.arange(length, device=device)
    queries = keys[length - count :, None]
    mask_TS = keys[None] <= queries
    if rule.window is not None:
        mask_TS &= queries - keys[None] < rule.window
    if rule.chunk is not None:
        mask_TS &= queries // rule.chunk == keys[None] // rule.chunk
    return mask_TS
