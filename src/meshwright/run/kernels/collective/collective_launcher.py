"""Launches of the collective kernel: tile size, and how many programs share the tiles."""

from itertools import pairwise
from types import ModuleType

import numpy as np
import torch

from meshwright.errors import MissingDependency
from meshwright.run.kernels.collective.collective_reference import SUM_TYPES
from meshwright.run.kernels.collective.kernel_program import KernelProgram

WARPS = 4

TILE_BYTES = 4096
"""Each of 128 threads moves 32 bytes of a tile. On an H200 (Triton 3.6) no tile of 4 to 32 KiB with
4 or 8 warps is faster for copies, adds or sums of eight places, in float32 or bfloat16."""

PROGRAMS_PER_SM = 8
"""Programs that run at the same time in one launch for all steps. With half as many an H200 moves a
tenth to a fifth fewer bytes per second."""


class CollectiveLauncher:
    """A program's tables on the device of a buffer, and the launches that carry it out there."""

    def __init__(self, program: KernelProgram, buffer: torch.Tensor) -> None:
        self._kernels = _kernels(buffer.device)
        import triton.language as tl

        device = buffer.device
        tables = program.task_of_tile, program.tasks, program.more
        self._tables = (buffer, *(torch.from_numpy(table).to(device) for table in tables))
        self._step_tiles = torch.from_numpy(program.step_tiles).to(device)
        self._firsts: list[int] = program.step_tiles.tolist()
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        widest = int(max(np.diff(program.step_tiles), default=1))
        self._together = min(widest, _programs_together(device))
        self._overlaps = _launches_overlap(device)
        sums = {torch.float32: tl.float32, torch.int32: tl.int32}[SUM_TYPES[buffer.dtype]]
        self._options = {"TILE": program.tile, "SUM": sums, "num_warps": WARPS, "num_stages": 1}

    def launch_per_step(self) -> None:
        """Launch each step on its own, a program for every tile."""
        options = self._options | {"OVERLAPS": self._overlaps, "launch_pdl": self._overlaps}
        for first, end in pairwise(self._firsts):
            self._kernels.step_kernel[(end - first,)](*self._tables, first, **options)

    def launch_persistent(self) -> None:
        """Launch all steps together, with no more programs than the device holds at a time."""
        # A cooperative launch is refused, rather than left hanging, where not all would fit.
        options = self._options | {"launch_cooperative_grid": True}
        steps = len(self._firsts) - 1
        if steps:
            arguments = (*self._tables, self._step_tiles, self._arrived, steps)
            self._kernels.persistent_kernel[(self._together,)](*arguments, **options)


def _kernels(device: torch.device) -> ModuleType:
    """Return the kernels for a device, or say what is lacking."""
    try:
        import triton
    except ImportError:
        raise MissingDependency("Triton is not installed", "pip install triton") from None
    from meshwright.run.kernels.collective import collective_kernel

    interpreted = not isinstance(collective_kernel.step_kernel, triton.JITFunction)
    if interpreted != (device.type == "cpu"):
        kind = "interpreted" if interpreted else "compiled"
        what = f"the kernel is {kind}, but the buffer is on {device}"
        hint = "set TRITON_INTERPRET=1 before the start for buffers on the CPU, and for those only"
        raise MissingDependency(what, hint)
    return collective_kernel


def _programs_together(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs one program after the other
    found = torch.cuda.get_device_properties(device)
    return PROGRAMS_PER_SM * int(found.multi_processor_count)


def _launches_overlap(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it ends, as from Hopper (9.0) on.

    On an H200 a small step then takes 1.2 µs of a recorded run instead of 1.9.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
