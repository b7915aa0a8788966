"""Bytes of parameters, gradients and optimizer states on each pipeline rank: facts, no estimate.

Bytes follow from the formats a layout names. Activations, buffers and fragmentation are
predictions and live in `predict.memory`.
"""

from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.layout.stages import Chunk, rank_chunks

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout
    from meshwright.spec.model import Model

STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "none": 0}
"""Bytes of one number in each state format."""

MOMENTS = {"adamw": 2, "muon": 1, "lion": 1, "sgd": 1}
"""Moments the optimizer keeps for a matrix inside a block; Muon leaves all else to AdamW."""


class RankParameters(NamedTuple):
    """Parameters one rank holds before sharding over data parallel."""

    matrices: int
    """In the matrices of its blocks, routed experts apart."""
    others: int
    """In embeddings, heads, norms and other vectors."""
    experts: int
    """In its routed experts."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.others + self.experts


class StateBytes(NamedTuple):
    """Bytes that stay on a rank for the whole run."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


def rank_parameters(layout: "Layout", model: "Model") -> tuple[RankParameters, ...]:
    """Count the parameters of one rank of every pipeline stage, first stage first."""
    return tuple(_held(layout, model, held) for held in rank_chunks(layout, model.layers))


def state_bytes(layout: "Layout", model: "Model") -> tuple[StateBytes, ...]:
    """Return the bytes of states on one rank of every pipeline stage, first stage first."""
    return tuple(_states(layout, parameters) for parameters in rank_parameters(layout, model))


def _held(layout: "Layout", model: "Model", held: tuple[Chunk, ...]) -> RankParameters:
    matrices = others = experts = 0
    names = model.layer_names
    for block in model.blocks:
        layers = sum(names[chunk.first : chunk.last].count(block.name) for chunk in held)
        if not layers:
            continue
        for weight in block.weights(model.hidden):
            if weight.copies > 1:
                experts += layers * weight.per_rank(layout.experts_tp, layout.ep)
            else:
                matrices += layers * weight.per_rank(layout.tp)
        others += layers * block.vectors(model.hidden, model.norm)
    return RankParameters(matrices, others + _ends(layout, model, held), experts)


def _ends(layout: "Layout", model: "Model", held: tuple[Chunk, ...]) -> int:
    """Count embedding, positions, head and the outer norms where a rank holds them."""
    table = -(-model.vocab // layout.tp) * model.hidden
    norm = model.norm.parameters(model.hidden)
    found = 0
    first = any(chunk.has_embedding for chunk in held)
    last = any(chunk.has_head for chunk in held)
    if first:
        rows = model.max_positions + model.position_offset
        found += table + (rows * model.hidden if model.positions == "learned" else 0)
        found += norm * model.embedding_norm
        if model.vision is not None:
            tower = model.vision
            found += tower.parameters() + tower.projector.parameters(tower.hidden, model.hidden)
    if last:
        found += norm * model.final_norm + (model.vocab if model.head_bias else 0)
        # A tied head is the same tensor where one rank holds both ends, a copy where not.
        found += 0 if model.tied and first else table
    return found


def _states(layout: "Layout", parameters: RankParameters) -> StateBytes:
    dense = _sharded(layout, parameters.matrices, parameters.others, layout.shard_degree)
    copies = layout.dp * layout.cp // layout.shard_degree
    expert_shard = max(1, layout.expert_dp // copies)
    sparse = _sharded(layout, parameters.experts, 0, expert_shard)
    return StateBytes(*(a + b for a, b in zip(dense, sparse, strict=True)))


def _sharded(layout: "Layout", matrices: int, others: int, shard: int) -> StateBytes:
    number = matrices + others
    weight = 4 if layout.precision == "fp32" else 2
    # Weights already in fp32 are their own master copy.
    master = 0 if layout.precision == "fp32" else STATE_BYTES[layout.master_precision]
    moments = MOMENTS[layout.optimizer] * matrices
    moments += (2 if layout.optimizer == "muon" else MOMENTS[layout.optimizer]) * others
    optimizer = number * master + moments * STATE_BYTES[layout.moment_precision]
    gradients = number * STATE_BYTES[layout.gradient_precision]

    def over(size: int, stage: int) -> int:
        return -(-size // shard) if layout.zero >= stage else size

    return StateBytes(over(number * weight, 3), over(gradients, 2), over(optimizer, 1))
