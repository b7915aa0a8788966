"""The state of a run that several ranks hold together, each tensor with its place in the whole."""

import math

from torch import Tensor

from meshwright.run.nn.holding import Holding
from meshwright.run.nn.placed import Fixed, Placed
from meshwright.run.parallel.sync import Sync
from meshwright.run.train.optimizer.optimizer import Optimizer

State = Tensor | Placed | Fixed


def placed_state(sync: Sync, optimizer: Optimizer) -> dict[str, State]:
    """Return every tensor that a resumed run needs: this rank's own, not copies.

    Names and wholes are those of one device, so that any layout can go on from it.
    """
    lies = sync.lies()
    updated = dict(sync.named_parameters())
    # Of what others update this rank's copies are not needed.
    found: dict[str, State] = {
        f"model.{name}": _placed(updated[name], *lie) for name, lie in lies.items()
    }
    for key, value in optimizer.state_dict().items():
        kind, _, name = key.partition(".")
        if name not in lies:
            found[f"optimizer.{key}"] = value
            continue
        holding, start, stop = lies[name]
        if kind.endswith("_scale"):
            found[f"optimizer.{key}"] = Fixed.of(value, holding, start, stop)
        else:
            found[f"optimizer.{key}"] = _placed(value, holding, start, stop)
    return found


def _placed(value: Tensor, holding: Holding, start: int, stop: int) -> Placed:
    if (start, stop) == (0, math.prod(holding.shape)):
        return Placed.of(value.detach().view(holding.shape), holding)
    return Placed.of_interval(value.detach().view(-1), holding, start, stop)
