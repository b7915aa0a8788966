"""What computing activations again costs a backward pass, operation by operation."""

from collections.abc import Iterable

from meshwright.predict.activations import recomputed
from meshwright.predict.block_comm import BlockComm
from meshwright.predict.block_time import (
    Passes,
    activation_passes,
    core_passes,
    expert_passes,
    moved_s,
    product_passes,
)
from meshwright.predict.run import Run
from meshwright.spec.layout import RecomputeOp
from meshwright.spec.model import Block, Experts, LatentAttention, Mlp


def recompute_s(run: Run, block: Block, passes: Passes, comm: BlockComm) -> float:
    """Return the forward work that one layer's backward pass does a second time."""
    layout = run.layout
    if layout.recompute == "full":
        last = _last_product_s(run, block) if run.software.early_stop else 0.0
        wait = run.constants.checkpoint_wait_s if run.software.checkpoint_waits else 0.0
        return passes.forward - last + comm.forward + wait
    if layout.recompute == "none":
        return 0.0
    again = recomputed(layout, run.software)
    if again == "alternate":
        weights = block.weights(run.model.hidden)
        kept = core_passes(run, block).forward + product_passes(run, weights).forward / 2
        return max(0.0, passes.forward - kept)
    return sum(operation_s(run, block, comm, op) for op in distinct(again))


def distinct(ops: Iterable[RecomputeOp]) -> list[RecomputeOp]:
    """Return some operations without those that are part of another."""
    every = list(ops)
    implied = {small for op in every for small in _IMPLIED.get(op, ())}
    return [op for op in every if op not in implied]


_IMPLIED: dict[RecomputeOp, tuple[RecomputeOp, ...]] = {
    "mlp": ("mlp_act",),
    "moe": ("moe_act", "shared_experts"),
}
"""Operations that are part of a larger one."""


def _last_product_s(run: Run, block: Block) -> float:
    if not isinstance(block.mlp, Mlp):
        return 0.0
    return product_passes(run, block.mlp.weights(run.model.hidden)[-1:]).forward


def operation_s(run: Run, block: Block, comm: BlockComm, op: RecomputeOp) -> float:
    """Return what computing one operation again takes."""
    costs, layout, hidden = run.costs, run.layout, run.model.hidden
    mixer, mlp = block.mixer, block.mlp
    match op:
        case "core_attn":
            return core_passes(run, block).forward
        case "layernorm":
            norms = (mixer is not None) + (mlp is not None)
            return norms * moved_s(costs, "norm", float(run.local_tokens * hidden))
        case "mla_up_proj" if isinstance(mixer, LatentAttention):
            up = tuple(weight for weight in mixer.weights(hidden) if weight.name.endswith("_up"))
            return product_passes(run, up).forward
        case "mlp" | "mlp_act" if isinstance(mlp, Mlp):
            width = mlp.width / layout.tp * run.tokens
            activation = activation_passes(costs, width, mlp.gated).forward
            if op == "mlp_act":
                return activation
            # What follows the last product is not needed again.
            return activation + product_passes(run, mlp.weights(hidden)[:-1]).forward
        case "moe" if isinstance(mlp, Experts):
            return expert_passes(run, mlp).forward + comm.ep_forward
        case "moe_act" if isinstance(mlp, Experts) and not run.software.fused_experts:
            width = mlp.width * mlp.top_k * run.tokens / layout.tp * run.expert_load(mlp)
            return activation_passes(costs, width, mlp.gated).forward
        case "shared_experts" if isinstance(mlp, Experts) and mlp.shared_width:
            shared = tuple(weight for weight in mlp.weights(hidden) if weight.part == "shared")
            width = mlp.shared_width / layout.tp * run.tokens
            both = activation_passes(costs, width, mlp.gated) + product_passes(run, shared)
            return both.forward
    return 0.0
