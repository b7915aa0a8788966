"""Hold a layout against a model, a cluster and a workload: every violated constraint at once.

Each rule returns its problems with a fix. What merely runs slowly is not a violation: the
planner weighs it. Whether activations fit is predicted elsewhere; here only the states must.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.spec.layout.choices import CHOICES
from meshwright.spec.layout.field_rules import largest_divisor, nearest_multiple
from meshwright.spec.layout.model_states import stage_state_bytes
from meshwright.spec.layout.pipeline_chunks import split_layers
from meshwright.spec.layout.ranks import has_matching_expert_stages
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    MoESpec,
)
from meshwright.spec.units import format_bytes

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.layout.layout import Layout
    from meshwright.spec.model import Model
    from meshwright.spec.workload import TrainingWorkload


def check_layout(
    layout: "Layout", model: "Model", cluster: "Cluster", workload: "TrainingWorkload | None" = None
) -> tuple[Problem, ...]:
    """Return every constraint the layout violates, each with a fix."""
    found = [
        *check_tensor_parallel(layout.tp, model),
        *_experts(layout, model),
        *_pipeline(layout, model),
        *_recompute(layout, model),
        *_layers(layout, model),
        *_batch(layout, workload),
        *_sequence(layout, model, workload),
        *_devices(layout, cluster),
    ]
    # Bytes mean nothing while the shapes do not divide.
    if not any(p.where in {"tp", "ep", "expert_tp", "stage_layers", "pp"} for p in found):
        found += _memory(layout, model, cluster, workload)
    return tuple(dict.fromkeys(found))


def _splits(block: BlockSpec) -> Iterator[tuple[str, int]]:
    """Yield what tensor parallelism must divide in a block, with its size."""
    match block.mixer:
        case AttentionSpec(heads=heads):
            yield f"the {heads} attention heads", heads
        case LatentAttentionSpec(heads=heads):
            yield f"the {heads} attention heads", heads
        case Mamba2Spec(groups=groups):
            yield f"the {groups} state groups", groups
        case GatedDeltaNetSpec(key_heads=heads):
            yield f"the {heads} key heads", heads
    match block.mlp:
        case MLPSpec(width=width):
            yield f"the MLP width {width}", width
        case MoESpec(shared_width=width) if width:
            yield f"the shared experts' width {width}", width


def check_tensor_parallel(tp: int, model: "Model") -> Iterator[Problem]:
    """Yield what a degree of tensor parallelism does not divide, each with one that does."""
    for block, _ in model.count_layers_by_block():
        for what, size in _splits(block):
            if size % tp:
                fix = f"use tp={largest_divisor(size, tp)}"
                yield Problem("tp", f"{tp} does not divide {what} of block {block.name!r}", fix)
        if isinstance(block.mixer, AttentionSpec):
            kv = block.mixer.kv_heads
            if kv % tp and tp % kv:
                fix = f"use tp={largest_divisor(kv, tp)}"
                yield Problem("tp", f"{tp} and the {kv} key-value heads do not divide", fix)


def _experts(layout: "Layout", model: "Model") -> Iterator[Problem]:
    experts = [
        block.mlp for block, _ in model.count_layers_by_block() if isinstance(block.mlp, MoESpec)
    ]
    if not experts:
        for name, value in (("ep", layout.ep), ("expert_tp", layout.expert_tp or 1)):
            if value > 1:
                yield Problem(name, f"{model.name} has no experts to spread", f"set {name}=1")
        return
    for part in experts:
        if part.count % layout.ep:
            fix = f"use ep={largest_divisor(part.count, layout.ep)}"
            yield Problem("ep", f"{layout.ep} does not divide the {part.count} experts", fix)
        if part.width % layout.effective_expert_tp:
            fix = f"use expert_tp={largest_divisor(part.width, layout.effective_expert_tp)}"
            what = f"{layout.effective_expert_tp} does not divide the expert width {part.width}"
            yield Problem("expert_tp", what, fix)
    if not has_matching_expert_stages(layout):
        what = f"{layout.order} puts a rank's experts in another stage than its dense layers"
        yield Problem("order", what, "name pp last, as in tp-cp-ep-dp-pp")


def _pipeline(layout: "Layout", model: "Model") -> Iterator[Problem]:
    layers, chunks = model.layers, layout.chunks
    split = layout.stage_layers
    if split is not None and sum(split) != layers:
        fix = f"make the numbers sum to {layers}"
        yield Problem("stage_layers", f"sums to {sum(split)}, {model.name} has {layers}", fix)
    elif split is None and layers % chunks:
        # The nearest split that works keeps as many chunks per rank as it can.
        per_rank = largest_divisor(layers, layout.virtual_stages)
        ranks = largest_divisor(layers // per_rank, layout.pp)
        fix = f"use pp={ranks} and virtual_stages={per_rank if ranks > 1 else 1}"
        if chunks > layers:
            yield Problem("pp", f"{chunks} chunks are more than the {layers} layers", fix)
            return
        uneven = ",".join(map(str, _lighter_ends(layers, chunks)))
        what = f"{layers} layers do not split evenly into {chunks} chunks"
        yield Problem("stage_layers", what, f"set stage_layers={uneven}, or {fix}")


def _lighter_ends(layers: int, chunks: int) -> list[int]:
    """Split layers as evenly as they go; the ends, with embedding and head, take fewer."""
    each, more = divmod(layers, chunks)
    fewer = chunks - more
    return [each] * (fewer // 2) + [each + 1] * more + [each] * (fewer - fewer // 2)


def _recompute(layout: "Layout", model: "Model") -> Iterator[Problem]:
    blocks = [block for block, _ in model.count_layers_by_block()]
    has = {
        "mla_up_proj": any(isinstance(block.mixer, LatentAttentionSpec) for block in blocks),
        "mlp": any(isinstance(block.mlp, MLPSpec) for block in blocks),
        "mlp_act": any(isinstance(block.mlp, MLPSpec) for block in blocks),
        "moe": model.moe is not None,
        "moe_act": model.moe is not None,
        "shared_experts": model.moe is not None and model.moe.shared_width > 0,
    }
    for op in layout.recompute_ops:
        if not has.get(op, True):
            yield Problem("recompute_ops", f"{model.name} has no {op}", f"leave {op} out")


def _layers(layout: "Layout", model: "Model") -> Iterator[Problem]:
    """Hold counts of layers per chunk against the largest chunk."""
    counts = {
        "recompute_layers": layout.recompute_layers,
        "offload_layers": layout.offload_layers,
    }
    if layout.chunks > model.layers or not any(counts.values()):
        return
    most = max(split_layers(layout, model.layers))
    for name, count in counts.items():
        if count is not None and count > most:
            what = f"{count} is more than the {most} layers of a chunk"
            yield Problem(name, what, f"use {most}, or leave it out")


def _batch(layout: "Layout", workload: "TrainingWorkload | None") -> Iterator[Problem]:
    asked = workload.global_batch if workload is not None else None
    batch = layout.global_batch or asked
    if batch is None:
        return
    if layout.global_batch is not None and asked is not None and layout.global_batch != asked:
        what = f"{layout.global_batch} is not the {asked} the workload asks for"
        yield Problem("global_batch", what, f"use {asked}, or leave it out")
    step = layout.dp * layout.microbatch
    if batch % step:
        what = f"{batch} is not a multiple of dp × microbatch = {step}"
        yield Problem("global_batch", what, f"use {nearest_multiple(batch, step)}")
        return
    count, pp = batch // step, layout.pp
    if layout.schedule == "interleaved" and layout.virtual_stages > 1 and count % pp:
        fix = f"use a global batch of {nearest_multiple(count, pp) * step}"
        what = f"{count} microbatches per replica are not a multiple of pp={pp} (interleaved)"
        yield Problem("global_batch", what, fix)
    if layout.schedule in {"dualpipe", "dualpipe-v"} and pp > 1 and (count < 2 * pp or count % 2):
        what = f"{count} microbatches are too few or odd: {layout.schedule} feeds both ends"
        yield Problem("global_batch", what, f"use at least {2 * pp * step}, an even multiple")


def _sequence(
    layout: "Layout", model: "Model", workload: "TrainingWorkload | None"
) -> Iterator[Problem]:
    ring = layout.cp > 1 and "ring" in layout.cp_kind
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        ranks = layout.tp * layout.cp
        for block, _ in model.count_layers_by_block():
            heads = getattr(block.mixer, "heads", 0) if _is_attention(block) else 0
            if heads % ranks:
                what = f"tp × cp = {ranks} does not divide the {heads} heads"
                yield Problem("cp", what, "use cp_kind=ring, or a smaller cp")
    if workload is None:
        return
    length = workload.sequence_length
    if model.positions == "learned" and length > model.max_positions:
        what = f"{length} is beyond the {model.max_positions} learned positions"
        yield Problem("sequence_length", what, f"use at most {model.max_positions}")
    # A ring gives every rank an early and a late part, so that causal work balances.
    parts = layout.cp * (2 if ring else 1) * (layout.tp if layout.sequence_parallel else 1)
    if length % parts:
        what = f"{length} does not divide into the {parts} parts of cp and sequence parallel"
        yield Problem("sequence_length", what, f"use {nearest_multiple(length, parts)}")


def _is_attention(block: BlockSpec) -> bool:
    return isinstance(block.mixer, AttentionSpec | LatentAttentionSpec)


def _devices(layout: "Layout", cluster: "Cluster") -> Iterator[Problem]:
    if layout.gpus > cluster.gpus:
        what = f"tp × cp × pp × dp = {layout.gpus} GPUs, {cluster.name} has {cluster.gpus}"
        most = cluster.gpus // (layout.tp * layout.cp * layout.pp)
        yield Problem("dp", what, f"use dp={most}" if most else "use a larger cluster")
    gpu = cluster.gpu
    if layout.precision not in gpu.precisions:
        usable = ", ".join(name for name in gpu.precisions if name in CHOICES["precision"])
        yield Problem("precision", f"a {gpu.name} has no {layout.precision}", f"use {usable}")


def _memory(
    layout: "Layout", model: "Model", cluster: "Cluster", workload: "TrainingWorkload | None"
) -> Iterator[Problem]:
    capacity = cluster.gpu.memory_bytes
    states = [held.without_offloaded(layout.offload) for held in stage_state_bytes(layout, model)]
    # Frozen weights have no other states, and those of adapters are small.
    frozen = workload is not None and workload.adapter is not None
    needed = [held.parameters if frozen else held.total for held in states]
    worst = max(range(len(needed)), key=needed.__getitem__)
    if needed[worst] > capacity:
        named = "frozen weights" if frozen else "weights, gradients and optimizer states"
        what = (
            f"{named} of stage {worst} need {format_bytes(needed[worst])}, "
            f"a {cluster.gpu.name} has {format_bytes(capacity)}"
        )
        shared = layout.dp * layout.cp > 1
        if frozen and layout.zero < 3 and shared:
            fix = "set zero=3, or raise tp or pp"
        elif layout.zero < 1 and shared:
            fix = "set zero=1 to share optimizer states over data parallel"
        elif layout.zero < 3 and shared:
            fix = "raise zero, tp or pp"
        else:
            fix = "raise tp or pp, or use more GPUs"
        yield Problem("memory", what, fix)
