"""What torch executes on real processes and devices.

kernels     Triton kernels, each with a reference in plain torch
nn          modules made from a `Model`, and Hugging Face checkpoints in and out
parallel    layouts over several processes, collectives, launchers and watchdogs
train       data, optimizer, checkpoints, and the loop of `mw train`
serve       the inference engine, its workers and servers, for `mw serve` and `mw generate`
posttrain   supervised recipes, evaluation and reinforcement learning
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run import kernels, nn, parallel, train

_MODULES = {
    "kernels": "meshwright.run.kernels",
    "nn": "meshwright.run.nn",
    "parallel": "meshwright.run.parallel",
    "train": "meshwright.run.train",
}

__all__ = ["kernels", "nn", "parallel", "train"]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
