"""The state of a run, of one device or of several, each tensor with its place in the whole."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.optimizer.block_quantization import BLOCK_ELEMENTS
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardedTensor
from meshwright.run.parallel.zero.gradient_sync import Sync
from meshwright.run.train.optimizer.optimizer import Optimizer

StateTensor = Tensor | ShardedTensor | BlockScales

_SCALE = "_scale"


def make_sharded_state(
    sync: Sync, optimizer: Optimizer, saved_as: Callable[[str], str] = "model.{}".format
) -> dict[str, StateTensor]:
    """Return every tensor that a resumed run needs: this rank's own, not copies.

    Names and wholes are those of one device, so that any layout can go on from it; `saved_as` gives
    the name of a parameter.
    """
    lies = sync.shard_ranges()
    updated = dict(sync.named_parameters())
    # Of what others update this rank's copies are not needed.
    found: dict[str, StateTensor] = {
        saved_as(name): _placed(updated[name], *lie) for name, lie in lies.items()
    }
    for key, value in optimizer.state_dict().items():
        kind, _, name = key.partition(".")
        if name not in lies:
            found[f"optimizer.{key}"] = value
            continue
        lie = lies[name]
        if kind.endswith(_SCALE):
            _require_own_blocks(name, lie.shard_spec)
            found[f"optimizer.{key}"] = BlockScales.from_spec(value, _codes(kind, name), *lie)
        else:
            found[f"optimizer.{key}"] = _placed(value, *lie)
    return found


def _require_own_blocks(name: str, holding: ShardSpec) -> None:
    """Refuse elements that ranks share, and code differently: they are saved once for all.

    That is where a block has both a rank's own queries and keys that its neighbours hold too.
    """
    rows, width = holding.kv_replica_rows, math.prod(holding.shape[1:])
    if holding.kv_replicas > 1 and rows is not None and rows.start * width % BLOCK_ELEMENTS:
        what = f"{name}: 8-bit moments of shared keys begin within a block of {BLOCK_ELEMENTS}"
        fix = "use bf16 moments, or no more tensor-parallel ranks than key and value heads"
        raise InputError([Problem("layout.moment_precision", what, fix)])


def make_unsharded_state(
    learnt: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[str, StateTensor]:
    """Return the same of a run on one device, from what its learner has."""
    found: dict[str, StateTensor] = dict(learnt)
    for key, value in optimizer.state_dict().items():
        kind, _, name = key.partition(".")
        if name and kind.endswith(_SCALE):
            holding = ShardSpec.unsharded(tuple(optimizer.states[name].parameter.shape))
            found[f"optimizer.{key}"] = BlockScales.from_spec(value, _codes(kind, name), holding)
        else:
            found[f"optimizer.{key}"] = value
    return found


def _codes(kind: str, name: str) -> str:
    """Return the name of the moments that scales belong to."""
    return f"optimizer.{kind.removesuffix(_SCALE)}.{name}"


def _placed(value: Tensor, holding: ShardSpec, start: int, stop: int) -> ShardedTensor:
    if (start, stop) == (0, math.prod(holding.shape)):
        return ShardedTensor.from_spec(value.detach().view(holding.shape), holding)
    return ShardedTensor.from_flat_range(value.detach().view(-1), holding, start, stop)
