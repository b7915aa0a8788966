"""Optimizers: AdamW, Muon, Lion and SGD, their schedules, and what guards a step.

make_optimizer      builds the optimizer that a layout names
Optimizer           updates parameters; its state is plain tensors by name
OptimizerSettings   the table `[optimizer]` of a job
learning_rate       the schedule, a pure function of the step
matrix_parts        how the parameters of a decoder are cut into matrices, for Muon
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.train.optimizer.optimizer import Optimizer, StepReport, make_optimizer
    from meshwright.run.train.optimizer.parts import matrix_parts
    from meshwright.run.train.optimizer.schedule import learning_rate
    from meshwright.run.train.optimizer.settings import OptimizerSettings

_HOMES = {
    "Optimizer": "meshwright.run.train.optimizer.optimizer",
    "OptimizerSettings": "meshwright.run.train.optimizer.settings",
    "StepReport": "meshwright.run.train.optimizer.optimizer",
    "learning_rate": "meshwright.run.train.optimizer.schedule",
    "make_optimizer": "meshwright.run.train.optimizer.optimizer",
    "matrix_parts": "meshwright.run.train.optimizer.parts",
}

__all__ = [
    "Optimizer",
    "OptimizerSettings",
    "StepReport",
    "learning_rate",
    "make_optimizer",
    "matrix_parts",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
