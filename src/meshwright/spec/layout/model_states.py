"""Bytes of parameters, gradients and optimizer states on each pipeline rank.

They follow from the formats a layout names and from how matrices are cut; vectors (norms, short
convolutions) are small and counted whole on every tensor-parallel rank. Activations, buffers and
fragmentation are predictions and live in `predict.memory`.
"""

from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.layout.pipeline_chunks import ModelChunk, list_chunks_by_rank

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout
    from meshwright.spec.model import BlockSpec, Model

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "none": 0}
"""Bytes of one number in each state format."""

OPTIMIZER_MOMENTS = {"adamw": 2, "muon": 1, "lion": 1, "sgd": 1}
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

    def without_offloaded(self, offload: tuple[str, ...]) -> "StateBytes":
        """Return what is left in device memory when some of it lives in the host's."""
        return StateBytes(
            0 if "parameters" in offload else self.parameters,
            0 if "gradients" in offload else self.gradients,
            0 if "optimizer" in offload else self.optimizer,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer


def count_rank_parameters(layout: "Layout", model: "Model") -> tuple[RankParameters, ...]:
    """Count the parameters of one rank of every pipeline stage, first stage first."""
    names, known = model.layer_names, dict[tuple[object, ...], RankParameters]()
    found = []
    for held in list_chunks_by_rank(layout, model.layers):
        # Most ranks of a pipeline hold the same.
        key = tuple((names[c.first : c.last], c.has_embedding, c.has_head) for c in held)
        if key not in known:
            known[key] = _held(layout, model, held)
        found.append(known[key])
    return tuple(found)


def stage_state_bytes(layout: "Layout", model: "Model") -> tuple[StateBytes, ...]:
    """Return the bytes of states on one rank of every pipeline stage, first stage first."""
    return tuple(
        rank_state_bytes(layout, parameters) for parameters in count_rank_parameters(layout, model)
    )


def _held(layout: "Layout", model: "Model", held: tuple[ModelChunk, ...]) -> RankParameters:
    names = model.layer_names
    parts = [_ends(layout, model, held)]
    for block in model.blocks:
        layers = sum(names[chunk.first : chunk.last].count(block.name) for chunk in held)
        parts.append(count_block_parameters(layout, model, block, layers))
    heads = model.multi_token
    if heads is not None and any(chunk.has_head for chunk in held):
        # Each head joins two normed streams by a product and runs a block and a norm of its own.
        norms = 3 * heads.depth * model.norm.parameters(model.hidden)
        join = 2 * model.hidden * model.hidden * heads.depth
        parts.append(RankParameters(join, norms, 0))
        parts.append(count_block_parameters(layout, model, model.block(heads.block), heads.depth))
    return RankParameters(*(sum(column) for column in zip(*parts, strict=True)))


def count_block_parameters(
    layout: "Layout", model: "Model", block: "BlockSpec", layers: int
) -> RankParameters:
    """Count what one rank holds of so many layers of a block."""
    matrices = experts = 0
    for weight in block.list_weights(model.hidden) if layers else ():
        if weight.part == "expert":
            experts += layers * weight.count_rank_parameters(layout.effective_expert_tp, layout.ep)
        else:
            matrices += layers * weight.count_rank_parameters(layout.tp)
    return RankParameters(
        matrices, layers * block.count_vector_parameters(model.hidden, model.norm), experts
    )


def _ends(layout: "Layout", model: "Model", held: tuple[ModelChunk, ...]) -> RankParameters:
    """Count embedding, positions, head, outer norms and towers where a rank holds them."""
    rows = -(-model.vocab // layout.tp)
    norm = model.norm.parameters(model.hidden)
    matrices = others = 0
    first = any(chunk.has_embedding for chunk in held)
    last = any(chunk.has_head for chunk in held)
    if first:
        positions = model.max_positions + model.position_offset
        others += rows * model.hidden + norm * model.embedding_norm
        others += positions * model.hidden if model.positions == "learned" else 0
        if model.vision is not None:
            tower, small = model.vision.count_rank_parameters(layout.tp)
            project = model.vision.projector.parameters(model.vision.hidden, model.hidden)
            matrices, others = tower, others + small + project
    if last:
        others += norm * model.final_norm + (rows if model.head_bias else 0)
        # A tied head is the same tensor where one rank holds both ends, a copy where not.
        others += 0 if model.tied and first else rows * model.hidden
    return RankParameters(matrices, others, 0)


def rank_state_bytes(layout: "Layout", parameters: RankParameters) -> StateBytes:
    """Return the bytes of states of one rank with such parameters."""
    dense = _sharded(layout, parameters.matrices, parameters.others, layout.shard_degree)
    copies = layout.dp * layout.cp // layout.shard_degree
    expert_shard = max(1, layout.expert_dp // copies)
    sparse = _sharded(layout, parameters.experts, 0, expert_shard)
    return StateBytes(*(a + b for a, b in zip(dense, sparse, strict=True)))


def _sharded(layout: "Layout", matrices: int, others: int, shard: int) -> StateBytes:
    number = matrices + others
    weight = 4 if layout.precision == "fp32" else 2
    # Weights already in fp32 are their own master copy.
    master = 0 if layout.precision == "fp32" else BYTES_PER_ELEMENT[layout.master_precision]
    moments = OPTIMIZER_MOMENTS[layout.optimizer] * matrices
    moments += (2 if layout.optimizer == "muon" else OPTIMIZER_MOMENTS[layout.optimizer]) * others
    optimizer = number * master + moments * BYTES_PER_ELEMENT[layout.moment_precision]
    gradients = number * BYTES_PER_ELEMENT[layout.gradient_precision]

    def over(size: int, stage: int) -> int:
        return -(-size // shard) if layout.zero >= stage else size

    return StateBytes(over(number * weight, 3), over(gradients, 2), over(optimizer, 1))
