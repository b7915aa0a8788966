"""`WeightSender`: versions of weights that a process lays out in memory for engines elsewhere.

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
from meshwright.policy.resharding.weight_transfer import (
    ShardsByTensor,
    WeightTransferPlan,
    plan_weight_transfer,
)
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.lora.lora_config import LoRAConfig
from meshwright.run.posttrain.weight_sync.shared_memory_transfer import SharedMemoryWriter
from meshwright.run.posttrain.weight_sync.weight_tensors import describe_shards

FROZEN, FROZEN_VERSION = "frozen", 1
"""The folder of weights that nobody trains, and their only version."""
_MEMORY = Path("/dev/shm")


def make_version_folder() -> Path:
    """Make a folder for versions, named by this process: in memory, or on a disk without one."""
    root = _MEMORY if _MEMORY.is_dir() else None
    return Path(mkdtemp(prefix=f"meshwright-weights-{os.getpid()}-", dir=root))


def plan_sender_transfer(
    sources: Sequence[ShardsByTensor], targets: Sequence[ShardsByTensor]
) -> WeightTransferPlan:
    """Return the plan that both sides make; what several ranks want lies there once."""
    return plan_weight_transfer(sources, targets, fan="broadcast")


def split_frozen(
    targets: Sequence[ShardsByTensor], frozen: ShardsByTensor
) -> tuple[list[ShardsByTensor], list[ShardsByTensor]]:
    """Return what ranks want with every version, and what of it is frozen."""
    return (
        [{name: own for name, own in each.items() if name not in frozen} for each in targets],
        [{name: own for name, own in each.items() if name in frozen} for each in targets],
    )


class WeightSender:
    """What the ranks of this process that train have for engines."""

    def __init__(
        self,
        sources: Sequence[Mapping[str, ShardedTensor]],
        *,
        frozen_shards: Mapping[str, ShardedTensor] | None = None,
        lora_config: LoRAConfig | None = None,
    ) -> None:
        """Send the weights of `sources`.

        With `lora_config`, send the adapter, and the `frozen_shards` beside it.
        """
        self._sources = list(sources)
        self.shards = [describe_shards(each) for each in sources]
        self.lora_config, self._frozen = lora_config, dict(frozen_shards or {})
        self.frozen_shards = describe_shards(self._frozen)
        """What is laid out once, and changes with no version."""
        self.folder = make_version_folder()
        self.plan: WeightTransferPlan | None = None
        self._posted: list[SharedMemoryWriter] = []
        self._once: SharedMemoryWriter | None = None
        """Who lays the frozen weights out, until that is done."""
        self.version: int | None = None
        """The last that was posted."""

    def plan_transfer(self, targets: Sequence[ShardsByTensor]) -> None:
        """Make the plan by what the ranks of an engine want; all engines have to want the same."""
        changing, still = split_frozen(targets, self.frozen_shards)
        plan = plan_sender_transfer(self.shards, changing)
        if self.plan is None:
            self.plan = plan
            if self.frozen_shards:
                once = plan_sender_transfer([self.frozen_shards], still)
                self._once = SharedMemoryWriter(once, 0, self._frozen, self.folder / FROZEN)
            self._posted = [
                SharedMemoryWriter(plan, rank, each, self.folder)
                for rank, each in enumerate(self._sources)
            ]
        elif plan.digest != self.plan.digest:
            what = "engines hold their weights in different ways"
            raise InputError([Problem("engines", what, "start all of them with the same settings")])

    def publish(self, version: int) -> None:
        """Lay a version out; the one before stays until `release_old_versions`."""
        if self._once is not None:
            self._once.write(FROZEN_VERSION)
            self._once = None
        for each in self._posted:
            each.write(version)
        self.version = version

    def release_old_versions(self, *, keep: bool = True) -> None:
        """Give memory of versions back, but that of the last where it is to be kept."""
        for path in self.folder.glob("version-*"):
            if not keep or path.name != f"version-{self.version}":
                shutil.rmtree(path, ignore_errors=True)

    def list_files(self) -> list[Path]:
        """Return where the last version lies."""
        return sorted((self.folder / f"version-{self.version}").glob("*.weights"))

    def list_frozen_files(self) -> list[Path]:
        """Return where frozen weights lie."""
        return sorted((self.folder / FROZEN).glob("version-*/*.weights"))

    def close(self) -> None:
        """Give all memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)
