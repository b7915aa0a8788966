"""Collective algorithms carried out by Triton kernels, with all ranks' buffers on one device.

VirtualRanks    holds the buffers and runs a collective over them
Layout          where each chunk of a message lies in such a buffer
Program, lower  a collective as work for the kernel: sums of places, written to places
carry_out       the same work with plain torch operations
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.kernels.collective.layout import Layout
    from meshwright.run.kernels.collective.plain import carry_out
    from meshwright.run.kernels.collective.program import Program, lower
    from meshwright.run.kernels.collective.virtual_ranks import VirtualRanks

_HOMES = {
    "Layout": "meshwright.run.kernels.collective.layout",
    "Program": "meshwright.run.kernels.collective.program",
    "VirtualRanks": "meshwright.run.kernels.collective.virtual_ranks",
    "carry_out": "meshwright.run.kernels.collective.plain",
    "lower": "meshwright.run.kernels.collective.program",
}

__all__ = ["Layout", "Program", "VirtualRanks", "carry_out", "lower"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
