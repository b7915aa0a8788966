"""Where the figures of a run go: a file, TensorBoard, Weights & Biases, Prometheus, stderr.

OutputSettings  which outputs, and how often
open_outputs    opens them
Output          the shape of one: `write(step, figures)` and `close()`
Outputs         several as one
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.train.outputs.open import open_outputs
    from meshwright.run.train.outputs.output import Figures, Output, Outputs
    from meshwright.run.train.outputs.settings import OutputSettings, Prometheus, Wandb

_HOMES = {
    "Figures": "meshwright.run.train.outputs.output",
    "Output": "meshwright.run.train.outputs.output",
    "OutputSettings": "meshwright.run.train.outputs.settings",
    "Outputs": "meshwright.run.train.outputs.output",
    "Prometheus": "meshwright.run.train.outputs.settings",
    "Wandb": "meshwright.run.train.outputs.settings",
    "open_outputs": "meshwright.run.train.outputs.open",
}

__all__ = [
    "Figures",
    "Output",
    "OutputSettings",
    "Outputs",
    "Prometheus",
    "Wandb",
    "open_outputs",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
