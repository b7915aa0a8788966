"""What a block keeps between forward and backward, tensor by tensor.

Each tensor carries the recompute operations that would drop it, the axis that splits it and the
products that read it. For a plain GPT block they are those of Korthikanti et al. 2022 (arXiv
2205.05198), equation 4 without its dropout masks and scores. How many bytes a number takes is not
known here.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from meshwright.predict.training_run.lora_shapes import fuses_adapter_pairs, list_adapted_gemms
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.spec.layout import RecomputeOp
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    MLPSpec,
    MoESpec,
)
from meshwright.spec.workload import LoRASpec, LoRATarget

TensorReader = LoRATarget | Literal["router"]
TensorSplit = Literal["tensor", "routed", "sequence", "none"]


class ActivationTensor(NamedTuple):
    """One tensor that backward needs."""

    name: str
    width: float
    """Numbers per token."""
    split: TensorSplit
    """What cuts it: `tensor` parallelism, the spreading of `routed` tokens over tensor ranks,
    `sequence` parallelism, or `none`."""
    dropped_by: frozenset[RecomputeOp] = frozenset()
    """Recompute operations under which it is not kept."""
    max_shards: int | None = None
    """Tensor ranks beyond this many hold duplicates."""
    part: Literal["stream", "mixer", "mlp"] = "stream"
    """The part of the block that makes it."""
    is_gemm_input: bool = False
    """Only products read it, so that it may lie in their format."""
    alternate_share: float = 1.0
    """The share kept where every second product's output is kept and all else computed again."""
    read_by: tuple[TensorReader, ...] = ()
    """The products that read it, in the words of adapters."""
    frozen_share: float = 0.0
    """The share kept where those products are frozen and carry no adapter: what other operations
    need for backward."""
    is_all_gathered: bool = False
    """Its products read it whole where tensor ranks split the sequence, and adapters keep it so."""
    is_routed: bool = False
    """It grows with the tokens that are sent to a rank's experts."""


@lru_cache(maxsize=4096)
def list_saved_tensors(
    block: BlockSpec, hidden: int, software: TrainingFramework = MEGATRON, length: int = 0
) -> tuple[ActivationTensor, ...]:
    """List what one block keeps for backward in sequences of `length` tokens."""
    found = [*_unfused(block, hidden, software, length)]
    mixer, mlp = block.mixer, block.mlp
    one_norm = block.norms == "parallel-shared" and mixer is not None
    into_mlp = _reads_norm(mlp)
    if mixer is not None:
        # Latents are made from a rank's own tokens, all else from those of all tensor ranks.
        gathered = not isinstance(mixer, LatentAttentionSpec)
        read_by = ("qkv", *into_mlp) if one_norm else ("qkv",)
        found += _norm_pair("mixer", hidden, read_by, gathered=gathered)
        found += (saved._replace(part="mixer") for saved in _mixer(mixer))
    if mlp is not None:
        if not one_norm:
            found += _norm_pair("mlp", hidden, into_mlp, feeds=isinstance(mlp, MLPSpec))
        tensors = _mlp(mlp) if isinstance(mlp, MLPSpec) else _experts(mlp, hidden)
        found += (saved._replace(part="mlp") for saved in tensors)
    return tuple(found)


def _reads_norm(mlp: MLPSpec | MoESpec | None) -> tuple[TensorReader, ...]:
    """Return which products of a feed-forward part read the norm before it."""
    if isinstance(mlp, MoESpec):
        beside = mlp.shared_width or mlp.latent is not None
        return ("router", "up") if beside else ("router",)
    return ("up",) if mlp is not None else ()


@lru_cache(maxsize=4096)
def list_adapter_tensors(
    block: BlockSpec, hidden: int, adapter: LoRASpec, software: TrainingFramework = MEGATRON
) -> tuple[ActivationTensor, ...]:
    """List what adapters keep beside their input: the numbers, as many as their rank, between."""
    drops: dict[str, frozenset[RecomputeOp]] = {
        "mlp": frozenset({"mlp"}),
        "shared": frozenset({"moe", "shared_experts"}),
        "expert": frozenset({"moe"}),
    }
    found = []
    weights = block.list_weights(hidden)
    for _, _, weight in list_adapted_gemms(weights, adapter, 1, not fuses_adapter_pairs(software)):
        routed = weight.part == "expert"
        split: TensorSplit = "sequence" if weight.split == "none" else "none"
        found.append(
            ActivationTensor(
                f"{weight.name}_adapter",
                adapter.rank * weight.active,
                "routed" if routed else split,
                drops.get(weight.part, frozenset()),
                part="mixer" if weight.part == "mixer" else "mlp",
                is_routed=routed,
            )
        )
    return tuple(found)


def _unfused(
    block: BlockSpec, hidden: int, software: TrainingFramework, length: int
) -> Iterator[ActivationTensor]:
    """What less fused software keeps on top."""
    if software.attention == "unfused" and isinstance(block.mixer, AttentionSpec):
        # Softmax output, dropout mask and dropout output, 5 bytes a score (Korthikanti et al.).
        core: frozenset[RecomputeOp] = frozenset({"core_attn"})
        scores = 2.5 * block.mixer.heads * length
        yield ActivationTensor("scores", scores, "tensor", core, part="mixer")
        yield ActivationTensor("dropout_masks", hidden, "sequence")
    if software.fusion == "eager" and isinstance(block.mlp, MLPSpec) and block.mlp.gated:
        # A gate's activation is stored apart from its product with the other half.
        drops: frozenset[RecomputeOp] = frozenset({"mlp", "mlp_act"})
        yield ActivationTensor(
            "gate_act", block.mlp.width, "tensor", drops, part="mlp", alternate_share=0.0
        )


def _norm_pair(
    part: str,
    hidden: int,
    read_by: tuple[TensorReader, ...],
    *,
    feeds: bool = True,
    gathered: bool = True,
) -> Iterator[ActivationTensor]:
    yield ActivationTensor(f"{part}_residual", hidden, "sequence")
    drops: frozenset[RecomputeOp] = frozenset({"layernorm"})
    if part == "mlp":
        drops |= {"mlp", "moe"}
    yield ActivationTensor(
        f"{part}_norm_out", hidden, "sequence", drops, is_gemm_input=feeds, alternate_share=0.0,
        read_by=read_by, is_all_gathered=gathered,
    )  # fmt: skip


def _mixer(mixer: Mixer) -> Iterator[ActivationTensor]:
    match mixer:
        case AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=width):
            queries = heads * width * (2 if mixer.gate else 1)
            yield ActivationTensor("q", queries, "tensor")
            yield ActivationTensor(
                "kv", 2 * kv_heads * width, "tensor", max_shards=kv_heads, alternate_share=0.5
            )
            # Attention itself needs its output again.
            yield ActivationTensor(
                "attention_out", heads * width, "tensor", read_by=("out",), frozen_share=1.0
            )
        case LatentAttentionSpec():
            up: frozenset[RecomputeOp] = frozenset({"mla_up_proj"})
            key = mixer.nope_dim + mixer.rope_dim
            down = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim
            values = mixer.heads * (key + mixer.value_dim)
            # Before their norms and after them.
            yield ActivationTensor(
                "latents",
                2 * down,
                "sequence",
                alternate_share=0.5,
                read_by=("qkv",),
                frozen_share=0.5,
            )
            yield ActivationTensor("q", mixer.heads * key, "tensor", up, alternate_share=0.5)
            yield ActivationTensor("kv", values, "tensor", up, alternate_share=0.5)
            out = mixer.heads * mixer.value_dim
            yield ActivationTensor(
                "attention_out", out, "tensor", read_by=("out",), frozen_share=1.0
            )
        case GatedDeltaNetSpec():
            keys = 2 * mixer.key_heads * mixer.key_dim
            values = mixer.value_heads * mixer.value_dim
            # The input and the output of the convolution, the gate, and the read-out.
            yield ActivationTensor("mixed", 2 * (keys + values), "tensor", alternate_share=0.5)
            yield ActivationTensor(
                "gate_and_out",
                3 * values,
                "tensor",
                alternate_share=0.5,
                read_by=("out",),
                frozen_share=2 / 3,
            )
        case Mamba2Spec():
            inner = mixer.heads * mixer.head_dim
            states = 2 * mixer.groups * mixer.state_dim
            yield ActivationTensor("mixed", 2 * (inner + states), "tensor", alternate_share=0.5)
            yield ActivationTensor(
                "gate_and_out",
                3 * inner,
                "tensor",
                alternate_share=0.5,
                read_by=("out",),
                frozen_share=2 / 3,
            )


def _mlp(mlp: MLPSpec) -> Iterator[ActivationTensor]:
    whole: frozenset[RecomputeOp] = frozenset({"mlp"})
    halves = 2 if mlp.gated else 1
    yield ActivationTensor(
        "mlp_in", halves * mlp.width, "tensor", whole, alternate_share=1 / halves
    )
    drops: frozenset[RecomputeOp] = whole | {"mlp_act"}
    yield ActivationTensor(
        "mlp_act",
        mlp.width,
        "tensor",
        drops,
        is_gemm_input=True,
        alternate_share=0.0,
        read_by=("down",),
    )


def _experts(experts: MoESpec, hidden: int) -> Iterator[ActivationTensor]:
    whole: frozenset[RecomputeOp] = frozenset({"moe"})
    halves = 2 if experts.gated else 1
    inner = experts.width * experts.top_k
    # Router scores are kept in fp32: twice the width of a two-byte number.
    yield ActivationTensor("router_scores", 2 * experts.count, "sequence", whole)
    # Their weights are applied inside the experts, so that backward needs no expert's output.
    width = (experts.latent or hidden) * experts.top_k
    yield ActivationTensor(
        "dispatched",
        width,
        "routed",
        whole,
        is_gemm_input=True,
        read_by=("experts",),
        is_routed=True,
    )
    # A rank sees tp/expert_tp times fewer tokens and 1/expert_tp of each expert's width.
    yield ActivationTensor(
        "experts_in", halves * inner, "tensor", whole, alternate_share=1 / halves, is_routed=True
    )
    acts: frozenset[RecomputeOp] = whole | {"moe_act"}
    yield ActivationTensor(
        "experts_act",
        inner,
        "tensor",
        acts,
        is_gemm_input=True,
        alternate_share=0.0,
        read_by=("experts",),
        is_routed=True,
    )
    if experts.shared_width:
        shared: frozenset[RecomputeOp] = whole | {"shared_experts"}
        width = experts.shared_width
        yield ActivationTensor(
            "shared_in", halves * width, "tensor", shared, alternate_share=1 / halves
        )
        yield ActivationTensor(
            "shared_act",
            width,
            "tensor",
            shared,
            is_gemm_input=True,
            alternate_share=0.0,
            read_by=("down",),
        )
