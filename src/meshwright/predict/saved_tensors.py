"""What a block keeps between forward and backward, tensor by tensor.

Each tensor carries the recompute operations that would drop it, the axis that splits it and the
products that read it. For a plain GPT block they are those of Korthikanti et al. 2022 (arXiv
2205.05198), equation 4 without its dropout masks and scores. How many bytes a number takes is not
known here.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from meshwright.predict.adapters import adapted_products, shares_pairs
from meshwright.predict.software import MEGATRON, Software
from meshwright.spec.layout import RecomputeOp
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
from meshwright.spec.workload import Adapter, Target

Reader = Target | Literal["router"]
Split = Literal["tensor", "routed", "sequence", "none"]


class Saved(NamedTuple):
    """One tensor that backward needs."""

    name: str
    width: float
    """Numbers per token."""
    split: Split
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
    read_by: tuple[Reader, ...] = ()
    """The products that read it, in the words of adapters."""
    frozen: float = 0.0
    """The share kept where those products are frozen and carry no adapter: what other operations
    need for backward."""
    gathered: bool = False
    """Its products read it whole where tensor ranks split the sequence, and adapters keep it so."""
    routed: bool = False
    """It grows with the tokens that are sent to a rank's experts."""


@lru_cache(maxsize=4096)
def saved_tensors(
    block: Block, hidden: int, software: Software = MEGATRON, length: int = 0
) -> tuple[Saved, ...]:
    """List what one block keeps for backward in sequences of `length` tokens."""
    found = [*_unfused(block, hidden, software, length)]
    mixer, mlp = block.mixer, block.mlp
    one_norm = block.norms == "parallel-shared" and mixer is not None
    into_mlp = _reads_norm(mlp)
    if mixer is not None:
        # Latents are made from a rank's own tokens, all else from those of all tensor ranks.
        gathered = not isinstance(mixer, LatentAttention)
        read_by = ("qkv", *into_mlp) if one_norm else ("qkv",)
        found += _norm_pair("mixer", hidden, read_by, gathered=gathered)
        found += (saved._replace(part="mixer") for saved in _mixer(mixer))
    if mlp is not None:
        if not one_norm:
            found += _norm_pair("mlp", hidden, into_mlp, feeds=isinstance(mlp, Mlp))
        tensors = _mlp(mlp) if isinstance(mlp, Mlp) else _experts(mlp, hidden)
        found += (saved._replace(part="mlp") for saved in tensors)
    return tuple(found)


def _reads_norm(mlp: Mlp | Experts | None) -> tuple[Reader, ...]:
    """Return which products of a feed-forward part read the norm before it."""
    if isinstance(mlp, Experts):
        beside = mlp.shared_width or mlp.latent is not None
        return ("router", "up") if beside else ("router",)
    return ("up",) if mlp is not None else ()


@lru_cache(maxsize=4096)
def adapter_tensors(
    block: Block, hidden: int, adapter: Adapter, software: Software = MEGATRON
) -> tuple[Saved, ...]:
    """List what adapters keep beside their input: the numbers, as many as their rank, between."""
    drops: dict[str, frozenset[RecomputeOp]] = {
        "mlp": frozenset({"mlp"}),
        "shared": frozenset({"moe", "shared_experts"}),
        "expert": frozenset({"moe"}),
    }
    found = []
    weights = block.weights(hidden)
    for _, _, weight in adapted_products(weights, adapter, 1, not shares_pairs(software)):
        routed = weight.part == "expert"
        split: Split = "sequence" if weight.split == "none" else "none"
        found.append(
            Saved(
                f"{weight.name}_adapter",
                adapter.rank * weight.active,
                "routed" if routed else split,
                drops.get(weight.part, frozenset()),
                part="mixer" if weight.part == "mixer" else "mlp",
                routed=routed,
            )
        )
    return tuple(found)


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


def _norm_pair(
    part: str,
    hidden: int,
    read_by: tuple[Reader, ...],
    *,
    feeds: bool = True,
    gathered: bool = True,
) -> Iterator[Saved]:
    yield Saved(f"{part}_residual", hidden, "sequence")
    drops: frozenset[RecomputeOp] = frozenset({"layernorm"})
    if part == "mlp":
        drops |= {"mlp", "moe"}
    yield Saved(
        f"{part}_norm_out", hidden, "sequence", drops, feeds=feeds, alternate=0.0,
        read_by=read_by, gathered=gathered,
    )  # fmt: skip


def _mixer(mixer: Mixer) -> Iterator[Saved]:
    match mixer:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=width):
            queries = heads * width * (2 if mixer.gate else 1)
            yield Saved("q", queries, "tensor")
            yield Saved("kv", 2 * kv_heads * width, "tensor", most_shards=kv_heads, alternate=0.5)
            # Attention itself needs its output again.
            yield Saved("attention_out", heads * width, "tensor", read_by=("out",), frozen=1.0)
        case LatentAttention():
            up: frozenset[RecomputeOp] = frozenset({"mla_up_proj"})
            key = mixer.nope_dim + mixer.rope_dim
            down = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim
            values = mixer.heads * (key + mixer.value_dim)
            # Before their norms and after them.
            yield Saved(
                "latents", 2 * down, "sequence", alternate=0.5, read_by=("qkv",), frozen=0.5
            )
            yield Saved("q", mixer.heads * key, "tensor", up, alternate=0.5)
            yield Saved("kv", values, "tensor", up, alternate=0.5)
            out = mixer.heads * mixer.value_dim
            yield Saved("attention_out", out, "tensor", read_by=("out",), frozen=1.0)
        case GatedDelta():
            keys = 2 * mixer.key_heads * mixer.key_dim
            values = mixer.value_heads * mixer.value_dim
            # The input and the output of the convolution, the gate, and the read-out.
            yield Saved("mixed", 2 * (keys + values), "tensor", alternate=0.5)
            yield Saved(
                "gate_and_out", 3 * values, "tensor", alternate=0.5, read_by=("out",), frozen=2 / 3
            )
        case Mamba2():
            inner = mixer.heads * mixer.head_dim
            states = 2 * mixer.groups * mixer.state_dim
            yield Saved("mixed", 2 * (inner + states), "tensor", alternate=0.5)
            yield Saved(
                "gate_and_out", 3 * inner, "tensor", alternate=0.5, read_by=("out",), frozen=2 / 3
            )


def _mlp(mlp: Mlp) -> Iterator[Saved]:
    whole: frozenset[RecomputeOp] = frozenset({"mlp"})
    halves = 2 if mlp.gated else 1
    yield Saved("mlp_in", halves * mlp.width, "tensor", whole, alternate=1 / halves)
    drops: frozenset[RecomputeOp] = whole | {"mlp_act"}
    yield Saved("mlp_act", mlp.width, "tensor", drops, feeds=True, alternate=0.0, read_by=("down",))


def _experts(experts: Experts, hidden: int) -> Iterator[Saved]:
    whole: frozenset[RecomputeOp] = frozenset({"moe"})
    halves = 2 if experts.gated else 1
    inner = experts.width * experts.top_k
    # Router scores are kept in fp32: twice the width of a two-byte number.
    yield Saved("router_scores", 2 * experts.count, "sequence", whole)
    # Their weights are applied inside the experts, so that backward needs no expert's output.
    width = (experts.latent or hidden) * experts.top_k
    yield Saved("dispatched", width, "routed", whole, feeds=True, read_by=("experts",), routed=True)
    # A rank sees tp/expert_tp times fewer tokens and 1/expert_tp of each expert's width.
    yield Saved("experts_in", halves * inner, "tensor", whole, alternate=1 / halves, routed=True)
    acts: frozenset[RecomputeOp] = whole | {"moe_act"}
    yield Saved(
        "experts_act", inner, "tensor", acts, feeds=True, alternate=0.0, read_by=("experts",),
        routed=True,
    )  # fmt: skip
    if experts.shared_width:
        shared: frozenset[RecomputeOp] = whole | {"shared_experts"}
        width = experts.shared_width
        yield Saved("shared_in", halves * width, "tensor", shared, alternate=1 / halves)
        yield Saved(
            "shared_act", width, "tensor", shared, feeds=True, alternate=0.0, read_by=("down",)
        )
