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
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.cost import bytes_moved, grouped_matmul_s, linear_s, memory_s
from meshwright.predict.products import RankProduct, rank_products
from meshwright.predict.run import Run
from meshwright.predict.software import Software
from meshwright.spec.layout import (
    Layout,
    RankParameters,
    StateBytes,
    rank_chunks,
    rank_parameters,
    states_of,
)
from meshwright.spec.model import Block, Experts, Weight
from meshwright.spec.workload import Adapter

FORWARD_KERNELS = 3
"""A, B, and adding the result to the output of the frozen product."""


class AdapterPasses(NamedTuple):
    """Seconds that adapters add to the three parts of a block, and kernels of a forward pass."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    kernels: int = 0


def shares_pairs(software: Software) -> bool:
    """Return whether matrices with one input are one tensor, with one pair of adapters."""
    return software.fusion == "fused"


@lru_cache(maxsize=4096)
def adapted_products(
    weights: tuple[Weight, ...], adapter: Adapter, tp: int, apart: bool
) -> tuple[RankProduct, ...]:
    """Return the products of a rank that carry a pair of adapters."""
    trained = tuple(weight for weight in weights if adapter.trains(weight))
    return tuple(rank_products(trained, tp, apart=apart))


def pairs_of(run: Run, weights: tuple[Weight, ...]) -> tuple[RankProduct, ...]:
    """Return the products among some weights that carry adapters, routed experts last."""
    if run.adapter is None:
        return ()
    dense = tuple(weight for weight in weights if weight.part != "expert")
    routed = tuple(weight for weight in weights if weight.part == "expert")
    apart, layout = not shares_pairs(run.software), run.layout
    return (
        *adapted_products(dense, run.adapter, layout.tp, apart),
        *adapted_products(routed, run.adapter, layout.experts_tp, apart),
    )


def trained_parameters(run: Run) -> tuple[RankParameters, ...]:
    """Count what one rank of every pipeline stage trains: its adapters, or all it holds.

    Adapters of dense matrices count as `matrices`, those of routed experts as `experts`.
    """
    model, layout = run.model, run.layout
    if run.adapter is None:
        return rank_parameters(layout, model)
    each = {block.name: _block_parameters(run, block) for block in model.blocks}
    names, heads = model.layer_names, model.multi_token
    found = []
    for held in rank_chunks(layout, model.layers):
        layers = [name for chunk in held for name in names[chunk.first : chunk.last]]
        if heads is not None and any(chunk.has_head for chunk in held):
            layers += heads.depth * [heads.block]
        counts = [(each[name], layers.count(name)) for name in each]
        dense = sum(count * dense for (dense, _), count in counts)
        experts = sum(count * experts for (_, experts), count in counts)
        found.append(RankParameters(dense, 0, experts))
    return tuple(found)


def _block_parameters(run: Run, block: Block) -> tuple[int, int]:
    """Count the adapters of a block on one rank: beside dense matrices, and in routed experts."""
    rank = run.adapter.rank if run.adapter is not None else 0
    dense = experts = 0
    for out, into, weight in pairs_of(run, block.weights(run.model.hidden)):
        if weight.part == "expert":
            experts += weight.copies // run.layout.ep * rank * (out + into)
        else:
            dense += rank * (out + into)
    return dense, experts


def adapter_states(layout: Layout, trained: RankParameters) -> StateBytes:
    """Return the bytes of adapters, their gradients and optimizer states on one rank."""
    # Fully sharded weights that are trained are kept in fp32, without a second copy.
    return states_of(replace(layout, precision="fp32") if layout.zero == 3 else layout, trained)


def adapter_passes(run: Run, weights: tuple[Weight, ...]) -> AdapterPasses:
    """Return the time of the adapters beside some dense weights."""
    total = AdapterPasses()
    if run.adapter is None:
        return total
    for out, into, weight in pairs_of(run, weights):
        if weight.part == "expert":
            continue
        tokens = run.local_tokens if weight.split == "none" else run.tokens
        parts = (
            linear_s(run.costs, tokens, run.adapter.rank, into, "bf16", part=part)
            + linear_s(run.costs, tokens, out, run.adapter.rank, "bf16", part=part)
            for part in ("forward", "input_gradient", "weight_gradient")
        )
        total = _plus(run, total, tuple(parts), float(tokens * out), float(tokens * into))
    return total


def expert_adapter_passes(run: Run, experts: Experts, routed: float) -> AdapterPasses:
    """Return the time of the adapters in routed experts that get `routed` tokens on this rank."""
    total = AdapterPasses()
    if run.adapter is None or "experts" not in run.adapter.targets:
        return total
    local = max(1, experts.count // run.layout.ep)
    each = routed / local
    for out, into, weight in pairs_of(run, experts.weights(run.model.hidden)):
        if weight.part != "expert":
            continue
        parts = (
            grouped_matmul_s(run.costs, local, each, run.adapter.rank, into, part=part)
            + grouped_matmul_s(run.costs, local, each, out, run.adapter.rank, part=part)
            for part in ("forward", "input_gradient", "weight_gradient")
        )
        total = _plus(run, total, tuple(parts), routed * out, routed * into)
    return total


def _plus(
    run: Run, total: AdapterPasses, parts: tuple[float, ...], out: float, into: float
) -> AdapterPasses:
    """Add one pair: its products, and adding its output and its input gradient to the others."""
    forward, inputs, gradient = parts
    return AdapterPasses(
        total.forward + forward + _added_s(run, out),
        total.input_gradient + inputs + _added_s(run, into),
        total.weight_gradient + gradient,
        total.kernels + FORWARD_KERNELS,
    )


def _added_s(run: Run, elements: float) -> float:
    # One kernel however little the software fuses, as the sums of gradients are.
    return memory_s(run.costs, "optimizer", bytes_moved("residual", elements))
