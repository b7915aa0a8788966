"""Triton where it is installed, a stand-in where it is not, and which of the two worlds runs.

Every kernel module imports `triton` and `tl` from here, so that it can be imported (and its plain
torch version used) on a machine without Triton.
"""

import os
from functools import lru_cache
from typing import Any, Literal

import torch

from meshwright.errors import MissingDependency

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "KernelBackend",
    "make_pdl_launch_options",
    "should_use_triton",
    "tl",
    "triton",
    "wait_for_inputs",
]

KernelBackend = Literal["auto", "triton", "torch"]
"""`auto` takes Triton for tensors on a GPU and plain torch elsewhere."""


class _Absent:
    """Stands for Triton in decorators and annotations; using a kernel says what is missing."""

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> "_Absent":
        return self

    def __getitem__(self, key: object) -> Any:
        hint = "pip install triton, or give plain torch the work with backend='torch'"
        raise MissingDependency("this kernel needs Triton, which is not installed", hint)


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()

HAS_TRITON = not isinstance(triton, _Absent)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""For kernels: the interpreter knows no assembler."""


def should_use_triton(backend: KernelBackend, tensor: torch.Tensor) -> bool:
    """Say whether a Triton kernel shall do this work, rather than plain torch."""
    if backend == "auto":
        return HAS_TRITON and tensor.is_cuda
    return backend == "triton"


def make_pdl_launch_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Return options by which a kernel is launched while the one before it still runs.

    For kernels that call `wait_for_inputs(PDL)` before they read or write anything: what a launch
    takes is then hidden behind the kernel before. GPUs before Hopper do not know this.
    """
    if tensor.is_cuda and _launches_early(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache(maxsize=16)
def _launches_early(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)


# Triton compiles it itself.
@triton.jit  # type: ignore[untyped-decorator]
def wait_for_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for all that earlier kernels write, and let the next one be launched."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
