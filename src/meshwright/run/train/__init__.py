"""Training: data, optimizer, checkpoints, outputs, and the loop that drives them.

Job, load_job   one run, and its TOML file
train, Outcome  runs a job in its folder, and how that ended
checkpoint      saves and loads the state of a run
data            batches of tokens, a pure function of the step
optimizer       updates the weights
outputs         where figures go
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.train import checkpoint, data, optimizer, outputs
    from meshwright.run.train.job import Job
    from meshwright.run.train.job_file import load_job
    from meshwright.run.train.loop import train
    from meshwright.run.train.outcome import Outcome

_HOMES = {
    "Job": "meshwright.run.train.job",
    "Outcome": "meshwright.run.train.outcome",
    "checkpoint": "meshwright.run.train.checkpoint",
    "data": "meshwright.run.train.data",
    "load_job": "meshwright.run.train.job_file",
    "optimizer": "meshwright.run.train.optimizer",
    "outputs": "meshwright.run.train.outputs",
    "train": "meshwright.run.train.loop",
}

__all__ = [
    "Job",
    "Outcome",
    "checkpoint",
    "data",
    "load_job",
    "optimizer",
    "outputs",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
