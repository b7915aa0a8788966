"""`Offered`: versions of weights that a process lays out in memory for engines elsewhere.

The version that engines have stays there: one that is started anew takes it, whatever the trainer
does meanwhile. That is as many bytes of host memory as the engine's weights have.

Where an adapter is trained, versions are its alone, and the frozen weights beside it lie there
once, in `FROZEN`: for engines that begin, and such as gave theirs up in sleep.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp

from meshwright.errors import InputError, Problem
from meshwright.policy.transfer import Holds, Transfer, plan_transfer
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.adapters.settings import Lora
from meshwright.run.posttrain.weights.shared_memory import Posted
from meshwright.run.posttrain.weights.tensors import held

FROZEN, FROZEN_VERSION = "frozen", 1
"""The folder of weights that nobody trains, and their only version."""
_MEMORY = Path("/dev/shm")


def memory_folder() -> Path:
    """Make a folder for versions, named by this process: in memory, or on a disk without one."""
    root = _MEMORY if _MEMORY.is_dir() else None
    return Path(mkdtemp(prefix=f"meshwright-weights-{os.getpid()}-", dir=root))


def plan_of(sources: Sequence[Holds], targets: Sequence[Holds]) -> Transfer:
    """Return the plan that both sides make; what several ranks want lies there once."""
    return plan_transfer(sources, targets, fan="broadcast")


def apart(targets: Sequence[Holds], frozen: Holds) -> tuple[list[Holds], list[Holds]]:
    """Return what ranks want with every version, and what of it is frozen."""
    return (
        [{name: own for name, own in each.items() if name not in frozen} for each in targets],
        [{name: own for name, own in each.items() if name in frozen} for each in targets],
    )


class Offered:
    """What the ranks of this process that train have for engines."""

    def __init__(
        self,
        sources: Sequence[Mapping[str, Placed]],
        *,
        frozen: Mapping[str, Placed] | None = None,
        adapter: Lora | None = None,
    ) -> None:
        """Offer what `sources` have; of an `adapter`, with the `frozen` weights beside it."""
        self._sources = list(sources)
        self.holds = [held(each) for each in sources]
        self.adapter, self._frozen = adapter, dict(frozen or {})
        self.frozen = held(self._frozen)
        """What is laid out once, and changes with no version."""
        self.folder = memory_folder()
        self.plan: Transfer | None = None
        self._posted: list[Posted] = []
        self._once: Posted | None = None
        """Who lays the frozen weights out, until that is done."""
        self.version: int | None = None
        """The last that was posted."""

    def agree(self, targets: Sequence[Holds]) -> None:
        """Make the plan by what the ranks of an engine want; all engines have to want the same."""
        changing, still = apart(targets, self.frozen)
        plan = plan_of(self.holds, changing)
        if self.plan is None:
            self.plan = plan
            if self.frozen:
                once = plan_of([self.frozen], still)
                self._once = Posted(once, 0, self._frozen, self.folder / FROZEN)
            self._posted = [
                Posted(plan, rank, each, self.folder) for rank, each in enumerate(self._sources)
            ]
        elif plan.digest != self.plan.digest:
            what = "engines hold their weights in different ways"
            raise InputError([Problem("engines", what, "start all of them with the same settings")])

    def post(self, version: int) -> None:
        """Lay a version out; the one before stays until `settle`."""
        if self._once is not None:
            self._once.post(FROZEN_VERSION)
            self._once = None
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

    def frozen_files(self) -> list[Path]:
        """Return where frozen weights lie."""
        return sorted((self.folder / FROZEN).glob("version-*/*.weights"))

    def close(self) -> None:
        """Give all memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)
