"""Patterns of kernels that only move data: passes over memory that fusing or layouts save."""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.spans.intervals import COMPUTE, Flags
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    format_top_kernels,
    select_longest_device_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration, format_share

MIN_CHAIN_LENGTH = 3


def _all_of(rank: RankContext, own: Flags, part: float = 1.0) -> Detection | None:
    if not own.any():
        return None
    spent = rank.measure_uncontended_ns(own)
    evidence = (
        f"{format_duration(spent)} in {format_per_step(rank, own.sum())} kernels, "
        f"{format_share(spent, rank.window_ns)} of "
        "the time",
        *format_top_kernels(rank, own),
    )
    return Detection(spent * part, evidence, select_longest_device_spans(rank, own))


def _pass(
    name: str,
    title: str,
    *,
    kernels: Callable[[RankContext], Flags],
    detected: str,
    remedy: str,
    least_share: float,
    saved: float = 1.0,
    cost: str = "measured: their time",
    serving: str = "",
) -> None:
    """A pattern of the time that some kernels take, of which a part would be saved.

    Kernels between attention's GEMMs are left out: `unfused-attention` has their time.
    """

    @detects_on_rank(Pattern(name, title, "fusion", detected, cost, remedy, least_share, serving))
    def detector(rank: RankContext) -> Detection | None:
        return _all_of(rank, kernels(rank) & ~rank.attention_score_kernels, saved)


def _loss(rank: RankContext) -> Flags:
    """Kernels of a loss, in training; a sampler's log-softmax is none."""
    own = rank.match_kernels("loss") & ~rank.match_names("triton")
    return own if rank.is_training else np.zeros_like(own)


def _efficient_attention(rank: RankContext) -> Flags:
    """Kernels of the fallback of scaled_dot_product_attention where flash attention would run."""
    own = rank.match_kernels("efficient attention") & rank.match_kernels("half")
    return own if (rank.find_compute_capability() or 0) >= 8 else np.zeros_like(own)


_pass(
    "dtype-casts",
    "Tensors are cast between element types",
    kernels=lambda rank: rank.match_kernels("cast"),
    detected="kernels that copy with a change of type",
    remedy="keep weights in the type of compute (model.to(torch.bfloat16), or FSDP "
    "MixedPrecisionPolicy(param_dtype=torch.bfloat16)); torch.compile fuses casts into neighbours",
    serving="load weights in the type of compute (torch_dtype=torch.bfloat16, no autocast); "
    "torch.compile fuses casts into neighbours",
    least_share=0.03,
)
_pass(
    "strided-copies",
    "Tensors are copied to become contiguous",
    kernels=lambda rank: rank.match_kernels("strided copy") & ~rank.match_kernels("cast"),
    detected="kernels that copy strided tensors without a change of type",
    remedy="drop .contiguous(), permute and expand before kernels that take strides; keep one "
    "layout from projection to attention; torch.compile",
    least_share=0.03,
)
_pass(
    "concatenation",
    "Tensors are concatenated",
    kernels=lambda rank: rank.match_kernels("concatenation"),
    detected="kernels of torch.cat and torch.stack",
    remedy="write into slices of a preallocated tensor (out=), keep the parts apart, or "
    "torch.compile",
    least_share=0.03,
)
_pass(
    "layout-conversion",
    "Images change between NCHW and NHWC",
    kernels=lambda rank: rank.match_kernels("layout"),
    detected="kernels that convert layouts around convolutions",
    remedy="model.to(memory_format=torch.channels_last) and "
    "x.to(memory_format=torch.channels_last)",
    least_share=0.02,
)
_pass(
    "slow-attention-backend",
    "Attention runs on the memory-efficient backend",
    kernels=_efficient_attention,
    detected="kernels of the memory-efficient attention (CUTLASS) in 16 bits on a device of "
    "compute capability 8 or more, where flash attention runs",
    saved=0.5,
    cost="estimated: half of their time (FlashAttention-2 is about twice as fast: Dao 2023)",
    remedy="give scaled_dot_product_attention what flash takes: 16 bits, head size up to 256, "
    "is_causal=True instead of attn_mask=...; or sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
    least_share=0.02,
)
_pass(
    "unfused-cross-entropy",
    "The loss passes over the logits several times",
    kernels=_loss,
    detected="in training, kernels of log-softmax and negative log-likelihood, forward and "
    "backward, of PyTorch's own (not compiled)",
    saved=0.5,
    cost="estimated: half of their time; forward and backward each read and write the logits",
    remedy="a fused or chunked loss: liger_kernel LigerFusedLinearCrossEntropyLoss, "
    "or torch.compile around the head and the loss",
    least_share=0.02,
)
_pass(
    "dense-embedding-gradient",
    "Gradients of embeddings are summed in a dense table",
    kernels=lambda rank: rank.match_kernels("embedding gradient"),
    detected="kernels of the dense backward of nn.Embedding",
    remedy="nn.Embedding(..., sparse=True) with a sparse optimizer, or a fused table "
    "(fbgemm TableBatchedEmbedding)",
    least_share=0.02,
)
_pass(
    "sorted-index-gradient",
    "Gradients of an index are sorted before they are summed",
    kernels=lambda rank: rank.match_kernels("index gradient"),
    detected="kernels of the backward of tensor[index] (indexing_backward_kernel)",
    remedy="torch.index_select or F.embedding instead of tensor[index] (their backward adds "
    "atomically), torch.use_deterministic_algorithms(False)",
    least_share=0.02,
)


@detects_on_rank(
    Pattern(
        name="unfused-elementwise",
        title="Elementwise operators run one by one",
        family="fusion",
        rule="three or more elementwise kernels in a row on one stream, outside the optimizer "
        "and the accumulation of gradients",
        cost_basis="estimated, at most: of a chain of k all but one k-th; each kernel reads and "
        "writes "
        "the tensor, a fused one does so once",
        remedy="torch.compile(model); fused modules (torch.nn.RMSNorm, "
        "F.scaled_dot_product_attention, Liger kernels)",
        min_cost=0.03,
    )
)
def detect_unfused_elementwise(rank: RankContext) -> Detection | None:
    """Chains of elementwise kernels."""
    flat = rank.match_kernels("elementwise")
    if flat.sum() < MIN_CHAIN_LENGTH:
        return None
    flat = (
        flat
        & ~rank.match_launched_in("updating", flat)
        & ~rank.match_launched_in("accumulating", flat)
    )
    order = np.lexsort((rank.spans.start, rank.spans.lane))
    order = order[rank.spans.kind[order] == COMPUTE]
    lane, chained = rank.spans.lane[order], flat[order]
    if not order.size:
        return None
    new = np.append(True, (lane[1:] != lane[:-1]) | (chained[1:] != chained[:-1]))
    number = np.cumsum(new) - 1
    count = np.bincount(number)[number]
    # Casts, strided copies and attention's scores may be part of a chain, but patterns of their
    # own have their time.
    others = rank.match_kernels("cast", "strided copy") | rank.attention_score_kernels
    own = chained & (count >= MIN_CHAIN_LENGTH) & ~others[order]
    if not own.any():
        return None
    length = rank.duration_ns[order]
    cost = float((length[own] * (1 - 1 / count[own])).sum())
    which = np.zeros(rank.duration_ns.size, dtype=np.bool_)
    which[order[own]] = True
    evidence = (
        f"{format_per_step(rank, own.sum())} elementwise kernels in chains of "
        f"{np.mean(count[own]):.0f}, "
        f"{format_duration(length[own].sum())}",
        *format_top_kernels(rank, which),
    )
    return Detection(cost, evidence, select_longest_device_spans(rank, which))


@detects_on_rank(
    Pattern(
        name="unfused-attention",
        title="Attention writes its scores to memory",
        family="fusion",
        rule="a softmax with a GEMM at most four kernels before it and one at most four "
        "after it, on the same stream",
        cost_basis="measured: the softmax and what stands between the two GEMMs; a fused "
        "attention "
        "keeps the scores on chip (the GEMMs' own gain is not counted)",
        remedy="F.scaled_dot_product_attention(q, k, v) with no output_attentions=True "
        '(transformers: attn_implementation="sdpa" or "flash_attention_2")',
        min_cost=0.02,
    )
)
def detect_unfused_attention(rank: RankContext) -> Detection | None:
    """GEMM, softmax, GEMM."""
    hit = _all_of(rank, rank.attention_score_kernels)
    if hit is None:
        return None
    number = int((rank.attention_score_kernels & rank.match_kernels("softmax")).sum())
    return hit._replace(
        evidence=(f"{number} times GEMM, softmax, GEMM (unfused attention)", *hit.evidence)
    )
