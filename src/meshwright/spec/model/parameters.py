"""Exact parameter counts of a `Model`, by part.

Tied heads count once. Multi-token heads are counted apart, as the models that have them publish
their size without. `matmul` is the N of "6N": weights that multiply a token's activations,
active experts only, the output head in and the embedding table out.
"""

import msgspec

from meshwright.spec.model.block import BlockSpec
from meshwright.spec.model.model import Model
from meshwright.spec.model.weights import sum_active_parameters, sum_parameters


class ParameterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many parameters a model has, and where they lie."""

    embedding: int
    """The token table and the learned positions."""
    mixer: int
    """Attention and recurrence: matrices, and vectors other than norms of the residual stream."""
    mlp: int
    """Dense feed-forward parts and shared experts."""
    router: int
    """Routers with their biases."""
    experts: int
    """Routed experts."""
    norms: int
    """Norms of the residual stream."""
    head: int
    """The output head; 0 where it is tied to the embedding."""
    vision: int
    """Vision tower and projector."""
    multi_token: int
    """Multi-token heads, outside of `total`."""
    active: int
    """Parameters one token touches, everything counted in `total` but the idle experts."""
    matmul: int
    """Weights that multiply one token's activations: the N of 6N."""

    @property
    def total(self) -> int:
        """All parameters of the main model."""
        return (
            self.embedding
            + self.mixer
            + self.mlp
            + self.router
            + self.experts
            + self.norms
            + self.head
            + self.vision
        )


def count_parameters(model: Model) -> ParameterCounts:
    """Count the parameters of a model exactly."""
    hidden = model.hidden
    sums = {"mixer": 0, "mlp": 0, "router": 0, "experts": 0, "norms": 0}
    idle = matmul = 0
    for block, layers in model.count_layers_by_block():
        for part, number in _block_parts(model, block).items():
            sums[part] += layers * number
        weights = block.list_weights(hidden)
        idle += layers * (sum_parameters(weights) - sum_active_parameters(weights))
        matmul += layers * sum(weight.active * weight.entries_per_copy for weight in weights)
    table = model.vocab * hidden
    rows = model.max_positions + model.position_offset if model.positions == "learned" else 0
    outer_norms = model.embedding_norm + model.final_norm
    sums["norms"] += outer_norms * model.norm.parameters(hidden)
    head = (0 if model.tied else table) + (model.vocab if model.head_bias else 0)
    vision = 0
    if model.vision is not None:
        tower = model.vision
        vision = tower.parameters() + tower.projector.parameters(tower.hidden, hidden)
    counted = ParameterCounts(
        **sums,
        embedding=table + rows * hidden,
        head=head,
        vision=vision,
        multi_token=_multi_token(model),
        active=0,
        matmul=matmul + table,
    )
    return msgspec.structs.replace(counted, active=counted.total - idle)


_COUNTED_AS = {
    "mixer": "mixer", "mlp": "mlp", "shared": "mlp", "router": "router", "expert": "experts",
}  # fmt: skip


def _block_parts(model: Model, block: BlockSpec) -> dict[str, int]:
    parts = dict.fromkeys(_COUNTED_AS.values(), 0)
    parts["norms"] = block.count_norms() * model.norm.parameters(model.hidden)
    for weight in block.list_weights(model.hidden):
        parts[_COUNTED_AS[weight.part]] += weight.parameters
    if block.mixer is not None:
        parts["mixer"] += block.mixer.count_vector_parameters(model.norm.bias)
    if block.mlp is not None:
        parts["router"] += block.mlp.count_vector_parameters()
    return parts


def _multi_token(model: Model) -> int:
    heads = model.multi_token
    if heads is None:
        return 0
    each = sum_parameters(model.list_mtp_weights())
    each += model.block(heads.block).count_vector_parameters(model.hidden, model.norm)
    # One norm for each of the two streams that are joined, and one before the output head.
    return heads.depth * (each + 3 * model.norm.parameters(model.hidden))
