"""What computing activations again costs a backward pass, operation by operation."""

from collections.abc import Iterable, Iterator

from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.cost.memory_bound import bytes_moved, memory_s
from meshwright.predict.memory.activations import list_recomputed_ops
from meshwright.predict.step.block_comm import BlockComm
from meshwright.predict.step.block_time import (
    KernelTimes,
    PassTimes,
    activation_passes,
    attention_passes,
    cast_passes,
    elementwise_s,
    gemm_passes,
    list_attention_kernels,
    list_block_kernels,
    list_expert_kernels,
    list_gemm_kernels,
)
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import RecomputeOp
from meshwright.spec.model import BlockSpec, LatentAttentionSpec, MLPSpec, MoESpec


def recompute_s(run: TrainingRun, block: BlockSpec, passes: PassTimes, comm: BlockComm) -> float:
    """Return the forward work that one layer's backward pass does a second time.

    `passes` are its kernels, at the host's pace where that is slower.
    """
    layout = run.layout
    if layout.recompute == "full":
        last = _last_product_s(run, block) if run.framework.early_stop else 0.0
        wait = run.constants.rng_state_sync_s if run.framework.rng_state_sync else 0.0
        return passes.forward_s - last + comm.forward_s + wait
    if layout.recompute == "none":
        return 0.0
    again = list_recomputed_ops(layout, run.framework)
    if again == "alternate":
        weights = block.list_weights(run.model.hidden)
        kept = attention_passes(run, block).forward_s + gemm_passes(run, weights).forward_s / 2
        return max(0.0, passes.forward_s - kept)
    exchanged = comm.ep_forward_s if "moe" in again and isinstance(block.mlp, MoESpec) else 0.0
    return exchanged + sum(
        part.forward_s
        for op in drop_nested_ops(again)
        for _, part in list_op_kernels(run, block, op)
    )


def list_recomputed_kernels(run: TrainingRun, block: BlockSpec) -> Iterator[KernelTimes]:
    """List the kernels that one layer's backward pass runs a second time; `forward` is their time.

    PyTorch's own selective way is not listed: its kernels are those of no operation as a whole.
    """
    layout = run.layout
    if layout.recompute == "full":
        yield from list_block_kernels(run, block)
        if run.framework.early_stop:
            yield "gemm", PassTimes(-_last_product_s(run, block))
    elif layout.recompute == "selective":
        again = list_recomputed_ops(layout, run.framework)
        for op in () if again == "alternate" else drop_nested_ops(again):
            yield from list_op_kernels(run, block, op)


def drop_nested_ops(ops: Iterable[RecomputeOp]) -> list[RecomputeOp]:
    """Return some operations without those that are part of another."""
    every = list(ops)
    implied = {small for op in every for small in _IMPLIED.get(op, ())}
    return [op for op in every if op not in implied]


_IMPLIED: dict[RecomputeOp, tuple[RecomputeOp, ...]] = {
    "mlp": ("mlp_act",),
    "moe": ("moe_act", "shared_experts"),
}
"""Operations that are part of a larger one."""


def _last_product_s(run: TrainingRun, block: BlockSpec) -> float:
    if not isinstance(block.mlp, MLPSpec):
        return 0.0
    return gemm_passes(run, block.mlp.list_weights(run.model.hidden)[-1:]).forward_s


def _activation_again(run: TrainingRun, mlp: MLPSpec) -> PassTimes:
    """Return an activation that is not kept: a kernel, or so much more of its backward's."""
    width = mlp.width / run.layout.tp * run.microbatch_tokens
    on_the_way = run.framework.recompute_activation_in_backward and not run.layout.overlap_tp
    if not (on_the_way and mlp.gated and not mlp.bias):
        return activation_passes(run.device_costs, width, mlp.gated)
    # Its backward reads all it takes: one more write, which casts to 8 bits read once.
    op: MemoryOp = "activation_backward"
    moved, more = bytes_moved(op, 2 * width), (2 if cast_passes(run) else 1) * 2.0 * width
    return PassTimes(
        memory_s(run.device_costs, op, moved + more) - memory_s(run.device_costs, op, moved)
    )


def list_op_kernels(run: TrainingRun, block: BlockSpec, op: RecomputeOp) -> Iterator[KernelTimes]:
    """List the kernels that compute one operation again; `forward` is their time."""
    costs, layout, hidden = run.device_costs, run.layout, run.model.hidden
    mixer, mlp = block.mixer, block.mlp
    match op:
        case "core_attn":
            yield from list_attention_kernels(run, block)
        case "layernorm":
            norms = (mixer is not None) + (mlp is not None)
            each = elementwise_s(costs, "norm", float(run.local_tokens * hidden))
            yield "norms", PassTimes(norms * each)
        case "mla_up_proj" if isinstance(mixer, LatentAttentionSpec):
            up = tuple(
                weight for weight in mixer.list_weights(hidden) if weight.name.endswith("_up")
            )
            yield from list_gemm_kernels(run, up)
        case "mlp" if isinstance(mlp, MLPSpec):
            width = mlp.width / layout.tp * run.microbatch_tokens
            yield "activations", activation_passes(costs, width, mlp.gated)
            # What follows the last product is not needed again.
            yield from list_gemm_kernels(run, mlp.list_weights(hidden)[:-1])
        case "mlp_act" if isinstance(mlp, MLPSpec):
            yield "activations", _activation_again(run, mlp)
        case "moe" if isinstance(mlp, MoESpec):
            yield from list_expert_kernels(run, mlp)
        case "moe_act" if isinstance(mlp, MoESpec) and not run.framework.fused_experts:
            width = mlp.width * mlp.top_k * run.microbatch_tokens / layout.tp * run.expert_load(mlp)
            yield "activations", activation_passes(costs, width, mlp.gated)
        case "shared_experts" if isinstance(mlp, MoESpec) and mlp.shared_width:
            shared = tuple(weight for weight in mlp.list_weights(hidden) if weight.part == "shared")
            width = mlp.shared_width / layout.tp * run.microbatch_tokens
            yield "activations", activation_passes(costs, width, mlp.gated)
            yield from list_gemm_kernels(run, shared)
