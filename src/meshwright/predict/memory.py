"""Memory per pipeline rank: states, activations in flight, buffers, and what the runtime adds.

States come from `spec.layout.states` and are facts. Activations are counted tensor by tensor and
multiplied by the microbatches each rank holds in flight; `predict.buffers` adds what lives for a
moment. Sources mean different things by memory, so three readings are given: what is allocated,
what the allocator has reserved, and what the device reports.
"""

from functools import lru_cache
from typing import NamedTuple

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
    state_bytes,
)
from meshwright.spec.model import Block


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


class _Layer(NamedTuple):
    """Bytes per token of one layer."""

    whole: float
    """Kept where nothing is computed again."""
    kept: float
    """Kept as the layout says."""
    working: float
    """Alive only while its backward runs, where nothing is computed again."""


class _Rank(NamedTuple):
    """What one rank of a stage holds."""

    parameters: RankParameters
    states: StateBytes
    chunks: tuple[Chunk, ...]

    @property
    def layers(self) -> int:
        return sum(chunk.last - chunk.first for chunk in self.chunks)

    @property
    def has_head(self) -> bool:
        return any(chunk.has_head for chunk in self.chunks)


def predict_memory(run: Run, constants: MemoryConstants = MEMORY_CONSTANTS) -> MemoryPrediction:
    """Predict the memory one rank of every pipeline stage needs."""
    layout, model = run.layout, run.model
    formats = layout
    if layout.zero == 3 and not run.frozen:
        # Sharded weights are kept in fp32 and cast as they are gathered: no second copy of them.
        formats = replace(layout, precision="fp32")
    ranks = zip(
        rank_parameters(layout, model),
        state_bytes(formats, model),
        rank_chunks(layout, model.layers),
        strict=True,
    )
    layers = _layers(run)
    return MemoryPrediction(
        stages=tuple(_stage(run, constants, layers, _Rank(*rank)) for rank in ranks),
        capacity_bytes=run.cluster.gpu.memory_bytes,
    )


@lru_cache(maxsize=1024)
def _peaks(kind: ScheduleKind, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return schedule_peaks(build(kind, pp, microbatches, virtual_stages=chunks))


def in_flight(layout: Layout, stage: int, microbatches: int) -> int:
    """Return the most chunk-microbatches whose activations a rank holds at once.

    The schedule itself is asked. All but GPipe reach their peak within two rounds of the
    pipeline, so no longer schedule is built.
    """
    pp, chunks = layout.pp, layout.virtual_stages
    if pp == 1:
        return 1
    if layout.schedule == "gpipe":
        return microbatches * chunks
    return _peaks(layout.schedule, pp, chunks, min(microbatches, 2 * pp))[stage]


def _stage(
    run: Run, constants: MemoryConstants, layers: dict[str, _Layer], rank: _Rank
) -> StageMemory:
    layout, stage = run.layout, rank.chunks[0].rank
    states = _resident(run, rank)
    flying = in_flight(layout, stage, run.microbatches)
    kept, working = _activations(run, layers, rank, flying)
    logits = logits_bytes(run, constants) if rank.has_head else 0
    # The logits are gone before the last layer's backward begins.
    working = max(0, working - logits)
    buffers = weight_buffer_bytes(run, rank.parameters, rank.layers, constants)
    moment = kept + working + logits + buffers
    if layout.zero == 3 and layout.pp == 1 and run.microbatches == 1:
        # Backward makes gradients while it lets activations go: the peak holds none, or the rest.
        states = states._replace(gradients=max(0, states.gradients - moment))
    buffers += max(0, update_bytes(run, states.optimizer) - moment)
    tensors = states.total + kept + working + logits + buffers
    runtime = runtime_bytes(run, constants)
    room = run.cluster.gpu.memory_bytes - runtime - tensors
    waste = max(constants.squeezed * tensors, min(constants.fragmentation * tensors, room))
    return StageMemory(
        stage=stage,
        layers=rank.layers,
        parameters_bytes=states.parameters,
        gradients_bytes=states.gradients,
        optimizer_bytes=states.optimizer,
        activations_bytes=kept,
        working_bytes=working,
        logits_bytes=logits,
        buffers_bytes=buffers,
        fragmentation_bytes=round(waste),
        runtime_bytes=runtime,
        in_flight=flying,
    )


def _resident(run: Run, rank: _Rank) -> StateBytes:
    """Return the states that stay on the device, in the formats the software keeps them in."""
    states = rank.states
    if run.frozen:
        # Adapters are small; the model's own weights have neither gradients nor moments.
        states = StateBytes(states.parameters, 0, 0)
    if stores_eight_bits(run):
        saved = rank.parameters.matrices + rank.parameters.experts
        states = states._replace(parameters=states.parameters - saved)
    return states.on_device(run.layout.offload)


def _layers(run: Run) -> dict[str, _Layer]:
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
        working = backward_bytes_per_token(
            layout, block, hidden, software=run.software, length=run.length
        )
        found[block.name] = _Layer(whole, kept, working)
    return found


def _per_token(run: Run, block: Block, again: Recomputed = ()) -> float:
    """Return the bytes one token leaves behind in a block."""
    return bytes_per_token(
        run.layout, block, run.model.hidden, again, software=run.software, length=run.length
    )


def _activations(run: Run, layers: dict[str, _Layer], rank: _Rank, flying: int) -> tuple[int, int]:
    """Return the bytes kept for backward, and those alive only in the layer that runs it."""
    model, names = run.model, run.model.layer_names
    covered = run.layout.recompute_layers
    kept = working = 0.0
    for chunk in rank.chunks:
        for index, name in enumerate(names[chunk.first : chunk.last]):
            layer = layers[name]
            under = covered is None or index < covered
            size = layer.kept if under else layer.whole
            kept += size
            working = max(working, layer.whole - size + layer.working)
    kept = flying * (kept / len(rank.chunks) + sent_bytes_per_token(run))
    if model.multi_token is not None and rank.has_head:
        kept += model.multi_token.depth * layers[model.multi_token.block].whole
    if "activations" in run.layout.offload:
        # What is offloaded comes back a layer at a time, the next one on its way meanwhile.
        widest = max(layer.whole for layer in layers.values())
        kept, working = 0.0, working + 2 * widest
    return round(run.tokens * kept), round(run.tokens * working)
