"""The collectives of one layer in the order they run, each with its full length.

The cost model says how long a pass waits for them. What they take in full comes from the same
functions with nothing to hide behind. Only the drawing of a step needs this; its length does not.
"""

import copy
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from meshwright.policy.pipeline.pass_spans import PASS_NAMES
from meshwright.predict.step.block_comm import BlockComm, predict_block_comm, ring_attention_s
from meshwright.predict.step.block_time import PassTimes, block_passes
from meshwright.predict.step.measured_costs import collective_time_s
from meshwright.predict.step.offload_time import HostTraffic, pass_traffic, transfer_s
from meshwright.predict.step.pass_time import NO_WAITS, PassBreakdown, PassTable, build_pass_table
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.step.step_prediction import layer_zero3_comm_s
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import (
    ModelChunk,
    count_rank_parameters,
    list_chunks_by_rank,
    split_layers,
)
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT
from meshwright.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MoESpec

_CONTEXT = {"ulysses": "all_to_all", "allgather": "all_gather"}
"""The collective of each kind of context parallelism; rings send and receive."""


class LayerCollective(NamedTuple):
    """One collective of a layer, or one copy between device and host."""

    group: str
    """The process group: tp, cp, ep or dp; `host` for a copy."""
    name: str
    part: Literal["mixer", "mlp", "layer"]
    """What it belongs to."""
    runs_before_compute: bool
    """It runs ahead of the compute of its part, or behind it."""
    seconds: float
    nbytes: int = -1


LayerCollectives = dict[str, tuple[LayerCollective, ...]]
"""By pass, F or B; those that compute waits for first come first in each group."""


def list_block_collectives(run: TrainingRun, block: BlockSpec) -> LayerCollectives:
    """Return the collectives of a block, those of sharded parameters apart."""
    full = _full(run, block)
    return {
        "F": (*_tensor(run, block, "F", full.tp_forward_s), *_others(run, block, full, "F")),
        "B": (*_tensor(run, block, "B", full.tp_backward_s), *_others(run, block, full, "B")),
    }


def _full(run: TrainingRun, block: BlockSpec) -> BlockComm:
    """Return how long a block communicates where nothing can hide."""
    apart = copy.copy(run)
    apart.layout = msgspec.structs.replace(run.layout, overlap_tp=False, overlap_ep=False)
    apart.framework = msgspec.structs.replace(run.framework, tp_overlap=False)
    comm = predict_block_comm(apart, block, PassTimes())
    mixer = block.mixer
    rings = run.layout.cp > 1 and run.layout.cp_kind not in ("ulysses", "allgather")
    if (
        run.measured is not None
        or not rings
        or not isinstance(mixer, AttentionSpec | LatentAttentionSpec)
    ):
        return comm
    # A ring always has attention to hide behind.
    ring = ring_attention_s(run, mixer)
    return comm._replace(cp_forward_s=ring, cp_backward_s=2 * ring)


def _tensor(
    run: TrainingRun, block: BlockSpec, way: str, seconds: float
) -> Iterator[LayerCollective]:
    """Around every part: a gather and a scatter, or one reduction behind it."""
    layout = run.layout
    if layout.tp == 1:
        return
    parts: list[Literal["mixer", "mlp"]] = ["mixer"] if block.mixer is not None else []
    if block.mlp is not None and not (
        isinstance(block.mlp, MoESpec) and layout.effective_expert_tp == 1
    ):
        parts.append("mlp")
    size = 2 * run.microbatch_tokens * run.model.hidden
    if not layout.sequence_parallel:
        for part in parts:
            yield LayerCollective("tp", "all_reduce", part, False, seconds / len(parts), size)
        return
    gather = collective_time_s(run, "tp", "all_gather", float(size))
    scatter = collective_time_s(run, "tp", "reduce_scatter", float(size))
    # Backward gathers gradients, which it waits for, and inputs again beside its first product.
    gathers = 2 if way == "B" else 1
    share = seconds / len(parts) / (gathers * gather + scatter)
    for _ in range(gathers):
        for part in parts:
            yield LayerCollective("tp", "all_gather", part, True, share * gather, size)
    for part in parts:
        yield LayerCollective("tp", "reduce_scatter", part, False, share * scatter, size)


def _others(
    run: TrainingRun, block: BlockSpec, full: BlockComm, way: str
) -> Iterator[LayerCollective]:
    context, experts = (
        (full.cp_forward_s, full.ep_forward_s)
        if way == "F"
        else (full.cp_backward_s, full.ep_backward_s)
    )
    if context:
        name = _CONTEXT.get(run.layout.cp_kind, "send_recv")
        yield LayerCollective("cp", name, "mixer", False, context)
    if experts and isinstance(block.mlp, MoESpec):
        width = block.mlp.latent or run.model.hidden
        size = 2 * (run.microbatch_tokens // run.layout.tp) * block.mlp.top_k * width
        for before in (True, False):
            yield LayerCollective("ep", "all_to_all", "mlp", before, experts / 2, size)


def list_zero3_collectives(run: TrainingRun) -> list[LayerCollectives]:
    """Return, by rank, the gathers and scatters of one layer of sharded states in every pass."""
    layout = run.layout
    if layout.zero < 2 or layout.dp * layout.cp == 1:
        return [{"F": (), "B": ()} for _ in range(layout.pp)]
    mean = max(1, run.model.layers // layout.pp)
    number = BYTES_PER_ELEMENT[layout.gradient_precision]
    found: list[LayerCollectives] = []
    held = zip(
        count_rank_parameters(layout, run.model),
        count_trained_parameters(run),
        list_chunks_by_rank(layout, run.model.layers),
        strict=True,
    )
    for parameters, trained, some in held:
        layers = max(1, sum(chunk.last - chunk.first for chunk in some))
        # The closed form cuts every rank into as many layers as ranks have on the mean.
        gather_s, scatter_s = (
            mean / layers * seconds
            for seconds in layer_zero3_comm_s(run, parameters, mean, trained)
        )
        size = 2 * parameters.total // layers
        gather = LayerCollective("dp", "all_gather", "layer", True, gather_s, size)
        size = number * trained.total // layers
        scatter = LayerCollective("dp", "reduce_scatter", "layer", False, scatter_s, size)
        before = (gather,) if layout.zero == 3 else ()
        found.append({"F": before, "B": (*before, scatter)})
    return found


def list_host_copies(run: TrainingRun) -> list[LayerCollectives]:
    """Return, by chunk, what one layer's passes copy between device and host."""
    layout, names = run.layout, {(True, False): "to host", (False, True): "from host"}
    if not layout.offload:
        return [{"F": (), "B": ()} for _ in range(layout.chunks)]

    def copies(moved: HostTraffic, layers: int) -> tuple[LayerCollective, ...]:
        if not any(moved):
            return ()
        directions = (moved.to_host_bytes > 0, moved.to_device_bytes > 0)
        name = f"copy {names.get(directions, 'to and from host')}"
        seconds, size = transfer_s(run, moved) / layers, round(sum(moved) / layers)
        return (LayerCollective("host", name, "layer", moved.to_device_bytes > 0, seconds, size),)

    layers = [max(1, count) for count in split_layers(layout, run.model.layers)]
    return [
        {"F": copies(each.forward, count), "B": copies(each.backward, count)}
        for each, count in zip(pass_traffic(run), layers, strict=True)
    ]


class LayerSegment(NamedTuple):
    """A kernel, or a collective and how long compute waits for it."""

    name: str
    seconds: float
    layer: int = -1
    collective: LayerCollective | None = None
    exposed: float = 0.0


class LayerSegments:
    """Deals the pieces of passes to the layers of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._names = run, run.model.layer_names
        self._tables = _layer_tables(run)
        self._collectives = {one.name: list_block_collectives(run, one) for one in run.model.blocks}
        self._sharded, self._copies = list_zero3_collectives(run), list_host_copies(run)
        self._parts = {one.name: _parts(run, one) for one in run.model.blocks}

    def list_segments(
        self, op: str, chunk: ModelChunk, pieces: PassBreakdown
    ) -> list[list[LayerSegment]]:
        """Return what a pass over a chunk consists of, layer by layer in the order it runs."""
        inside = range(chunk.first, chunk.last)
        order = list(inside if op == "F" else reversed(inside))
        known = [self._tables[self._names[layer]][op, 0] for layer in order]
        whole = PassBreakdown(*map(sum, zip(*known, strict=True))) if known else PassBreakdown()
        ends = chunk.has_embedding or chunk.has_head or not known
        # A difference in the last digits is rounding, not an embedding.
        fits = ends and pieces.compute - whole.compute > 1e-9 * pieces.compute
        factor = PassBreakdown(*(a / b if b else 0.0 for a, b in zip(pieces, whole, strict=True)))
        each = 1 / max(1, len(order))
        factor = factor._replace(dp=pieces.dp * each, offload=pieces.offload * each)
        if fits:
            factor = factor._replace(compute=1.0)
        found = [
            self._layer(op, layer, chunk, own, factor)
            for layer, own in zip(order, known, strict=True)
        ]
        if fits:
            label = "head" if chunk.has_head else "embedding"
            end = [LayerSegment(f"{label} {PASS_NAMES[op]}", pieces.compute - whole.compute)]
            # The head comes last forward and first backward, the embedding the other way round.
            return [*found, end] if chunk.has_head == (op == "F") else [end, *found]
        return found

    def _layer(
        self, op: str, layer: int, chunk: ModelChunk, own: PassBreakdown, factor: PassBreakdown
    ) -> list[LayerSegment]:
        name = self._names[layer]
        way = "F" if op == "F" else "B"
        some: tuple[LayerCollective, ...] = ()
        if op != "W":
            some = (*self._collectives[name][way], *self._copies[chunk.position][way])
            if factor.dp:  # the backward that ends a step may leave them to the buckets
                some += self._sharded[chunk.rank][way]
        waits = {"tp": own.tp * factor.tp, "cp": own.cp * factor.cp, "ep": own.ep * factor.ep}
        waits |= {"dp": factor.dp, "host": factor.offload}
        around: dict[tuple[str, bool], list[LayerSegment]] = {}
        last = {one.group: index for index, one in enumerate(some)}
        for index, one in enumerate(some):
            # What exceeds all collectives of a group stretches the last: heads have some as well.
            left = waits[one.group]
            exposed = left if index == last[one.group] else min(one.seconds, left)
            waits[one.group] -= exposed
            segment = LayerSegment(one.name, one.seconds, layer, one, exposed)
            around.setdefault((one.part, one.runs_before_compute), []).append(segment)
        found = around.get(("layer", True), [])
        if own.recompute:
            found = [*found, LayerSegment("recompute", own.recompute * factor.recompute, layer)]
        parts = self._parts[name][op]
        for part, label, share in parts if op == "F" else reversed(parts):
            compute = LayerSegment(
                f"{label} {PASS_NAMES[op]}", own.compute * factor.compute * share, layer
            )
            found = [*found, *around.get((part, True), []), compute, *around.get((part, False), [])]
        return [*found, *around.get(("layer", False), [])]


def _layer_tables(run: TrainingRun) -> dict[str, PassTable]:
    """Return the passes over one layer of every kind, by predicting each layer as a stage."""
    names = run.model.layer_names
    alone = copy.copy(run)
    alone.layout = msgspec.structs.replace(
        run.layout,
        pp=len(names),
        virtual_stages=1,
        schedule="1f1b",
        stage_layers=(1,) * len(names),
    )
    times = chunk_times(alone)
    # The first and the last stage have embedding and head beside their layer.
    inner = list(range(1, len(names) - 1))
    at = {names[layer]: layer for layer in (0, len(names) - 1, *inner)}
    return {name: build_pass_table((times[layer],), (NO_WAITS,)) for name, layer in at.items()}


def _parts(run: TrainingRun, block: BlockSpec) -> dict[str, list[tuple[str, str, float]]]:
    """Return, by pass, the parts of a block with what they are called and their compute's share."""
    mixer, mlp = block.mixer, block.mlp
    attends = isinstance(mixer, AttentionSpec | LatentAttentionSpec)
    labels = {
        "mixer": "attention" if attends else type(mixer).__name__.removesuffix("Spec").lower(),
        "mlp": "experts" if isinstance(mlp, MoESpec) else "mlp",
    }
    if mixer is None or mlp is None:
        part = "mlp" if mixer is None else "mixer"
        return {op: [(part, labels[part], 1.0)] for op in PASS_NAMES}
    whole = block_passes(run, block)
    own = block_passes(run, msgspec.structs.replace(block, mlp=None))
    shares = {
        "F": own.forward_s / whole.forward_s,
        "B": own.backward_s / whole.backward_s,
        "I": own.dgrad_s / whole.dgrad_s,
        "W": own.wgrad_s / whole.wgrad_s if whole.wgrad_s else 0.5,
    }
    return {
        op: [("mixer", labels["mixer"], share), ("mlp", labels["mlp"], 1 - share)]
        for op, share in shares.items()
    }
