"""Memory per pipeline rank: exact states, plus what a forward pass leaves behind.

States come from `spec.layout.states` and are facts. Activations are counted tensor by tensor and
multiplied by the microbatches each rank holds in flight; less fused software keeps more. Framework
and communication buffers are one constant. Temporary copies and fragmentation are not included.
"""

from functools import lru_cache

import msgspec

from meshwright.policy.pipeline import build
from meshwright.policy.pipeline import in_flight as schedule_peaks
from meshwright.predict.activations import boundary_bytes_per_token, bytes_per_token
from meshwright.predict.run import Run
from meshwright.spec.layout import (
    Chunk,
    Layout,
    RecomputeOp,
    ScheduleKind,
    StateBytes,
    rank_chunks,
    state_bytes,
)
from meshwright.spec.model import Block

FRAMEWORK_BYTES = round(3.5 * 2**30)
"""CUDA context, communicators' buffers, library workspaces and the allocator's slack on one GPU.
aiconfigurator reserves as much for them; published runs put it between 2 and 6 GiB."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank of a pipeline stage."""

    stage: int
    """Pipeline rank."""
    layers: int
    """Layers it holds."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Activations of all microbatches in flight."""
    logits_bytes: int
    """Logits and their gradient on the rank that holds the head."""
    framework_bytes: int = FRAMEWORK_BYTES
    """What the framework and its libraries take whatever the layout."""
    in_flight: int
    """Microbatches (of one chunk each) whose activations are held at once, at the most."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.framework_bytes
        )


class MemoryPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of every pipeline stage against what a GPU has."""

    stages: tuple[StageMemory, ...]
    capacity_bytes: int

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def fits(self) -> bool:
        """Whether the worst stage stays within the GPU."""
        return self.worst.total_bytes <= self.capacity_bytes


def predict_memory(run: Run) -> MemoryPrediction:
    """Predict the memory one rank of every pipeline stage needs."""
    layout, model = run.layout, run.model
    held = rank_chunks(layout, model.layers)
    stages = tuple(
        _stage(run, states, chunks)
        for states, chunks in zip(state_bytes(layout, model), held, strict=True)
    )
    return MemoryPrediction(stages=stages, capacity_bytes=run.cluster.gpu.memory_bytes)


def _per_token(run: Run, block: Block, recomputed: tuple[RecomputeOp, ...] = ()) -> float:
    """Return the bytes one token leaves behind in a block."""
    return bytes_per_token(
        run.layout,
        block,
        run.model.hidden,
        recomputed,
        software=run.software,
        length=run.length,
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


def _stage(run: Run, states: StateBytes, held: tuple[Chunk, ...]) -> StageMemory:
    model, layout = run.model, run.layout
    names = model.layer_names
    stage = held[0].rank
    flying = in_flight(layout, stage, run.microbatches)
    per_chunk = [_chunk_bytes(run, names[chunk.first : chunk.last]) for chunk in held]
    kept = sum(bytes_ for bytes_, _ in per_chunk) / len(per_chunk)
    alive = max(bytes_ for _, bytes_ in per_chunk)
    logits = 0
    if any(chunk.has_head for chunk in held):
        # The head's output in the working format, and its softmax and gradient in fp32.
        logits = round(run.tokens * (2 + 4) * model.vocab / layout.tp)
        if model.multi_token is not None:
            extra = _per_token(run, model.block(model.multi_token.block))
            alive += extra * model.multi_token.depth
    if "activations" in layout.offload:
        # What is offloaded comes back a layer at a time, the next one on its way meanwhile.
        widest = max(_per_token(run, block) for block in model.blocks)
        kept, alive = 0.0, alive + 2 * widest
    resident = states.on_device(layout.offload)
    return StageMemory(
        stage=stage,
        layers=sum(chunk.last - chunk.first for chunk in held),
        parameters_bytes=resident.parameters,
        gradients_bytes=resident.gradients,
        optimizer_bytes=resident.optimizer,
        activations_bytes=round(run.tokens * (flying * kept + alive)),
        logits_bytes=logits,
        in_flight=flying,
    )


def _chunk_bytes(run: Run, names: tuple[str, ...]) -> tuple[float, float]:
    """Return the bytes per token a chunk keeps, and those alive while it computes again."""
    model, layout = run.model, run.layout
    whole = {block.name: _per_token(run, block) for block in model.blocks}
    covered = len(names) if layout.recompute_layers is None else layout.recompute_layers
    under, rest = names[:covered], names[covered:]
    beyond = sum(whole[name] for name in rest)
    if layout.recompute == "full":
        # Only its input is kept of a layer; one layer at a time is alive in full.
        kept = len(under) * boundary_bytes_per_token(layout, model.hidden)
        return kept + beyond, max((whole[name] for name in under), default=0.0)
    dropped = layout.recompute_ops if layout.recompute == "selective" else ()
    part = {block.name: _per_token(run, block, dropped) for block in model.blocks}
    kept = sum(part[name] for name in under)
    return kept + beyond, max((whole[name] - part[name] for name in under), default=0.0)
