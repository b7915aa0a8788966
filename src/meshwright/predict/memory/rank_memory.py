"""Model states, activations and buffers of one pipeline rank, in bytes."""

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from meshwright.policy.pipeline import build_schedule, count_in_flight
from meshwright.predict.memory.activations import (
    RecomputeSelection,
    activation_bytes_per_token,
    backward_bytes_per_token,
    boundary_bytes_per_token,
    list_recomputed_ops,
)
from meshwright.predict.memory.buffers import (
    MEMORY_CONSTANTS,
    MemoryConstants,
    logits_bytes,
    optimizer_step_bytes,
    runtime_bytes,
    stage_output_bytes_per_token,
    stores_fp8_weights,
    weight_buffer_bytes,
)
from meshwright.predict.training_run.lora_shapes import count_trained_parameters, lora_state_bytes
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import (
    Layout,
    ModelChunk,
    RankParameters,
    ScheduleKind,
    StateBytes,
    count_rank_parameters,
    list_chunks_by_rank,
    rank_state_bytes,
)
from meshwright.spec.model import BlockSpec, MoESpec

Numbers: TypeAlias = Any
"""A number, or an array of them."""


class LayerBytes(NamedTuple):
    """Bytes per token of one layer."""

    without_recompute: float
    """Kept where nothing is computed again."""
    with_recompute: float
    """Kept as the layout says."""
    backward_working: float
    """Alive only while its backward runs, where nothing is computed again."""


class StageRank(NamedTuple):
    """What one rank of a stage holds."""

    parameters: RankParameters
    trained: RankParameters
    """Its adapters where the weights are frozen, else all."""
    chunks: tuple[ModelChunk, ...]

    @property
    def layers(self) -> int:
        """Layers of all its chunks."""
        return sum(chunk.last - chunk.first for chunk in self.chunks)

    @property
    def has_head(self) -> bool:
        """Whether it computes the logits."""
        return any(chunk.has_head for chunk in self.chunks)


class ResidentBytes(NamedTuple):
    """What a rank holds whatever its activations are."""

    states: StateBytes
    logits_bytes: int
    """Logits and their gradient, where it has the head."""
    buffers_bytes: int
    """Weights gathered and gradients copied for a while."""
    update_bytes: int
    """What the optimizer's step makes for itself when the passes are over."""
    runtime_bytes: int
    """CUDA context and communicators."""
    gradients_replace_activations: bool
    """Whether gradients take the place of activations as backward goes."""

    def peak(self, kept: int, working: int) -> "PeakBytes":
        """Return what the rank holds at its peak with so many bytes of activations."""
        # The logits are gone before the last layer's backward begins.
        last, working = working, max(0, working - self.logits_bytes)
        moment = kept + working + self.logits_bytes + self.buffers_bytes
        states = self.states
        if self.gradients_replace_activations:
            # The layer whose backward ends meets the gradients of all.
            states = states._replace(gradients=max(0, states.gradients + last - moment))
        buffers = self.buffers_bytes + max(0, self.update_bytes - moment)
        tensors = states.total + kept + working + self.logits_bytes + buffers
        return PeakBytes(states, working, buffers, tensors)


class PeakBytes(NamedTuple):
    """What a rank holds when it holds most."""

    states: StateBytes
    working_bytes: int
    buffers_bytes: int
    tensors_bytes: int
    """All bytes in tensors."""


def list_stage_ranks(run: TrainingRun) -> tuple[StageRank, ...]:
    """Return what one rank of every stage holds, first stage first."""
    parameters = count_rank_parameters(run.layout, run.model)
    trained = count_trained_parameters(run) if run.frozen else parameters
    held = list_chunks_by_rank(run.layout, run.model.layers)
    return tuple(StageRank(*rank) for rank in zip(parameters, trained, held, strict=True))


@lru_cache(maxsize=1024)
def _peaks(kind: ScheduleKind, pp: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    return count_in_flight(build_schedule(kind, pp, microbatches, virtual_stages=chunks))


def count_stage_in_flight(layout: Layout, stage: int, microbatches: int) -> int:
    """Return the most chunk-microbatches whose activations a rank holds at once."""
    return count_schedule_in_flight(layout, microbatches)[stage]


def count_schedule_in_flight(layout: Layout, microbatches: int) -> tuple[int, ...]:
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


def count_resident_bytes(
    run: TrainingRun, rank: StageRank, constants: MemoryConstants = MEMORY_CONSTANTS
) -> ResidentBytes:
    """Return what a rank holds whatever its activations are."""
    states = _states(run, rank)
    return ResidentBytes(
        states,
        logits_bytes(run, constants) if rank.has_head else 0,
        weight_buffer_bytes(run, rank.parameters, rank.layers, constants),
        optimizer_step_bytes(run, states.optimizer),
        runtime_bytes(run, constants),
        _releases(run),
    )


def _releases(run: TrainingRun) -> bool:
    """Say whether the peak holds no gradients, or only those that outgrow the activations."""
    layout = run.layout
    if layout.pp > 1 or run.num_microbatches > 1:
        return False
    return layout.zero == 3 or (run.framework.set_to_none and layout.dp * layout.cp == 1)


def activation_budget_bytes(
    run: TrainingRun, runtime: int, constants: MemoryConstants = MEMORY_CONSTANTS
) -> float:
    """Return the bytes of tensors that just fit: the allocator wastes little where it must."""
    return (run.cluster.gpu.memory_bytes - runtime) / (1 + constants.fragmentation_when_full)


def _states(run: TrainingRun, rank: StageRank) -> StateBytes:
    """Return the states that stay on the device, in the formats the software keeps them in."""
    formats = run.layout
    if formats.zero == 3 and not run.frozen:
        # Sharded weights are kept in fp32 and cast as they are gathered: no second copy of them.
        formats = replace(formats, precision="fp32")
    states = rank_state_bytes(formats, rank.parameters)
    if run.frozen:
        # The model's own weights have neither gradients nor moments; its adapters have both.
        added = lora_state_bytes(run.layout, rank.trained)
        states = added._replace(parameters=states.parameters + added.parameters)
    if stores_fp8_weights(run):
        saved = rank.parameters.matrices + rank.parameters.experts
        states = states._replace(parameters=states.parameters - saved)
    return states.without_offloaded(run.layout.offload)


def layer_bytes(run: TrainingRun) -> dict[str, LayerBytes]:
    """Return every kind of layer."""
    layout, hidden = run.layout, run.model.hidden
    again = list_recomputed_ops(layout, run.framework)
    found = {}
    for block in run.model.blocks:
        whole = _per_token(run, block)
        kept = whole
        if layout.recompute == "full":
            # Only its input is kept of a layer.
            kept = boundary_bytes_per_token(layout, hidden)
        elif again:
            kept = _per_token(run, block, again)
        load = run.expert_load(block.mlp) if isinstance(block.mlp, MoESpec) else 1.0
        working = backward_bytes_per_token(
            layout,
            block,
            hidden,
            software=run.framework,
            length=run.sequence_length,
            expert_load=load,
        )
        found[block.name] = LayerBytes(whole, kept, working)
    return found


def _per_token(run: TrainingRun, block: BlockSpec, again: RecomputeSelection = ()) -> float:
    """Return the bytes one token leaves behind in a block."""
    return activation_bytes_per_token(
        run.layout,
        block,
        run.model.hidden,
        again,
        software=run.framework,
        length=run.sequence_length,
        adapter=run.adapter,
        expert_load=run.expert_load(block.mlp) if isinstance(block.mlp, MoESpec) else 1.0,
    )


def activation_bytes(
    run: TrainingRun,
    layers: dict[str, LayerBytes],
    rank: StageRank,
    flying: int,
    per_token: tuple[Numbers, Numbers],
) -> tuple[Numbers, Numbers]:
    """Return what a rank keeps and works with, given its layers' bytes per token.

    The pair is what one pass over all its chunks keeps, without the `offload_layers` of each, and
    what the widest layer works with: numbers, or arrays of them.
    """
    kept, working = per_token
    heads = run.model.multi_token
    kept = flying * (kept / len(rank.chunks) + stage_output_bytes_per_token(run))
    if heads is not None and rank.has_head:
        kept = kept + heads.depth * layers[heads.block].without_recompute
    if "activations" in run.layout.offload:
        # What is offloaded comes back a layer at a time, the next one on its way meanwhile.
        widest, away = (
            max(layer.without_recompute for layer in layers.values()),
            run.layout.offload_layers,
        )
        working = working + widest * (2 if away is None else min(2, away))
        if away is None:
            kept = 0.0 * kept
    return run.microbatch_tokens * kept, run.microbatch_tokens * working
