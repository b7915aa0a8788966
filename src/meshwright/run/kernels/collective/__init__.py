"""Collective algorithms carried out by Triton kernels, with all ranks' buffers on one device.

VirtualRanks                     holds the buffers and runs a collective over them
BufferLayout                     the slot of each chunk of a message in such a buffer
KernelProgram, lower_to_kernel   a collective as work for the kernel: sums of slots
run_program_reference            the same work with plain torch operations
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.kernels.collective.buffer_layout import BufferLayout
    from meshwright.run.kernels.collective.collective_reference import run_program_reference
    from meshwright.run.kernels.collective.kernel_program import KernelProgram, lower_to_kernel
    from meshwright.run.kernels.collective.virtual_ranks import VirtualRanks

_MODULES = {
    "BufferLayout": "meshwright.run.kernels.collective.buffer_layout",
    "KernelProgram": "meshwright.run.kernels.collective.kernel_program",
    "VirtualRanks": "meshwright.run.kernels.collective.virtual_ranks",
    "run_program_reference": "meshwright.run.kernels.collective.collective_reference",
    "lower_to_kernel": "meshwright.run.kernels.collective.kernel_program",
}

__all__ = [
    "BufferLayout",
    "KernelProgram",
    "VirtualRanks",
    "lower_to_kernel",
    "run_program_reference",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
