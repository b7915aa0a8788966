"""Training: data, optimizer, checkpoints, outputs, and the loop that drives them.

checkpoint   saves and loads the state of a run
data         batches of tokens, a pure function of the step
optimizer    updates the weights
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.train import checkpoint, data, optimizer

_HOMES = {
    "checkpoint": "meshwright.run.train.checkpoint",
    "data": "meshwright.run.train.data",
    "optimizer": "meshwright.run.train.optimizer",
}

__all__ = ["checkpoint", "data", "optimizer"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
