"""What adapters (LoRA) add to a frozen model: parameters, states and small products of one rank.

An adapter is a pair of matrices beside another one: A reads its input, B writes beside its output.
They are cut as that one is: B by the outputs of a column-cut one, A by the inputs of a row-cut one,
the other is whole on every tensor rank, and partial sums ride on the reduction of the product
itself. Matrices that fused software keeps as one tensor (queries, keys and values; gate and up)
share one pair, as in Megatron-Bridge; elsewhere each has its own, as in PEFT. Adapters compute in
two bytes. Left out: dropout, the scaling of outputs (a kernel of its own in plain PyTorch), and the
sum over tensor ranks of the gradients of whole matrices.
"""

from functools import lru_cache

from msgspec.structs import replace

from meshwright.predict.training_run.gemm_shapes import RankGemm, list_rank_gemms
from meshwright.predict.training_run.training_framework import TrainingFramework
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import (
    Layout,
    RankParameters,
    StateBytes,
    count_rank_parameters,
    list_chunks_by_rank,
    rank_state_bytes,
)
from meshwright.spec.model import BlockSpec, Weight
from meshwright.spec.workload import LoRASpec

LORA_FORWARD_KERNELS = 3
"""A, B, and adding the result to the output of the frozen product."""


def fuses_adapter_pairs(software: TrainingFramework) -> bool:
    """Return whether matrices with one input are one tensor, with one pair of adapters."""
    return software.fusion == "fused"


@lru_cache(maxsize=4096)
def list_adapted_gemms(
    weights: tuple[Weight, ...], adapter: LoRASpec, tp: int, apart: bool
) -> tuple[RankGemm, ...]:
    """Return the products of a rank that carry a pair of adapters."""
    trained = tuple(weight for weight in weights if adapter.is_target(weight))
    return tuple(list_rank_gemms(trained, tp, apart=apart))


def list_adapter_pairs(run: TrainingRun, weights: tuple[Weight, ...]) -> tuple[RankGemm, ...]:
    """Return the products among some weights that carry adapters, routed experts last."""
    if run.adapter is None:
        return ()
    dense = tuple(weight for weight in weights if weight.part != "expert")
    routed = tuple(weight for weight in weights if weight.part == "expert")
    apart, layout = not fuses_adapter_pairs(run.framework), run.layout
    return (
        *list_adapted_gemms(dense, run.adapter, layout.tp, apart),
        *list_adapted_gemms(routed, run.adapter, layout.effective_expert_tp, apart),
    )


def count_trained_parameters(run: TrainingRun) -> tuple[RankParameters, ...]:
    """Count what one rank of every pipeline stage trains: its adapters, or all it holds.

    Adapters of dense matrices count as `matrices`, those of routed experts as `experts`.
    """
    model, layout = run.model, run.layout
    if run.adapter is None:
        return count_rank_parameters(layout, model)
    each = {block.name: _block_parameters(run, block) for block in model.blocks}
    names, heads = model.layer_names, model.multi_token
    found = []
    for held in list_chunks_by_rank(layout, model.layers):
        layers = [name for chunk in held for name in names[chunk.first : chunk.last]]
        if heads is not None and any(chunk.has_head for chunk in held):
            layers += heads.depth * [heads.block]
        counts = [(each[name], layers.count(name)) for name in each]
        dense = sum(count * dense for (dense, _), count in counts)
        experts = sum(count * experts for (_, experts), count in counts)
        found.append(RankParameters(dense, 0, experts))
    return tuple(found)


def _block_parameters(run: TrainingRun, block: BlockSpec) -> tuple[int, int]:
    """Count the adapters of a block on one rank: beside dense matrices, and in routed experts."""
    rank = run.adapter.rank if run.adapter is not None else 0
    dense = experts = 0
    for out, into, weight in list_adapter_pairs(run, block.list_weights(run.model.hidden)):
        if weight.part == "expert":
            experts += weight.copies // run.layout.ep * rank * (out + into)
        else:
            dense += rank * (out + into)
    return dense, experts


def lora_state_bytes(layout: Layout, trained: RankParameters) -> StateBytes:
    """Return the bytes of adapters, their gradients and optimizer states on one rank."""
    # Fully sharded weights that are trained are kept in fp32, without a second copy.
    return rank_state_bytes(
        replace(layout, precision="fp32") if layout.zero == 3 else layout, trained
    )
