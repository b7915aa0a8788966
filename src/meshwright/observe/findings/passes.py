"""Patterns of kernels that only move data: passes over memory that fusing or layouts save."""

import numpy as np

from meshwright.observe.analyze.spans import COMPUTE, Flags
from meshwright.observe.findings.arithmetic import compute_capability
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import most_time, per_step, places, share, took

CHAIN = 3
NEAR = 4
"""So many kernels may stand between a softmax and the products around it."""


def _all_of(rank: Rank, own: Flags, part: float = 1.0) -> Hit | None:
    if not own.any():
        return None
    spent = int(rank.length[own].sum())
    evidence = (
        f"{took(spent)} in {per_step(rank, own.sum())} kernels, {share(spent, rank.window_ns)} of "
        "the time",
        *most_time(rank, own),
    )
    return Hit(spent * part, evidence, places(rank, own))


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
    # Casts and strided copies are part of a chain, but patterns of their own have their time.
    own = chained & (count >= CHAIN) & ~rank.kernels("cast", "strided copy")[order]
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
        name="casts",
        title="Tensors are cast between element types",
        family="passes",
        detected="kernels that copy with a change of type",
        cost="measured: their time",
        remedy="keep weights in the type of compute (model.to(torch.bfloat16), or FSDP "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16)); torch.compile fuses casts into "
        "neighbours",
        least_share=0.03,
    )
)
def casts(rank: Rank) -> Hit | None:
    """Casts."""
    return _all_of(rank, rank.kernels("cast"))


@of_rank(
    Pattern(
        name="strided-copies",
        title="Tensors are copied to become contiguous",
        family="passes",
        detected="kernels that copy strided tensors without a change of type",
        cost="measured: their time",
        remedy="drop .contiguous(), permute and expand before kernels that take strides; keep one "
        "layout from projection to attention; torch.compile",
        least_share=0.03,
    )
)
def strided_copies(rank: Rank) -> Hit | None:
    """Copies that follow permute, expand, slices."""
    own = rank.kernels("strided copy")
    return _all_of(rank, own & ~rank.kernels("cast"))


@of_rank(
    Pattern(
        name="concatenation",
        title="Tensors are concatenated",
        family="passes",
        detected="kernels of torch.cat and torch.stack",
        cost="measured: their time",
        remedy="write into slices of a preallocated tensor (out=), keep the parts apart, or "
        "torch.compile",
        least_share=0.03,
    )
)
def concatenation(rank: Rank) -> Hit | None:
    """torch.cat."""
    return _all_of(rank, rank.kernels("concatenation"))


@of_rank(
    Pattern(
        name="layout-conversion",
        title="Images change between NCHW and NHWC",
        family="passes",
        detected="kernels that convert layouts around convolutions",
        cost="measured: their time",
        remedy="model.to(memory_format=torch.channels_last) and "
        "x.to(memory_format=torch.channels_last)",
        least_share=0.02,
    )
)
def layout_conversion(rank: Rank) -> Hit | None:
    """Layouts."""
    return _all_of(rank, rank.kernels("layout"))


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
    order = np.flatnonzero((rank.spans.kind == COMPUTE) & (rank.spans.lane == rank.main_lane))
    soft = np.flatnonzero(rank.kernels("softmax")[order])
    product = np.flatnonzero(rank.kernels("product")[order])
    if not soft.size or not product.size:
        return None
    place = np.searchsorted(product, soft)
    has = (place > 0) & (place < product.size)
    soft, place = soft[has], place[has]
    before, after = product[place - 1], product[place]
    near = (soft - before <= NEAR) & (after - soft <= NEAR)
    if not near.any():
        return None
    which = np.zeros(rank.length.size, dtype=np.bool_)
    for low, high in zip(before[near].tolist(), after[near].tolist(), strict=True):
        which[order[low + 1 : high]] = True
    hit = _all_of(rank, which)
    if hit is None:
        return None
    first = f"{int(near.sum())} times product, softmax, product"
    return hit._replace(evidence=(first, *hit.evidence))


@of_rank(
    Pattern(
        name="slow-attention-backend",
        title="Attention runs on the memory-efficient backend",
        family="passes",
        detected="kernels of the memory-efficient attention (CUTLASS) in 16 bits on a device of "
        "compute capability 8 or more, where flash attention runs",
        cost="estimated: half of their time (FlashAttention-2 is about twice as fast: Dao 2023)",
        remedy="give scaled_dot_product_attention what flash takes: 16 bits, head size up to 256, "
        "is_causal=True instead of attn_mask=...; or sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
        least_share=0.02,
    )
)
def slow_attention_backend(rank: Rank) -> Hit | None:
    """The fallback of scaled_dot_product_attention."""
    if (compute_capability(rank) or 0) < 8:
        return None
    return _all_of(rank, rank.kernels("efficient attention") & rank.kernels("half"), 0.5)


@of_rank(
    Pattern(
        name="unfused-cross-entropy",
        title="The loss passes over the logits several times",
        family="passes",
        detected="kernels of log-softmax and negative log-likelihood, forward and backward, of "
        "PyTorch's own (not compiled)",
        cost="estimated: half of their time; forward and backward each read and write the logits",
        remedy="a fused or chunked loss: liger_kernel LigerFusedLinearCrossEntropyLoss, "
        "or torch.compile around the head and the loss",
        least_share=0.02,
    )
)
def unfused_cross_entropy(rank: Rank) -> Hit | None:
    """log_softmax over the vocabulary."""
    return _all_of(rank, rank.kernels("loss") & ~rank.named("triton"), 0.5)


@of_rank(
    Pattern(
        name="dense-embedding-gradient",
        title="Gradients of embeddings are summed in a dense table",
        family="passes",
        detected="kernels of the dense backward of nn.Embedding",
        cost="measured: their time",
        remedy="nn.Embedding(..., sparse=True) with a sparse optimizer, or a fused table "
        "(fbgemm TableBatchedEmbedding)",
        least_share=0.02,
    )
)
def dense_embedding_gradient(rank: Rank) -> Hit | None:
    """embedding_dense_backward."""
    return _all_of(rank, rank.kernels("embedding gradient"))


@of_rank(
    Pattern(
        name="sorted-index-gradient",
        title="Gradients of an index are sorted before they are summed",
        family="passes",
        detected="kernels of the backward of tensor[index] (indexing_backward_kernel)",
        cost="measured: their time",
        remedy="torch.index_select or F.embedding instead of tensor[index] (their backward adds "
        "atomically), torch.use_deterministic_algorithms(False)",
        least_share=0.02,
    )
)
def sorted_index_gradient(rank: Rank) -> Hit | None:
    """index_put_(accumulate=True)."""
    return _all_of(rank, rank.kernels("index gradient"))
