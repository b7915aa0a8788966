"""Training: data, optimizer, checkpoints, logging, and the loop that drives them.

TrainJob, load_job   one run, and its TOML file
train, TrainResult   runs a job in its folder, and the result
checkpoint           saves and loads the state of a run
data                 batches of tokens, a pure function of the step
optimizer            updates the weights
logging              where metrics go
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.train import checkpoint, data, logging, optimizer
    from meshwright.run.train.job.job_file import load_job
    from meshwright.run.train.job.train_job import TrainJob
    from meshwright.run.train.loop import train
    from meshwright.run.train.train_result import TrainResult

_MODULES = {
    "TrainJob": "meshwright.run.train.job.train_job",
    "TrainResult": "meshwright.run.train.train_result",
    "checkpoint": "meshwright.run.train.checkpoint",
    "data": "meshwright.run.train.data",
    "load_job": "meshwright.run.train.job.job_file",
    "optimizer": "meshwright.run.train.optimizer",
    "logging": "meshwright.run.train.logging",
    "train": "meshwright.run.train.loop",
}

__all__ = [
    "TrainJob",
    "TrainResult",
    "checkpoint",
    "data",
    "load_job",
    "logging",
    "optimizer",
    "train",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
