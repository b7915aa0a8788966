"""Bytes a block keeps between forward and backward for each token, tensor by tensor.

Formats: activations in two bytes (four under fp32), flash-style attention (no score matrix), no
dropout masks. For a plain GPT block this is Korthikanti et al. 2022 (arXiv 2205.05198), equation 4
without its masks and scores: 32 bytes per token and channel. Each tensor carries the recompute
operation that would drop it and the axis that splits it. It does not know how many are in flight.
"""

from collections.abc import Iterator
from functools import lru_cache
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

Recomputed = tuple[RecomputeOp, ...] | Literal["alternate"]
"""The operations computed again, or all but every second product (PyTorch's selective way)."""

LOW_BYTES = {
    "fp8-tensorwise": 1.0,
    "fp8-rowwise": 1.0,
    "fp8-blockwise": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of one number with its share of scales, in the formats of products below two bytes."""


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
    part: Literal["stream", "mixer", "mlp"] = "stream"
    """The part of the block that makes it."""
    feeds: bool = False
    """Only products read it, so that it may lie in their format."""
    alternate: float = 1.0
    """The share kept where every second product's output is kept and all else computed again."""


def is_native(layout: Layout, software: Software) -> bool:
    """Return whether PyTorch's own autograd and sharding hold the memory, not Megatron's."""
    return software.fusion in {"eager", "native"} or layout.zero == 3


def recomputed(layout: Layout, software: Software) -> Recomputed:
    """Return what selective recompute computes again in some software.

    Where PyTorch's own machinery runs it and no operation is named, it keeps the output of every
    second product. Naming the attention core alone says no more where that is a flash kernel.
    """
    if layout.recompute != "selective":
        return ()
    named = set(layout.recompute_ops) - {"core_attn"}
    flash = software.attention != "unfused"
    native = is_native(layout, software)
    return "alternate" if native and flash and not named else layout.recompute_ops


@lru_cache(maxsize=4096)
def saved_tensors(
    block: Block, hidden: int, software: Software = MEGATRON, length: int = 0
) -> tuple[Saved, ...]:
    """List what one block keeps for backward in sequences of `length` tokens."""
    found = [*_unfused(block, hidden, software, length)]
    if block.mixer is not None:
        found += _norm_pair("mixer", hidden)
        found += (saved._replace(part="mixer") for saved in _mixer(block.mixer))
    if block.mlp is not None:
        dense = isinstance(block.mlp, Mlp)
        if block.norms != "parallel-shared" or block.mixer is None:
            found += _norm_pair("mlp", hidden, feeds=dense)
        tensors = _mlp(block.mlp) if isinstance(block.mlp, Mlp) else _experts(block.mlp, hidden)
        found += (saved._replace(part="mlp") for saved in tensors)
    return tuple(found)


def bytes_per_token(
    layout: Layout,
    block: Block,
    hidden: int,
    recomputed: Recomputed = (),
    *,
    software: Software = MEGATRON,
    length: int = 0,
) -> float:
    """Return the bytes one token leaves on one rank after a forward pass through a block."""
    total = 0.0
    for saved in saved_tensors(block, hidden, software, length):
        if recomputed == "alternate":
            total += saved.alternate * saved_bytes(layout, saved, software)
        elif not saved.dropped_by.intersection(recomputed):
            total += saved_bytes(layout, saved, software)
    return total


def saved_bytes(layout: Layout, saved: Saved, software: Software = MEGATRON) -> float:
    """Return the bytes per token of one tensor on one rank."""
    number = 4.0 if layout.precision == "fp32" else 2.0
    if is_native(layout, software):
        # Autograd keeps what a product read, which is gathered over tensor ranks by then.
        gathered = saved.feeds and saved.split == "sequence"
        return number * saved.width / (1 if gathered else _ranks(layout, saved))
    low = LOW_BYTES.get(layout.precision, number)
    if saved.name == "attention_out" and low < number:
        # Attention keeps its output as it is; the projection keeps a cast one beside it.
        number += low
    elif saved.feeds:
        number = low
    return number * saved.width / _ranks(layout, saved)


def backward_bytes_per_token(
    layout: Layout,
    block: Block,
    hidden: int,
    *,
    software: Software = MEGATRON,
    length: int = 0,
) -> float:
    """Return the bytes alive inside a block only while its backward runs, per token.

    The feed-forward part goes first and the mixer when that is gone; each has as many gradients as
    tensors. Around them lie the stream's gradient and one product input gathered over tensor ranks.
    Context-parallel ranks hold others' keys and values: all of them, or those in use and the next.
    """
    parts = {"mixer": 0.0, "mlp": 0.0, "stream": 0.0}
    foreign = 0.0
    for saved in saved_tensors(block, hidden, software, length):
        size = saved_bytes(layout, saved, software)
        parts[saved.part] += size
        if saved.name == "kv" and layout.cp > 1:
            foreign = size * (layout.cp if layout.cp_kind == "allgather" else 2)
    number = 4 if layout.precision == "fp32" else 2
    widest = max(parts["mlp"], parts["mixer"] - parts["mlp"])
    return widest + foreign + 2 * number * hidden


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
    if software.attention == "unfused" and isinstance(block.mixer, Attention):
        # Softmax output, dropout mask and dropout output, 5 bytes a score (Korthikanti et al.).
        core: frozenset[RecomputeOp] = frozenset({"core_attn"})
        scores = 2.5 * block.mixer.heads * length
        yield Saved("scores", scores, "tensor", core, part="mixer")
        yield Saved("dropout_masks", hidden, "sequence")
    if software.fusion == "eager" and isinstance(block.mlp, Mlp) and block.mlp.gated:
        # A gate's activation is stored apart from its product with the other half.
        drops: frozenset[RecomputeOp] = frozenset({"mlp", "mlp_act"})
        yield Saved("gate_act", block.mlp.width, "tensor", drops, part="mlp", alternate=0.0)


def _norm_pair(part: str, hidden: int, *, feeds: bool = True) -> Iterator[Saved]:
    yield Saved(f"{part}_residual", hidden, "sequence")
    drops: frozenset[RecomputeOp] = frozenset({"layernorm"})
    if part == "mlp":
        drops |= {"mlp", "moe"}
    yield Saved(f"{part}_norm_out", hidden, "sequence", drops, feeds=feeds, alternate=0.0)


def _mixer(mixer: Mixer) -> Iterator[Saved]:
    match mixer:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=width):
            queries = heads * width * (2 if mixer.gate else 1)
            yield Saved("q", queries, "tensor")
            yield Saved("kv", 2 * kv_heads * width, "tensor", most_shards=kv_heads, alternate=0.5)
            yield Saved("attention_out", heads * width, "tensor")
        case LatentAttention():
            up: frozenset[RecomputeOp] = frozenset({"mla_up_proj"})
            key = mixer.nope_dim + mixer.rope_dim
            down = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim
            values = mixer.heads * (key + mixer.value_dim)
            yield Saved("latents", 2 * down, "sequence", alternate=0.5)
            yield Saved("q", mixer.heads * key, "tensor", up, alternate=0.5)
            yield Saved("kv", values, "tensor", up, alternate=0.5)
            yield Saved("attention_out", mixer.heads * mixer.value_dim, "tensor")
        case GatedDelta():
            keys = 2 * mixer.key_heads * mixer.key_dim
            values = mixer.value_heads * mixer.value_dim
            # The input and the output of the convolution, the gate, and the read-out.
            yield Saved("mixed", 2 * (keys + values), "tensor", alternate=0.5)
            yield Saved("gate_and_out", 3 * values, "tensor", alternate=0.5)
        case Mamba2():
            inner = mixer.heads * mixer.head_dim
            states = 2 * mixer.groups * mixer.state_dim
            yield Saved("mixed", 2 * (inner + states), "tensor", alternate=0.5)
            yield Saved("gate_and_out", 3 * inner, "tensor", alternate=0.5)


def _mlp(mlp: Mlp) -> Iterator[Saved]:
    whole: frozenset[RecomputeOp] = frozenset({"mlp"})
    halves = 2 if mlp.gated else 1
    yield Saved("mlp_in", halves * mlp.width, "tensor", whole, alternate=1 / halves)
    drops: frozenset[RecomputeOp] = whole | {"mlp_act"}
    yield Saved("mlp_act", mlp.width, "tensor", drops, feeds=True, alternate=0.0)


def _experts(experts: Experts, hidden: int) -> Iterator[Saved]:
    whole: frozenset[RecomputeOp] = frozenset({"moe"})
    halves = 2 if experts.gated else 1
    inner = experts.width * experts.top_k
    # Router scores are kept in fp32: twice the width of a two-byte number.
    yield Saved("router_scores", 2 * experts.count, "sequence", whole)
    # Their weights are applied inside the experts, so that backward needs no expert's output.
    width = (experts.latent or hidden) * experts.top_k
    yield Saved("dispatched", width, "routed", whole, feeds=True)
    # A rank sees tp/expert_tp times fewer tokens and 1/expert_tp of each expert's width.
    yield Saved("experts_in", halves * inner, "tensor", whole, alternate=1 / halves)
    acts: frozenset[RecomputeOp] = whole | {"moe_act"}
    yield Saved("experts_act", inner, "tensor", acts, feeds=True, alternate=0.0)
    if experts.shared_width:
        shared: frozenset[RecomputeOp] = whole | {"shared_experts"}
        width = experts.shared_width
        yield Saved("shared_in", halves * width, "tensor", shared, alternate=1 / halves)
        yield Saved("shared_act", width, "tensor", shared, feeds=True, alternate=0.0)
