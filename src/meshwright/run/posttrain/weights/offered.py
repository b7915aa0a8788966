"""`Offered`: versions of weights that a process lays out in memory for engines elsewhere.

The version that engines have stays there: one that is started anew takes it, whatever the trainer
does meanwhile. That is as many bytes of host memory as the engine's weights have.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

from meshwright.errors import InputError, Problem
from meshwright.policy.transfer import Holds, Transfer, plan_transfer
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights.shared_memory import Posted
from meshwright.run.posttrain.weights.tensors import held

_MEMORY = Path("/dev/shm")


def memory_folder() -> Path:
    """Make a folder for versions, named by this process: in memory, or on a disk without one."""
    root = _MEMORY if _MEMORY.is_dir() else None
    return Path(mkdtemp(prefix=f"meshwright-weights-{os.getpid()}-", dir=root))


def plan_of(sources: Sequence[Holds], targets: Sequence[Holds]) -> Transfer:
    """Return the plan that both sides make; what several ranks want lies there once."""
    return plan_transfer(sources, targets, fan="broadcast")


class Offered:
    """What the ranks of this process that train have for engines."""

    def __init__(self, sources: Sequence[Mapping[str, Placed]]) -> None:
        self._sources = list(sources)
        self.holds = [held(each) for each in sources]
        self.folder = memory_folder()
        self.plan: Transfer | None = None
        self._posted: list[Posted] = []
        self.version: int | None = None
        """The last that was posted."""

    def agree(self, targets: Sequence[Holds]) -> None:
        """Make the plan by what the ranks of an engine want; all engines have to want the same."""
        plan = plan_of(self.holds, targets)
        if self.plan is None:
            self.plan = plan
            self._posted = [
                Posted(plan, rank, each, self.folder) for rank, each in enumerate(self._sources)
            ]
        elif plan.digest != self.plan.digest:
            what = "engines hold their weights in different ways"
            raise InputError([Problem("engines", what, "start all of them with the same settings")])

    def post(self, version: int) -> None:
        """Lay a version out; the one before stays until `settle`."""
        for each in self._posted:
            each.post(version)
        self.version = version

    def settle(self, *, keep: bool = True) -> None:
        """Give memory of versions back, but that of the last where it is to be kept."""
        for path in self.folder.glob("version-*"):
            if not keep or path.name != f"version-{self.version}":
                shutil.rmtree(path, ignore_errors=True)

    def files(self) -> list[Path]:
        """Return where the last version lies."""
        return sorted((self.folder / f"version-{self.version}").glob("*.weights"))

    def close(self) -> None:
        """Give all memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)
