"""The real world: what torch executes on real processes and devices.

kernels     Triton kernels, each beside the same in plain torch
nn          modules made from a `Model`, and Hugging Face checkpoints in and out
parallel    what several processes do together
train       data, optimizer, checkpoints, and the loop of `mw train`
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run import kernels, nn, parallel, train

_HOMES = {
    "kernels": "meshwright.run.kernels",
    "nn": "meshwright.run.nn",
    "parallel": "meshwright.run.parallel",
    "train": "meshwright.run.train",
}

__all__ = ["kernels", "nn", "parallel", "train"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
