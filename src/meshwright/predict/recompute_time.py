"""What computing activations again costs a backward pass, operation by operation."""

from collections.abc import Iterable, Iterator

from meshwright.predict.activations import recomputed
from meshwright.predict.block_comm import BlockComm
from meshwright.predict.block_time import (
    Part,
    Passes,
    activation_passes,
    block_parts,
    cast_passes,
    core_parts,
    core_passes,
    expert_parts,
    moved_s,
    product_parts,
    product_passes,
)
from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.cost.memory_bound import bytes_moved, memory_s
from meshwright.predict.run import Run
from meshwright.spec.layout import RecomputeOp
from meshwright.spec.model import Block, Experts, LatentAttention, Mlp


def recompute_s(run: Run, block: Block, passes: Passes, comm: BlockComm) -> float:
    """Return the forward work that one layer's backward pass does a second time.

    `passes` are its kernels, at the host's pace where that is slower.
    """
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
    exchanged = comm.ep_forward if "moe" in again and isinstance(block.mlp, Experts) else 0.0
    return exchanged + sum(
        part.forward for op in distinct(again) for _, part in operation_parts(run, block, op)
    )


def recompute_parts(run: Run, block: Block) -> Iterator[Part]:
    """List the kernels that one layer's backward pass runs a second time; `forward` is their time.

    PyTorch's own selective way is not listed: its kernels are those of no operation as a whole.
    """
    layout = run.layout
    if layout.recompute == "full":
        yield from block_parts(run, block)
        if run.software.early_stop:
            yield "products", Passes(-_last_product_s(run, block))
    elif layout.recompute == "selective":
        again = recomputed(layout, run.software)
        for op in () if again == "alternate" else distinct(again):
            yield from operation_parts(run, block, op)


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


def _activation_again(run: Run, mlp: Mlp) -> Passes:
    """Return an activation that is not kept: a kernel, or so much more of its backward's."""
    width = mlp.width / run.layout.tp * run.tokens
    on_the_way = run.software.activates_backward and not run.layout.overlap_tp
    if not (on_the_way and mlp.gated and not mlp.bias):
        return activation_passes(run.costs, width, mlp.gated)
    # Its backward reads all it takes: one more write, which casts to 8 bits read once.
    op: MemoryOp = "activation_backward"
    moved, more = bytes_moved(op, 2 * width), (2 if cast_passes(run) else 1) * 2.0 * width
    return Passes(memory_s(run.costs, op, moved + more) - memory_s(run.costs, op, moved))


def operation_parts(run: Run, block: Block, op: RecomputeOp) -> Iterator[Part]:
    """List the kernels that compute one operation again; `forward` is their time."""
    costs, layout, hidden = run.costs, run.layout, run.model.hidden
    mixer, mlp = block.mixer, block.mlp
    match op:
        case "core_attn":
            yield from core_parts(run, block)
        case "layernorm":
            norms = (mixer is not None) + (mlp is not None)
            each = moved_s(costs, "norm", float(run.local_tokens * hidden))
            yield "norms", Passes(norms * each)
        case "mla_up_proj" if isinstance(mixer, LatentAttention):
            up = tuple(weight for weight in mixer.weights(hidden) if weight.name.endswith("_up"))
            yield from product_parts(run, up)
        case "mlp" if isinstance(mlp, Mlp):
            width = mlp.width / layout.tp * run.tokens
            yield "activations", activation_passes(costs, width, mlp.gated)
            # What follows the last product is not needed again.
            yield from product_parts(run, mlp.weights(hidden)[:-1])
        case "mlp_act" if isinstance(mlp, Mlp):
            yield "activations", _activation_again(run, mlp)
        case "moe" if isinstance(mlp, Experts):
            yield from expert_parts(run, mlp)
        case "moe_act" if isinstance(mlp, Experts) and not run.software.fused_experts:
            width = mlp.width * mlp.top_k * run.tokens / layout.tp * run.expert_load(mlp)
            yield "activations", activation_passes(costs, width, mlp.gated)
        case "shared_experts" if isinstance(mlp, Experts) and mlp.shared_width:
            shared = tuple(weight for weight in mlp.weights(hidden) if weight.part == "shared")
            width = mlp.shared_width / layout.tp * run.tokens
            yield "activations", activation_passes(costs, width, mlp.gated)
            yield from product_parts(run, shared)
