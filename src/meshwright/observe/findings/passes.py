"""Patterns of kernels that only move data: passes over memory that fusing or layouts save."""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.spans import COMPUTE, Flags
from meshwright.observe.findings.arithmetic import compute_capability
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import most_time, per_step, places, share, took

CHAIN = 3


def _all_of(rank: Rank, own: Flags, part: float = 1.0) -> Hit | None:
    if not own.any():
        return None
    spent = rank.alone_ns(own)
    evidence = (
        f"{took(spent)} in {per_step(rank, own.sum())} kernels, {share(spent, rank.window_ns)} of "
        "the time",
        *most_time(rank, own),
    )
    return Hit(spent * part, evidence, places(rank, own))


def _pass(
    name: str,
    title: str,
    *,
    kernels: Callable[[Rank], Flags],
    detected: str,
    remedy: str,
    least_share: float,
    saved: float = 1.0,
    cost: str = "measured: their time",
    serving: str = "",
) -> None:
    """A pattern of the time that some kernels take, of which a part would be saved.

    Kernels between attention's products are left out: `unfused-attention` has their time.
    """

    @of_rank(Pattern(name, title, "passes", detected, cost, remedy, least_share, serving))
    def detector(rank: Rank) -> Hit | None:
        return _all_of(rank, kernels(rank) & ~rank.scores, saved)


def _loss(rank: Rank) -> Flags:
    """Kernels of a loss, in training; a sampler's log-softmax is none."""
    own = rank.kernels("loss") & ~rank.named("triton")
    return own if rank.trains else np.zeros_like(own)


def _efficient_attention(rank: Rank) -> Flags:
    """Kernels of the fallback of scaled_dot_product_attention where flash attention would run."""
    own = rank.kernels("efficient attention") & rank.kernels("half")
    return own if (compute_capability(rank) or 0) >= 8 else np.zeros_like(own)


_pass(
    "casts",
    "Tensors are cast between element types",
    kernels=lambda rank: rank.kernels("cast"),
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
    kernels=lambda rank: rank.kernels("strided copy") & ~rank.kernels("cast"),
    detected="kernels that copy strided tensors without a change of type",
    remedy="drop .contiguous(), permute and expand before kernels that take strides; keep one "
    "layout from projection to attention; torch.compile",
    least_share=0.03,
)
_pass(
    "concatenation",
    "Tensors are concatenated",
    kernels=lambda rank: rank.kernels("concatenation"),
    detected="kernels of torch.cat and torch.stack",
    remedy="write into slices of a preallocated tensor (out=), keep the parts apart, or "
    "torch.compile",
    least_share=0.03,
)
_pass(
    "layout-conversion",
    "Images change between NCHW and NHWC",
    kernels=lambda rank: rank.kernels("layout"),
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
    kernels=lambda rank: rank.kernels("embedding gradient"),
    detected="kernels of the dense backward of nn.Embedding",
    remedy="nn.Embedding(..., sparse=True) with a sparse optimizer, or a fused table "
    "(fbgemm TableBatchedEmbedding)",
    least_share=0.02,
)
_pass(
    "sorted-index-gradient",
    "Gradients of an index are sorted before they are summed",
    kernels=lambda rank: rank.kernels("index gradient"),
    detected="kernels of the backward of tensor[index] (indexing_backward_kernel)",
    remedy="torch.index_select or F.embedding instead of tensor[index] (their backward adds "
    "atomically), torch.use_deterministic_algorithms(False)",
    least_share=0.02,
)


@of_rank(
    Pattern(
        name="unfused-elementwise",
        title="Elementwise operators run one by one",
        family="passes",
        detected="three or more elementwise kernels in a row on one stream, outside the optimizer "
        "and the accumulation of gradients",
        cost="estimated, at most: of a chain of k all but one k-th; each kernel reads and writes "
        "the tensor, a fused one does so once",
        remedy="torch.compile(model); fused modules (torch.nn.RMSNorm, "
        "F.scaled_dot_product_attention, Liger kernels)",
        least_share=0.03,
    )
)
def unfused_elementwise(rank: Rank) -> Hit | None:
    """Chains of elementwise kernels."""
    flat = rank.kernels("elementwise")
    if flat.sum() < CHAIN:
        return None
    flat = flat & ~rank.launched_in("updating", flat) & ~rank.launched_in("accumulating", flat)
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
    others = rank.kernels("cast", "strided copy") | rank.scores
    own = chained & (count >= CHAIN) & ~others[order]
    if not own.any():
        return None
    length = rank.length[order]
    cost = float((length[own] * (1 - 1 / count[own])).sum())
    which = np.zeros(rank.length.size, dtype=np.bool_)
    which[order[own]] = True
    evidence = (
        f"{per_step(rank, own.sum())} elementwise kernels in chains of {np.mean(count[own]):.0f}, "
        f"{took(length[own].sum())}",
        *most_time(rank, which),
    )
    return Hit(cost, evidence, places(rank, which))


@of_rank(
    Pattern(
        name="unfused-attention",
        title="Attention writes its scores to memory",
        family="passes",
        detected="a softmax with a product at most four kernels before it and one at most four "
        "after it, on the same stream",
        cost="measured: the softmax and what stands between the two products; a fused attention "
        "keeps the scores on chip (the products' own gain is not counted)",
        remedy="F.scaled_dot_product_attention(q, k, v) with no output_attentions=True "
        '(transformers: attn_implementation="sdpa" or "flash_attention_2")',
        least_share=0.02,
    )
)
def unfused_attention(rank: Rank) -> Hit | None:
    """Product, softmax, product."""
    hit = _all_of(rank, rank.scores)
    if hit is None:
        return None
    number = int((rank.scores & rank.kernels("softmax")).sum())
    return hit._replace(evidence=(f"{number} times product, softmax, product", *hit.evidence))
