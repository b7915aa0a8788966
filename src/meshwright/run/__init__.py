"""The real world: what torch executes on real processes and devices.

kernels     Triton kernels
parallel    what several processes do together
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run import kernels, parallel

_HOMES = {"kernels": "meshwright.run.kernels", "parallel": "meshwright.run.parallel"}

__all__ = ["kernels", "parallel"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
