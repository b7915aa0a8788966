"""Memory per pipeline rank: states, activations in flight, buffers, and what the runtime adds.

States come from `spec.layout.model_states` and are facts. Activations are counted tensor by tensor
and multiplied by the microbatches each rank holds in flight; `predict.memory.buffers` adds what
lives for a moment. Sources mean different things by memory, so three readings are given: what is
allocated, what the allocator has reserved, and what the device reports.
"""

import msgspec

from meshwright.predict.memory.buffers import MEMORY_CONSTANTS, MemoryConstants
from meshwright.predict.memory.rank_memory import (
    LayerBytes,
    StageRank,
    activation_bytes,
    count_resident_bytes,
    count_stage_in_flight,
    layer_bytes,
    list_stage_ranks,
)
from meshwright.predict.training_run.training_run import TrainingRun


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
    def worst_stage(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def free_bytes(self) -> int:
        """What the worst stage leaves free; negative where it does not fit."""
        return self.capacity_bytes - self.worst_stage.total_bytes

    @property
    def fits(self) -> bool:
        """Whether the worst stage stays within the GPU."""
        return self.free_bytes >= 0


def predict_memory(
    run: TrainingRun, constants: MemoryConstants = MEMORY_CONSTANTS
) -> MemoryPrediction:
    """Predict the memory one rank of every pipeline stage needs."""
    layers = layer_bytes(run)
    return MemoryPrediction(
        stages=tuple(_stage(run, constants, layers, rank) for rank in list_stage_ranks(run)),
        capacity_bytes=run.cluster.gpu.memory_bytes,
    )


def _stage(
    run: TrainingRun, constants: MemoryConstants, layers: dict[str, LayerBytes], rank: StageRank
) -> StageMemory:
    stage = rank.chunks[0].rank
    flying = count_stage_in_flight(run.layout, stage, run.num_microbatches)
    kept, working = _activations(run, layers, rank, flying)
    held = count_resident_bytes(run, rank, constants)
    peak = held.peak(kept, working)
    room = run.cluster.gpu.memory_bytes - held.runtime_bytes - peak.tensors_bytes
    waste = min(constants.fragmentation * peak.tensors_bytes, room)
    return StageMemory(
        stage=stage,
        layers=rank.layers,
        parameters_bytes=peak.states.parameters,
        gradients_bytes=peak.states.gradients,
        optimizer_bytes=peak.states.optimizer,
        activations_bytes=kept,
        working_bytes=peak.working_bytes,
        logits_bytes=held.logits_bytes,
        buffers_bytes=peak.buffers_bytes,
        fragmentation_bytes=round(
            max(constants.fragmentation_when_full * peak.tensors_bytes, waste)
        ),
        runtime_bytes=held.runtime_bytes,
        in_flight=flying,
    )


def _activations(
    run: TrainingRun, layers: dict[str, LayerBytes], rank: StageRank, flying: int
) -> tuple[int, int]:
    """Return the bytes kept for backward, and those alive only in the layer that runs it."""
    names, covered = run.model.layer_names, run.layout.recompute_layers
    away = run.layout.offload_layers or 0
    kept = working = 0.0
    for chunk in rank.chunks:
        for index, name in enumerate(names[chunk.first : chunk.last]):
            layer = layers[name]
            under = covered is None or index < covered
            size = layer.with_recompute if under else layer.without_recompute
            if index >= away:
                kept += size
            working = max(working, layer.without_recompute - size + layer.backward_working)
    kept, working = activation_bytes(run, layers, rank, flying, (kept, working))
    return round(kept), round(working)
