"""Memory per pipeline rank: states, activations in flight, buffers, and what the runtime adds.

States come from `spec.layout.states` and are facts. Activations are counted tensor by tensor and
multiplied by the microbatches each rank holds in flight; `predict.buffers` adds what lives for a
moment. Sources mean different things by memory, so three readings are given: what is allocated,
what the allocator has reserved, and what the device reports.
"""

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from meshwright.policy.pipeline import build
from meshwright.policy.pipeline import in_flight as schedule_peaks
from meshwright.predict.activations import (
    Recomputed,
    backward_bytes_per_token,
    boundary_bytes_per_token,
    bytes_per_token,
    recomputed,
)
from meshwright.predict.adapters import adapter_states, trained_parameters
from meshwright.predict.buffers import (
    MEMORY_CONSTANTS,
    MemoryConstants,
    logits_bytes,
    runtime_bytes,
    sent_bytes_per_token,
    stores_eight_bits,
    update_bytes,
    weight_buffer_bytes,
)
from meshwright.predict.run import Run
from meshwright.spec.layout import (
    Chunk,
    Layout,
    RankParameters,
    ScheduleKind,
    StateBytes,
    rank_chunks,
    rank_parameters,
    states_of,
)
from meshwright.spec.model import Block, Experts

Numbers: TypeAlias = Any
"""A number, or an array of them."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank of a pipeline stage when it holds most."""

    stage: int
    """Pipeline rank."""
    layers: int
    """Layers it holds."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Activations of all microbatches in flight."""
    working_bytes: int
    """What the layer in backward adds: activations computed again, and gradients."""
    logits_bytes: int
    """Logits and their gradient on the rank that holds the head."""
    buffers_bytes: int
    """Weights gathered and gradients copied for a while."""
    fragmentation_bytes: int
    """What the allocator holds beyond the tensors in it."""
    runtime_bytes: int
    """CUDA context and communicators."""
    in_flight: int
    """Microbatches (of one chunk each) whose activations are held at once, at the most."""

    @property
    def framework_bytes(self) -> int:
        """All that is neither state, activation nor logit."""
        return (
            self.working_bytes + self.buffers_bytes + self.fragmentation_bytes + self.runtime_bytes
        )

    @property
    def counted_bytes(self) -> int:
        """States and activations alone, as papers compute them."""
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes

    @property
    def allocated_bytes(self) -> int:
        """All tensors: what `torch.cuda.max_memory_allocated` says."""
        return self.counted_bytes + self.working_bytes + self.logits_bytes + self.buffers_bytes

    @property
    def reserved_bytes(self) -> int:
        """The allocator's pool: what `torch.cuda.max_memory_reserved` says."""
        return self.allocated_bytes + self.fragmentation_bytes

    @property
    def total_bytes(self) -> int:
        """The whole process: what nvidia-smi says, and what must fit."""
        return self.reserved_bytes + self.runtime_bytes


class MemoryPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of every pipeline stage against what a GPU has."""

    stages: tuple[StageMemory, ...]
    capacity_bytes: int

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def spare_bytes(self) -> int:
        """What the worst stage leaves free; negative where it does not fit."""
        return self.capacity_bytes - self.worst.total_bytes

    @property
    def fits(self) -> bool:
        """Whether the worst stage stays within the GPU."""
        return self.spare_bytes >= 0


class LayerBytes(NamedTuple):
    """Bytes per token of one layer."""

    whole: float
    """Kept where nothing is computed again."""
    kept: float
    """Kept as the layout says."""
    working: float
    """Alive only while its backward runs, where nothing is computed again."""


class Rank(NamedTuple):
    """What one rank of a stage holds."""

    parameters: RankParameters
    trained: RankParameters
    """Its adapters where the weights are frozen, else all."""
    chunks: tuple[Chunk, ...]

    @property
    def layers(self) -> int:
        """Layers of all its chunks."""
        return sum(chunk.last - chunk.first for chunk in self.chunks)

    @property
    def has_head(self) -> bool:
        """Whether it computes the logits."""
        return any(chunk.has_head for chunk in self.chunks)


class Resident(NamedTuple):
    """What a rank holds whatever its activations are."""

    states: StateBytes
    logits: int
    """Logits and their gradient, where it has the head."""
    buffers: int
    """Weights gathered and gradients copied for a while."""
    update: int
    """What the optimizer's step makes for itself when the passes are over."""
    runtime: int
    """CUDA context and communicators."""
    releases: bool
    """Whether gradients take the place of activations as backward goes."""

    def peak(self, kept: int, working: int) -> "Peak":
        """Return what the rank holds at its peak with so many bytes of activations."""
        # The logits are gone before the last layer's backward begins.
        last, working = working, max(0, working - self.logits)
        moment = kept + working + self.logits + self.buffers
        states = self.states
        if self.releases:
            # The layer whose backward ends meets the gradients of all.
            states = states._replace(gradients=max(0, states.gradients + last - moment))
        buffers = self.buffers + max(0, self.update - moment)
        tensors = states.total + kept + working + self.logits + buffers
        return Peak(states, working, buffers, tensors)


class Peak(NamedTuple):
    """What a rank holds when it holds most."""

    states: StateBytes
    working: int
    buffers: int
    tensors: int
    """All bytes in tensors."""


def predict_memory(run: Run, constants: MemoryConstants = MEMORY_CONSTANTS) -> MemoryPrediction:
    """Predict the memory one rank of every pipeline stage needs."""
    layers = layer_bytes(run)
    return MemoryPrediction(
        stages=tuple(_stage(run, constants, layers, rank) for rank in ranks_of(run)),
        capacity_bytes=run.cluster.gpu.memory_bytes,
    )


def ranks_of(run: Run) -> tuple[Rank, ...]:
    """Return what one rank of every stage holds, first stage first."""
    parameters = rank_parameters(run.layout, run.model)
    trained = trained_parameters(run) if run.frozen else parameters
    held = rank_chunks(run.layout, run.model.layers)
    return tuple(Rank(*rank) for rank in zip(parameters, trained, held, strict=True))


@lru_cache(maxsize=1024)
def _peaks(kind: ScheduleKind, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return schedule_peaks(build(kind, pp, microbatches, virtual_stages=chunks))


def in_flight(layout: Layout, stage: int, microbatches: int) -> int:
    """Return the most chunk-microbatches whose activations a rank holds at once."""
    return schedule_in_flight(layout, microbatches)[stage]


def schedule_in_flight(layout: Layout, microbatches: int) -> tuple[int, ...]:
    """Return the same of every rank.

    The schedule itself is asked. All but GPipe reach their peak within two rounds of the
    pipeline, so no longer schedule is built.
    """
    pp, chunks = layout.pp, layout.virtual_stages
    if pp == 1:
        return (1,)
    if layout.schedule == "gpipe":
        return (microbatches * chunks,) * pp
    return _peaks(layout.schedule, pp, chunks, min(microbatches, 2 * pp))


def _stage(
    run: Run, constants: MemoryConstants, layers: dict[str, LayerBytes], rank: Rank
) -> StageMemory:
    stage = rank.chunks[0].rank
    flying = in_flight(run.layout, stage, run.microbatches)
    kept, working = _activations(run, layers, rank, flying)
    held = resident(run, rank, constants)
    peak = held.peak(kept, working)
    room = run.cluster.gpu.memory_bytes - held.runtime - peak.tensors
    waste = min(constants.fragmentation * peak.tensors, room)
    return StageMemory(
        stage=stage,
        layers=rank.layers,
        parameters_bytes=peak.states.parameters,
        gradients_bytes=peak.states.gradients,
        optimizer_bytes=peak.states.optimizer,
        activations_bytes=kept,
        working_bytes=peak.working,
        logits_bytes=held.logits,
        buffers_bytes=peak.buffers,
        fragmentation_bytes=round(max(constants.squeezed * peak.tensors, waste)),
        runtime_bytes=held.runtime,
        in_flight=flying,
    )


def resident(run: Run, rank: Rank, constants: MemoryConstants = MEMORY_CONSTANTS) -> Resident:
    """Return what a rank holds whatever its activations are."""
    states = _states(run, rank)
    return Resident(
        states,
        logits_bytes(run, constants) if rank.has_head else 0,
        weight_buffer_bytes(run, rank.parameters, rank.layers, constants),
        update_bytes(run, states.optimizer),
        runtime_bytes(run, constants),
        _releases(run),
    )


def _releases(run: Run) -> bool:
    """Say whether the peak holds no gradients, or only those that outgrow the activations."""
    layout = run.layout
    if layout.pp > 1 or run.microbatches > 1:
        return False
    return layout.zero == 3 or (run.software.drops_gradients and layout.dp * layout.cp == 1)


def room_bytes(run: Run, runtime: int, constants: MemoryConstants = MEMORY_CONSTANTS) -> float:
    """Return the bytes of tensors that just fit: the allocator wastes little where it must."""
    return (run.cluster.gpu.memory_bytes - runtime) / (1 + constants.squeezed)


def _states(run: Run, rank: Rank) -> StateBytes:
    """Return the states that stay on the device, in the formats the software keeps them in."""
    formats = run.layout
    if formats.zero == 3 and not run.frozen:
        # Sharded weights are kept in fp32 and cast as they are gathered: no second copy of them.
        formats = replace(formats, precision="fp32")
    states = states_of(formats, rank.parameters)
    if run.frozen:
        # The model's own weights have neither gradients nor moments; its adapters have both.
        added = adapter_states(run.layout, rank.trained)
        states = added._replace(parameters=states.parameters + added.parameters)
    if stores_eight_bits(run):
        saved = rank.parameters.matrices + rank.parameters.experts
        states = states._replace(parameters=states.parameters - saved)
    return states.on_device(run.layout.offload)


def layer_bytes(run: Run) -> dict[str, LayerBytes]:
    """Return every kind of layer."""
    layout, hidden = run.layout, run.model.hidden
    again = recomputed(layout, run.software)
    found = {}
    for block in run.model.blocks:
        whole = _per_token(run, block)
        kept = whole
        if layout.recompute == "full":
            # Only its input is kept of a layer.
            kept = boundary_bytes_per_token(layout, hidden)
        elif again:
            kept = _per_token(run, block, again)
        load = run.expert_load(block.mlp) if isinstance(block.mlp, Experts) else 1.0
        working = backward_bytes_per_token(
            layout, block, hidden, software=run.software, length=run.length, expert_load=load
        )
        found[block.name] = LayerBytes(whole, kept, working)
    return found


def _per_token(run: Run, block: Block, again: Recomputed = ()) -> float:
    """Return the bytes one token leaves behind in a block."""
    return bytes_per_token(
        run.layout,
        block,
        run.model.hidden,
        again,
        software=run.software,
        length=run.length,
        adapter=run.adapter,
        expert_load=run.expert_load(block.mlp) if isinstance(block.mlp, Experts) else 1.0,
    )


def _activations(
    run: Run, layers: dict[str, LayerBytes], rank: Rank, flying: int
) -> tuple[int, int]:
    """Return the bytes kept for backward, and those alive only in the layer that runs it."""
    names, covered = run.model.layer_names, run.layout.recompute_layers
    away = run.layout.offload_layers or 0
    kept = working = 0.0
    for chunk in rank.chunks:
        for index, name in enumerate(names[chunk.first : chunk.last]):
            layer = layers[name]
            under = covered is None or index < covered
            size = layer.kept if under else layer.whole
            if index >= away:
                kept += size
            working = max(working, layer.whole - size + layer.working)
    kept, working = activation_bytes(run, layers, rank, flying, (kept, working))
    return round(kept), round(working)


def activation_bytes(
    run: Run,
    layers: dict[str, LayerBytes],
    rank: Rank,
    flying: int,
    per_token: tuple[Numbers, Numbers],
) -> tuple[Numbers, Numbers]:
    """Return what a rank keeps and works with, given its layers' bytes per token.

    The pair is what one pass over all its chunks keeps, without the `offload_layers` of each, and
    what the widest layer works with: numbers, or arrays of them.
    """
    kept, working = per_token
    heads = run.model.multi_token
    kept = flying * (kept / len(rank.chunks) + sent_bytes_per_token(run))
    if heads is not None and rank.has_head:
        kept = kept + heads.depth * layers[heads.block].whole
    if "activations" in run.layout.offload:
        # What is offloaded comes back a layer at a time, the next one on its way meanwhile.
        widest, away = max(layer.whole for layer in layers.values()), run.layout.offload_layers
        working = working + widest * (2 if away is None else min(2, away))
        if away is None:
            kept = 0.0 * kept
    return run.tokens * kept, run.tokens * working
