"""Memory per pipeline rank: exact states, plus what a forward pass leaves behind.

States come from `spec.layout.states` and are facts. Activations are counted tensor by tensor and
multiplied by the microbatches each rank holds in flight. Framework and communication buffers and
fragmentation are not included here, so leave a few GiB of head-room.
"""

import msgspec

from meshwright.predict.activations import boundary_bytes_per_token, bytes_per_token
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Chunk, Layout, StateBytes, rank_chunks, state_bytes
from meshwright.spec.model import Model


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


def predict_memory(
    model: Model, layout: Layout, cluster: Cluster, *, sequence_length: int, global_batch: int
) -> MemoryPrediction:
    """Predict the memory one rank of every pipeline stage needs."""
    tokens = layout.microbatch * -(-sequence_length // layout.cp)
    held = rank_chunks(layout, model.layers)
    microbatches = max(1, layout.microbatches(global_batch))
    stages = tuple(
        _stage(model, layout, states, chunks, tokens=tokens, microbatches=microbatches)
        for states, chunks in zip(state_bytes(layout, model), held, strict=True)
    )
    return MemoryPrediction(stages=stages, capacity_bytes=cluster.gpu.memory_bytes)


def in_flight(layout: Layout, stage: int, microbatches: int) -> int:
    """Return the most chunk-microbatches whose activations a rank holds at once.

    1F1B keeps one per later stage; interleaving adds a round of the pipeline per further chunk
    (Narayanan et al. 2021); ZB-H2 lets warm-up run twice as deep and ZB-V fills both halves
    (Qi et al. 2024); DualPipe feeds from both ends (DeepSeek-V3 report).
    """
    pp, chunks = layout.pp, layout.virtual_stages
    later = pp - stage
    depth = {
        "gpipe": microbatches * chunks,
        "1f1b": later,
        "interleaved": 2 * (later - 1) + (chunks - 1) * pp + 1,
        "zb-h1": later,
        "zb-h2": 2 * later - 1,
        "zb-v": 2 * pp,
        "dualpipe": pp + 1,
        "dualpipe-v": 2 * pp + 1,
    }[layout.schedule]
    return max(1, min(depth if pp > 1 else 1, microbatches * chunks))


def _stage(
    model: Model, layout: Layout, states: StateBytes, held: tuple[Chunk, ...], *,
    tokens: int, microbatches: int,
) -> StageMemory:  # fmt: skip
    names = model.layer_names
    stage = held[0].rank
    flying = in_flight(layout, stage, microbatches)
    per_chunk = [_chunk_bytes(model, layout, names[chunk.first : chunk.last]) for chunk in held]
    kept = sum(bytes_ for bytes_, _ in per_chunk) / len(per_chunk)
    alive = max(bytes_ for _, bytes_ in per_chunk)
    offloaded = set(layout.offload)
    logits = 0
    if any(chunk.has_head for chunk in held):
        # The head's output in the working format, and its softmax and gradient in fp32.
        logits = round(tokens * (2 + 4) * model.vocab / layout.tp)
    return StageMemory(
        stage=stage,
        layers=sum(chunk.last - chunk.first for chunk in held),
        parameters_bytes=0 if "parameters" in offloaded else states.parameters,
        gradients_bytes=0 if "gradients" in offloaded else states.gradients,
        optimizer_bytes=0 if "optimizer" in offloaded else states.optimizer,
        # Offloaded activations come back one microbatch at a time.
        activations_bytes=round(
            tokens * ((1 if "activations" in offloaded else flying) * kept + alive)
        ),
        logits_bytes=logits,
        in_flight=flying,
    )


def _chunk_bytes(model: Model, layout: Layout, names: tuple[str, ...]) -> tuple[float, float]:
    """Return the bytes per token a chunk keeps, and those alive while it computes again."""
    whole = {block.name: bytes_per_token(layout, block, model.hidden) for block in model.blocks}
    covered = len(names) if layout.recompute_layers is None else layout.recompute_layers
    under, rest = names[:covered], names[covered:]
    beyond = sum(whole[name] for name in rest)
    if layout.recompute == "full":
        # Only its input is kept of a layer; one layer at a time is alive in full.
        kept = len(under) * boundary_bytes_per_token(layout, model.hidden)
        return kept + beyond, max((whole[name] for name in under), default=0.0)
    dropped = layout.recompute_ops if layout.recompute == "selective" else ()
    part = {
        block.name: bytes_per_token(layout, block, model.hidden, dropped) for block in model.blocks
    }
    kept = sum(part[name] for name in under)
    return kept + beyond, max((whole[name] - part[name] for name in under), default=0.0)
