"""Collectives carried out on real processes, over shared memory or torch.distributed.

RankCommunicator   the processes that take part, and their transport
CollectiveExecutor, run_collective   run a `Collective` on tensors
CollectiveStallError                 names a dead, late or diverged rank, its step and chunk
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.parallel.collective.communicator import RankCommunicator
    from meshwright.run.parallel.collective.executor import CollectiveExecutor, run_collective
    from meshwright.run.parallel.collective.stall_diagnosis import CollectiveStallError

_MODULES = {
    "CollectiveStallError": "meshwright.run.parallel.collective.stall_diagnosis",
    "CollectiveExecutor": "meshwright.run.parallel.collective.executor",
    "RankCommunicator": "meshwright.run.parallel.collective.communicator",
    "run_collective": "meshwright.run.parallel.collective.executor",
}

__all__ = ["CollectiveExecutor", "CollectiveStallError", "RankCommunicator", "run_collective"]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
