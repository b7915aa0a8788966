"""Which parameters of a decoder stack several matrices, and how many rows each of them has.

One product makes queries, keys and values, another gate and up: that is faster, and means nothing
to the model. Muon works on what the model means.
"""

from torch import nn

from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.parallel.zero.matrix_gather import MatrixGatherer
from meshwright.run.train.optimizer.param_groups import is_matrix
from meshwright.spec.model import token_mixers


def list_stacked_matrix_rows(decoder: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the rows of each stacked matrix, by the name of the parameter that stacks them."""
    found = {
        f"{path}.{name}": rows
        for path, module in decoder.named_modules()
        for name, rows in _stacks(getattr(module, "spec", None)).items()
    }
    parameters = dict(decoder.named_parameters())
    found |= {name: (1, 1) for name in parameters if name.endswith((".gate_up", ".gate_up.weight"))}
    return {name: _held(rows, parameters[name].shape[-2]) for name, rows in found.items()}


def make_matrix_gatherer(sharded_model: ShardedModel, sync: Sync) -> MatrixGatherer | None:
    """Return how Muon's matrices are made whole; None where every rank holds whole ones."""
    learning = [
        (name, one) for name, one in sharded_model.decoder.named_parameters() if one.requires_grad
    ]
    found = MatrixGatherer(
        sharded_model, sync, [name for name, one in learning if is_matrix(name, one)]
    )
    return found if found.is_needed else None


def _stacks(spec: object) -> dict[str, tuple[int, ...]]:
    """Return the rows of the products of a mixer that stack several matrices."""
    match spec:
        case token_mixers.AttentionSpec():
            queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
            return {"qkv.weight": (queries, keys, keys, *([queries] if spec.gate else []))}
        case token_mixers.LatentAttentionSpec() if spec.q_rank is not None:
            # The rotary key goes with the latent it shares a product with in DeepSeek's own code.
            return {"down.weight": (spec.q_rank, spec.kv_rank + spec.rope_dim)}
        case token_mixers.Mamba2Spec():
            inner, states = spec.heads * spec.head_dim, spec.groups * spec.state_dim
            return {"input.weight": (inner, inner, states, states, spec.heads)}
        case token_mixers.GatedDeltaNetSpec():
            keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
            heads = spec.value_heads
            return {"qkvz.weight": (keys, keys, values, values), "gates.weight": (heads, heads)}
    return {}


def _held(rows: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Scale rows to what a slice of whole heads holds."""
    return tuple(each * total // sum(rows) for each in rows)
