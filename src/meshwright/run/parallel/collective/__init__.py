"""Collectives carried out on real processes, over shared memory or torch.distributed.

Team                 the processes that take part, and how they reach each other
Executor, execute    run a `Collective` on tensors
CollectiveStalled    the error that names a dead, late or strayed rank, its step and chunk
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.parallel.collective.executor import Executor, execute
    from meshwright.run.parallel.collective.stall import CollectiveStalled
    from meshwright.run.parallel.collective.team import Team

_HOMES = {
    "CollectiveStalled": "meshwright.run.parallel.collective.stall",
    "Executor": "meshwright.run.parallel.collective.executor",
    "Team": "meshwright.run.parallel.collective.team",
    "execute": "meshwright.run.parallel.collective.executor",
}

__all__ = ["CollectiveStalled", "Executor", "Team", "execute"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
