"""Attention of some tokens' queries to other tokens' keys and values, as a part of a softmax.

Every part gives an output and the logarithm of its normaliser; parts are merged by weighing each
output by its share of the whole normaliser (Liu et al., arXiv 2310.01889). Given the merged output
and normaliser, each part's gradients are those of the whole: dS = P (dP − rowsum(dO · O)).

A fused kernel computes a part that is seen in full, one whose queries and keys are the same tokens,
and one whose keys end with its queries (where the kernel is flash, which aligns them so); any other
is written out, a run of queries at a time.

Shapes: B sequences, T queries, S keys, H query heads, K key and value heads (G = H / K queries
share one), E key width, V value width.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels.attention.fused_attention import (
    FusedAttentionArgs,
    fused_backward,
    fused_forward,
    transpose_lse_heads_first,
    transpose_lse_heads_last,
)
from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.attention.sdpa import (
    AttentionBackend,
    make_attention_case,
    select_attention_backend,
)
from meshwright.run.nn.sharding.shard_spec import IndexRange

MAX_SCORE_BYTES = 1 << 30
"""Most that the scores of a part written out take at once."""
_FUSED = ("cudnn", "flash", "cpu-flash")

TokenSpans = tuple[IndexRange, ...]
"""Runs of the tokens of a whole sequence, ascending."""


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """What is asked of an attention over whole sequences."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    documents: PackedSequences | None
    """Of the whole sequences."""
    alibi: Tensor | None
    sequence_length: int
    """Tokens of a whole sequence."""
    preferred_backend: AttentionBackend | None = None


class AttentionPart(NamedTuple):
    """Some of the queries here against some of the keys at hand."""

    queries: IndexRange
    """Where the queries lie among those here."""
    keys: IndexRange
    query_spans: TokenSpans
    """Which tokens of the sequence they are."""
    key_spans: TokenSpans
    is_aligned: bool
    """The keys end with the queries, and these see no later ones; otherwise, under a causal mask,
    every query comes after every key."""


class PartSaved(NamedTuple):
    """What a part's backward wants beside tensors that all parts share."""

    fused_args: FusedAttentionArgs | None
    """None where it was written out."""
    lse_shape: torch.Size
    saved_tensors: tuple[Any, ...]


class AttentionInputs(NamedTuple):
    """The tensors of an attention, of a rank's tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


class MergedSoftmax(NamedTuple):
    """What the whole softmax has at some queries."""

    grad: Tensor
    """Of the output."""
    out: Tensor
    log_normalizer: Tensor
    """Log normalisers, (B, T, H), sinks included."""


QKVGradients = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a part, or their gradients."""


class AttentionOptions(TypedDict, total=False):
    """What `kernels.attention.sdpa.attention` takes beside tensors and sinks; see there."""

    causal: bool
    window: int | None
    chunk: int | None
    scale: float | None
    softcap: float | None
    documents: PackedSequences | None
    alibi: Tensor | None
    prefer: AttentionBackend | None
    dynamic_shapes: bool


def make_attention_rule(q_BTHE: Tensor, length: int, asked: AttentionOptions) -> AttentionRule:
    """Return the rule of an attention over whole sequences, of which these queries are some."""
    batch, documents = q_BTHE.shape[0], asked.get("documents")
    chunk, window, scale = asked.get("chunk"), asked.get("window"), asked.get("scale")
    if chunk is not None and chunk < length:
        rows = documents or PackedSequences.from_sequences(batch, length, q_BTHE.device)
        documents = rows.split_by_chunk(chunk, batch, length)
    return AttentionRule(
        causal=asked.get("causal", True),
        window=None if window is None or window >= length else window,
        scale=q_BTHE.shape[-1] ** -0.5 if scale is None else scale,
        softcap=asked.get("softcap"),
        documents=documents,
        alibi=asked.get("alibi"),
        sequence_length=length,
        preferred_backend=asked.get("prefer"),
    )


def partial_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, part: AttentionPart, rule: AttentionRule
) -> tuple[Tensor, Tensor, PartSaved]:
    """Return a part's output (B, T, H, V), its log normalisers (B, T, H), and a note for backward.

    The tensors are those of the part; queries that see no key have a normaliser of −∞.
    """
    kernel = _kernel(q, k, v, part, rule)
    if kernel is None:
        out, lse = _plain_forward(q, k, v, part, rule)
        return out, lse, PartSaved(None, lse.shape, ())
    ask = FusedAttentionArgs(
        kernel, part.is_aligned, rule.scale, rule.window, *_documents(part, rule)
    )
    raw, lse, *rest = fused_forward(q, k, _as_wide(v, q, kernel), ask)
    lse_BTH = transpose_lse_heads_last(lse, q.shape[:3], ask)
    if ask.documents is not None:
        # The flash kernel writes +∞ where a query sees no key.
        lse_BTH = lse_BTH.masked_fill(lse_BTH == math.inf, -math.inf)
    return raw[..., : v.shape[-1]], lse_BTH, PartSaved(ask, lse.shape, tuple(rest))


def partial_attention_backward(
    tensors: QKVGradients,
    whole: MergedSoftmax,
    part: AttentionPart,
    rule: AttentionRule,
    found: PartSaved,
) -> QKVGradients:
    """Return the gradients of a part's queries, keys and values."""
    q, k, v = tensors
    if found.fused_args is None:
        return _plain_backward(tensors, whole, part, rule)
    kernel = found.fused_args.backend
    lse = transpose_lse_heads_first(
        whole.log_normalizer, found.lse_shape, found.fused_args
    ).contiguous()
    grad, out, wide = (_as_wide(each, q, kernel) for each in (whole.grad, whole.out, v))
    dq, dk, dv = fused_backward(
        grad, q, k, wide, out, found.fused_args, (lse, *found.saved_tensors)
    )
    return dq, dk, dv[..., : v.shape[-1]]


def select_documents_in_spans(
    documents: PackedSequences, spans: TokenSpans, length: int
) -> PackedSequences:
    """Return documents as they lie among some tokens of each sequence; many may be empty."""
    key = ("spans", spans)
    if key not in documents.cache:
        size = sum(span.size for span in spans)
        row, column = (
            documents.cu_seqlens.div(length, rounding_mode="floor"),
            documents.cu_seqlens % length,
        )
        starts = row * size
        for span in spans:
            starts = starts + (column - span.start).clamp(0, span.size)
        documents.cache[key] = PackedSequences(starts.int(), min(size, documents.max_length))
    found: PackedSequences = documents.cache[key]
    return found


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, part: AttentionPart, rule: AttentionRule
) -> AttentionBackend | None:
    """Return the fused kernel that computes a part, if there is one."""
    if rule.preferred_backend == "reference":
        return None
    in_one_run = len(part.query_spans) == len(part.key_spans) == 1
    if rule.window is not None and not (rule.causal and part.is_aligned and in_one_run):
        return None
    case = make_attention_case(
        q, k, v, causal=part.is_aligned, softcap=rule.softcap, documents=rule.documents,
        alibi=rule.alibi,
    )  # fmt: skip
    case = replace(case, has_window=rule.window is not None)
    kernel = select_attention_backend(
        case, rule.preferred_backend if rule.preferred_backend in _FUSED else None
    ).backend
    same = part.query_spans == part.key_spans
    if kernel not in _FUSED or (part.is_aligned and not same and kernel != "flash"):
        return None
    return kernel


def _documents(
    part: AttentionPart, rule: AttentionRule
) -> tuple[PackedSequences | None, PackedSequences | None]:
    """Return the documents among the queries and among the keys."""
    if rule.documents is None:
        return None, None
    spans = (part.query_spans, part.key_spans)
    first, second = (
        select_documents_in_spans(rule.documents, each, rule.sequence_length) for each in spans
    )
    return first, second


def _as_wide(v: Tensor, q: Tensor, kernel: AttentionBackend) -> Tensor:
    """Pad values to the width of keys where the kernel wants it."""
    lacking = q.shape[-1] - v.shape[-1]
    return functional.pad(v, (0, lacking)) if kernel == "flash" and lacking > 0 else v


class _Rows(NamedTuple):
    """A run of queries written out."""

    where: slice
    scores: Tensor
    """(B, K, G, T, S), as the softmax reads them: −∞ where nothing is seen."""
    capped: Tensor | None
    """The same before slopes and masks, where they are capped."""


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    """Cut the queries into runs whose scores fit."""
    each = q.shape[0] * q.shape[2] * k.shape[1] * 4
    most = max(1, MAX_SCORE_BYTES // max(1, each))
    return [slice(first, first + most) for first in range(0, q.shape[1], most)]


def _scores(q: Tensor, k: Tensor, where: slice, part: AttentionPart, rule: AttentionRule) -> _Rows:
    batch, kv_heads, kind = q.shape[0], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q_BTKGE = q[:, where].to(kind).unflatten(2, (kv_heads, -1))
    scores = torch.einsum("btkge,bske->bkgts", q_BTKGE, k.to(kind)) * rule.scale
    capped = None
    if rule.softcap is not None:
        capped = scores = rule.softcap * torch.tanh(scores / rule.softcap)
    at_T, at_S = _places(part.query_spans, q.device)[where], _places(part.key_spans, q.device)
    behind_TS = at_T[:, None] - at_S[None, :]
    if rule.alibi is not None:
        scores = scores - rule.alibi.to(kind).view(kv_heads, -1, 1, 1) * behind_TS
    seen = torch.ones_like(behind_TS, dtype=torch.bool)
    if rule.causal:
        seen = behind_TS >= 0
    if rule.window is not None:
        near = behind_TS < rule.window
        seen = seen & (near if rule.causal else near & (behind_TS > -rule.window))
    seen_BTS = seen[None]
    if rule.documents is not None:
        ids_BL = rule.documents.ids(batch, rule.sequence_length)
        seen_BTS = seen_BTS & (ids_BL[:, at_T, None] == ids_BL[:, None, at_S])
    return _Rows(where, scores.masked_fill(~seen_BTS[:, None, None], -math.inf), capped)


def _places(spans: TokenSpans, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, part: AttentionPart, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(q.dtype, torch.float32)
    outs, sums = [], []
    for where in _rows(q, k):
        scores = _scores(q, k, where, part, rule).scores
        lse = torch.logsumexp(scores, -1, keepdim=True)
        shares = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0))
        outs.append(torch.einsum("bkgts,bske->btkge", shares, v.to(kind)).flatten(2, 3))
        sums.append(lse[..., 0].permute(0, 3, 1, 2).flatten(2))
    return torch.cat(outs, 1), torch.cat(sums, 1)


def _plain_backward(
    tensors: QKVGradients, whole: MergedSoftmax, part: AttentionPart, rule: AttentionRule
) -> QKVGradients:
    q, k, v = tensors
    kind, kv_heads = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    k, v = k.to(kind), v.to(kind)
    dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
    for where in _rows(q, k):
        rows = _scores(q, k, where, part, rule)
        total, given, kept, asked = (
            each[:, where].to(kind).unflatten(2, (kv_heads, -1))
            for each in (whole.log_normalizer, whole.grad, whole.out, q)
        )
        shares = torch.exp(rows.scores - total.permute(0, 2, 3, 1)[..., None])
        dots = (given * kept).sum(-1).permute(0, 2, 3, 1)[..., None]
        slope = shares * (torch.einsum("btkge,bske->bkgts", given, v) - dots)
        if rows.capped is not None:
            assert rule.softcap is not None
            slope = slope * (1 - (rows.capped / rule.softcap).square())
        slope = slope * rule.scale
        dqs.append(torch.einsum("bkgts,bske->btkge", slope, k).flatten(2, 3))
        dk += torch.einsum("bkgts,btkge->bske", slope, asked)
        dv += torch.einsum("bkgts,btkge->bske", shares, given)
    return torch.cat(dqs, 1), dk, dv
