"""Which parameters of a decoder stack several matrices, and how many rows each of them has.

One product makes queries, keys and values, another gate and up: that is faster, and means nothing
to the model. Muon works on what the model means.
"""

from torch import nn

from meshwright.run.parallel.matrices import WholeMatrices
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.sync import Sync
from meshwright.run.train.optimizer.groups import is_matrix
from meshwright.spec.model import mixers


def matrix_parts(decoder: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the rows of each stacked matrix, by the name of the parameter that stacks them."""
    found = {
        f"{path}.{name}": rows
        for path, module in decoder.named_modules()
        for name, rows in _stacks(getattr(module, "spec", None)).items()
    }
    parameters = dict(decoder.named_parameters())
    found |= {name: (1, 1) for name in parameters if name.endswith((".gate_up", ".gate_up.weight"))}
    return {name: _held(rows, parameters[name].shape[-2]) for name, rows in found.items()}


def matrices_for_muon(spread: Spread, sync: Sync) -> WholeMatrices | None:
    """Return how Muon's matrices are made whole; None where every rank holds whole ones."""
    learning = [(name, one) for name, one in spread.decoder.named_parameters() if one.requires_grad]
    found = WholeMatrices(spread, sync, [name for name, one in learning if is_matrix(name, one)])
    return found if found.needed else None


def _stacks(spec: object) -> dict[str, tuple[int, ...]]:
    """Return the rows of the products of a mixer that stack several matrices."""
    match spec:
        case mixers.Attention():
            queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
            return {"qkv.weight": (queries, keys, keys, *([queries] if spec.gate else []))}
        case mixers.LatentAttention() if spec.q_rank is not None:
            # The rotary key goes with the latent it shares a product with in DeepSeek's own code.
            return {"down.weight": (spec.q_rank, spec.kv_rank + spec.rope_dim)}
        case mixers.Mamba2():
            inner, states = spec.heads * spec.head_dim, spec.groups * spec.state_dim
            return {"input.weight": (inner, inner, states, states, spec.heads)}
        case mixers.GatedDelta():
            keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
            heads = spec.value_heads
            return {"qkvz.weight": (keys, keys, values, values), "gates.weight": (heads, heads)}
    return {}


def _held(rows: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Scale rows to what a slice of whole heads holds."""
    return tuple(each * total // sum(rows) for each in rows)
