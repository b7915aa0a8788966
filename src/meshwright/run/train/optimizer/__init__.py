"""Optimizers: AdamW, Muon, Lion and SGD, their schedules, and what guards a step.

make_optimizer             builds the optimizer that a layout names
Optimizer                  updates parameters; its state is plain tensors by name
OptimizerConfig            the table `[optimizer]` of a job
compute_learning_rate      the schedule, a pure function of the step
list_stacked_matrix_rows   the matrices that a decoder's parameters stack, for Muon
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.train.optimizer.lr_schedule import compute_learning_rate
    from meshwright.run.train.optimizer.optimizer import (
        Optimizer,
        OptimizerStepReport,
        make_optimizer,
    )
    from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
    from meshwright.run.train.optimizer.stacked_matrices import list_stacked_matrix_rows

_MODULES = {
    "Optimizer": "meshwright.run.train.optimizer.optimizer",
    "OptimizerConfig": "meshwright.run.train.optimizer.optimizer_config",
    "OptimizerStepReport": "meshwright.run.train.optimizer.optimizer",
    "compute_learning_rate": "meshwright.run.train.optimizer.lr_schedule",
    "make_optimizer": "meshwright.run.train.optimizer.optimizer",
    "list_stacked_matrix_rows": "meshwright.run.train.optimizer.stacked_matrices",
}

__all__ = [
    "Optimizer",
    "OptimizerConfig",
    "OptimizerStepReport",
    "compute_learning_rate",
    "list_stacked_matrix_rows",
    "make_optimizer",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
