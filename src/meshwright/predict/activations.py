"""Bytes a block keeps between forward and backward for each token, tensor by tensor.

Formats: activations in two bytes (four under fp32), flash-style attention (no score matrix), no
dropout masks. For a plain GPT block this is Korthikanti et al. 2022 (arXiv 2205.05198), equation 4
without its masks and scores: 32 bytes per token and channel. Each tensor carries the recompute
operation that would drop it and the axis that splits it.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.predict.software import MEGATRON, Software
from meshwright.spec.layout import Layout, RecomputeOp
from meshwright.spec.model import (
    Attention,
    Block,
    Experts,
    GatedDelta,
    LatentAttention,
    Mamba2,
    Mixer,
    Mlp,
)


class Saved(NamedTuple):
    """One tensor that backward needs."""

    name: str
    width: float
    """Numbers per token."""
    split: Literal["tensor", "routed", "sequence", "none"]
    """What cuts it: `tensor` parallelism, the spreading of `routed` tokens over tensor ranks,
    `sequence` parallelism, or `none`."""
    dropped_by: frozenset[RecomputeOp] = frozenset()
    """Recompute operations under which it is not kept."""
    most_shards: int | None = None
    """Tensor ranks beyond this many hold duplicates."""


def saved_tensors(
    block: Block, hidden: int, software: Software = MEGATRON, length: int = 0
) -> tuple[Saved, ...]:
    """List what one block keeps for backward in sequences of `length` tokens."""
    found = [*_unfused(block, hidden, software, length)]
    if block.mixer is not None:
        found += _norm_pair("mixer", hidden)
        found += _mixer(block.mixer)
    if block.mlp is not None:
        if block.norms != "parallel-shared" or block.mixer is None:
            found += _norm_pair("mlp", hidden)
        found += _mlp(block.mlp) if isinstance(block.mlp, Mlp) else _experts(block.mlp, hidden)
    return tuple(found)


def bytes_per_token(
    layout: Layout,
    block: Block,
    hidden: int,
    recomputed: tuple[RecomputeOp, ...] = (),
    *,
    software: Software = MEGATRON,
    length: int = 0,
) -> float:
    """Return the bytes one token leaves on one rank after a forward pass through a block."""
    number = 4 if layout.precision == "fp32" else 2
    dropped = frozenset(recomputed)
    total = 0.0
    for saved in saved_tensors(block, hidden, software, length):
        if not saved.dropped_by & dropped:
            total += number * saved.width / _ranks(layout, saved)
    return total


def boundary_bytes_per_token(layout: Layout, hidden: int) -> float:
    """Return the bytes of a layer's input, all that full recompute keeps of a layer."""
    number = 4 if layout.precision == "fp32" else 2
    return number * hidden / (layout.tp if layout.sequence_parallel else 1)


def _ranks(layout: Layout, saved: Saved) -> float:
    if saved.split == "tensor":
        return min(layout.tp, saved.most_shards or layout.tp)
    if saved.split == "routed":
        # A stage's tokens are spread over all its ranks; the ranks of one expert share theirs.
        return layout.tp / layout.experts_tp
    return layout.tp if saved.split == "sequence" and layout.sequence_parallel else 1


def _unfused(block: Block, hidden: int, software: Software, length: int) -> Iterator[Saved]:
    """What less fused software keeps on top."""
    if software.attention is None and isinstance(block.mixer, Attention):
        # Softmax output, dropout mask and dropout output, 5 bytes a score (Korthikanti et al.).
        core: frozenset[RecomputeOp] = frozenset({"core_attn"})
        yield Saved("scores", 2.5 * block.mixer.heads * length, "tensor", core)
        yield Saved("dropout_masks", hidden, "sequence")
    if software.fusion == "eager":
        # Norms work on a copy in fp32, and a gate's activation is stored apart from its product.
        parts = (block.mixer is not None) + (block.mlp is not None)
        yield Saved("norm_copies", 2.0 * parts * hidden, "sequence", frozenset({"layernorm"}))
        if isinstance(block.mlp, Mlp) and block.mlp.gated:
            yield Saved("gate_act", block.mlp.width, "tensor", frozenset({"mlp", "mlp_act"}))


def _norm_pair(part: str, hidden: int) -> Iterator[Saved]:
    yield Saved(f"{part}_residual", hidden, "sequence")
    drops: frozenset[RecomputeOp] = frozenset({"layernorm"})
    if part == "mlp":
        drops |= {"mlp", "moe"}
    yield Saved(f"{part}_norm_out", hidden, "sequence", drops)


def _mixer(mixer: Mixer) -> Iterator[Saved]:
    match mixer:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=width):
            queries = heads * width * (2 if mixer.gate else 1)
            yield Saved("q", queries, "tensor")
            yield Saved("kv", 2 * kv_heads * width, "tensor", most_shards=kv_heads)
            yield Saved("attention_out", heads * width, "tensor")
        case LatentAttention():
            up: frozenset[RecomputeOp] = frozenset({"mla_up_proj"})
            key = mixer.nope_dim + mixer.rope_dim
            down = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim
            yield Saved("latents", 2 * down, "sequence")
            yield Saved("q", mixer.heads * key, "tensor", up)
            yield Saved("kv", mixer.heads * (key + mixer.value_dim), "tensor", up)
            yield Saved("attention_out", mixer.heads * mixer.value_dim, "tensor")
        case GatedDelta():
            keys = 2 * mixer.key_heads * mixer.key_dim
            values = mixer.value_heads * mixer.value_dim
            # The input and the output of the convolution, the gate, and the read-out.
            yield Saved("mixed", 2 * (keys + values), "tensor")
            yield Saved("gate_and_out", 3 * values, "tensor")
        case Mamba2():
            inner = mixer.heads * mixer.head_dim
            yield Saved("mixed", 2 * (inner + 2 * mixer.groups * mixer.state_dim), "tensor")
            yield Saved("gate_and_out", 3 * inner, "tensor")


def _mlp(mlp: Mlp) -> Iterator[Saved]:
    whole: frozenset[RecomputeOp] = frozenset({"mlp"})
    yield Saved("mlp_in", (2 if mlp.gated else 1) * mlp.width, "tensor", whole)
    yield Saved("mlp_act", mlp.width, "tensor", whole | {"mlp_act"})


def _experts(experts: Experts, hidden: int) -> Iterator[Saved]:
    whole: frozenset[RecomputeOp] = frozenset({"moe"})
    width = (experts.latent or hidden) * experts.top_k
    inner = experts.width * experts.top_k
    # Router scores are kept in fp32: twice the width of a two-byte number.
    yield Saved("router_scores", 2 * experts.count, "sequence", whole)
    yield Saved("dispatched", width, "routed", whole)
    # A rank sees tp/expert_tp times fewer tokens and 1/expert_tp of each expert's width.
    yield Saved("experts_in", (2 if experts.gated else 1) * inner, "tensor", whole)
    yield Saved("experts_act", inner, "tensor", whole | {"moe_act"})
    yield Saved("experts_out", width, "routed", whole)
    if experts.shared_width:
        shared: frozenset[RecomputeOp] = whole | {"shared_experts"}
        yield Saved("shared", (3 if experts.gated else 2) * experts.shared_width, "tensor", shared)
