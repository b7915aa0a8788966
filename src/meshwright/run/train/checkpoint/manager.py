"""`CheckpointManager`: saves and loads the state of a run, whatever happens in between.

    checkpoints = CheckpointManager(run / "checkpoints", CheckpointConfig(every_steps=500))
    loaded = checkpoints.load(tensors)  # in place; loaded.step, loaded.extra
    checkpoints.save(step, tensors, extra)  # returns once the tensors are copied
    checkpoints.close()  # waits for the last save

Tensors are whole, `DTensor`, or `ShardedTensor`: parts of a whole. What was saved under
one layout loads under any other; codes whose `BlockScales` are for other elements there are coded
anew. With several processes every one of them makes each call, with the tensors it has, on storage
that all share; the `extra` of the first rank is kept.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from meshwright.errors import Problem
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.checkpoint.async_save import AsyncSave
from meshwright.run.train.checkpoint.checkpoint_config import CheckpointConfig
from meshwright.run.train.checkpoint.checkpoint_folder import (
    CheckpointFolder,
    SavedCheckpoint,
    is_complete,
)
from meshwright.run.train.checkpoint.checkpoint_loader import (
    LoadResult,
    UnrequestedPolicy,
    load_tensors,
    select_checkpoint,
)
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from meshwright.run.train.checkpoint.metadata import encode_extra, find_extra_problems
from meshwright.run.train.checkpoint.rank_coordinator import RankCoordinator
from meshwright.run.train.checkpoint.savable_tensors import SavableTensors
from meshwright.run.train.checkpoint.save_plan import SavePlan, SavePlanner
from meshwright.run.train.checkpoint.staging import BUFFER_BYTES, StagingBuffers, stage_tensors

_BLOCKING_BYTES = 4 * BUFFER_BYTES
"""Host memory of a save that training waits for: it need not hold a whole checkpoint."""


class SaveTiming(NamedTuple):
    """How long a save held up the thread that called it."""

    step: int
    staged_bytes: int
    """What this process writes."""
    wait_s: float
    """For the save before it to end."""
    plan_s: float
    copy_s: float
    """For the copies, and in a save that is not asynchronous, for the disk."""


class CheckpointManager:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig | None = None,
        *,
        disk: LocalFileSystem | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Look at a folder, which need not exist; all processes of a run call this together.

        The alarm of a `mesh` ends all of them where one does not come to a save or load.
        """
        self.config = config = config or CheckpointConfig()
        self._folder = CheckpointFolder(Path(folder), disk or LocalFileSystem())
        self._peers = RankCoordinator(mesh)
        self._planner = SavePlanner(self._peers)
        limit_bytes = config.staging_bytes
        if not config.async_save:
            limit_bytes = min(limit_bytes or _BLOCKING_BYTES, _BLOCKING_BYTES)
        self._pieces = StagingBuffers(limit_bytes)
        self._writing: AsyncSave | None = None

    def should_save(self, step: int) -> bool:
        """Tell whether the settings ask for a checkpoint after this step."""
        return self.config.should_save(step)

    def list_saved(self) -> tuple[SavedCheckpoint, ...]:
        """Return the checkpoints that are there, oldest save first."""
        return self._folder.list_saved()

    def find_latest(self) -> SavedCheckpoint | None:
        """Return the newest save whose record and sizes are sound; None where there is none."""
        return next(
            (found for found in reversed(self._folder.list_saved()) if is_complete(found)), None
        )

    def allocate_staging(self, tensors: SavableTensors) -> None:
        """Plan the first save and take its host memory now, rather than in the midst of training.

        Pinning memory takes about as long as writing it; later saves use the same again.
        """
        self.wait()
        self._ready(tensors, [])
        self._planner.release_tensors()
        self._pieces.prefault()

    def save(self, step: int, tensors: SavableTensors, extra: Mapping[str, Any]) -> SaveTiming:
        """Save the state after a step; return once it is copied and may change again.

        On CUDA it returns once the copies are queued: what changes the tensors has to come after
        them on the current stream. Waits for the save before it, and raises what that failed with.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        problems = find_extra_problems(extra)
        if step < 0:
            problems.append(Problem("step", f"{step} is below 0", "count steps from 0"))
        planned = self._ready(tensors, problems)
        planned_at = time.perf_counter()
        self._writing = writing = AsyncSave(
            step,
            planned,
            encode_extra(extra),
            folder=self._folder,
            peers=self._peers,
            pieces=self._pieces,
            settings=self.config,
        )
        try:
            stage_tensors(
                map(self._planner.get_local_tensor, planned.write_items),
                self._pieces,
                writing.write,
            )
        except BaseException as error:
            writing.finish(error)
            raise
        finally:
            self._planner.release_tensors()
        writing.finish()
        if not self.config.async_save:
            self.wait()
        return SaveTiming(
            step=step,
            staged_bytes=planned.file_layout.data_bytes,
            wait_s=waited - began,
            plan_s=planned_at - waited,
            copy_s=time.perf_counter() - planned_at,
        )

    def _ready(self, tensors: SavableTensors, problems: Sequence[Problem]) -> SavePlan:
        planned = self._planner.plan(tensors, problems)
        self._pieces.resize(planned.file_layout.data_bytes, pinned=self._planner.on_gpu)
        return planned

    def wait(self) -> None:
        """Wait for the save in flight; raises `CheckpointSaveError` where it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def load(
        self,
        into: SavableTensors,
        step: int | None = None,
        *,
        leftover: UnrequestedPolicy = "error",
    ) -> LoadResult:
        """Load a step, or the latest save, into these tensors.

        Nothing is changed before the whole checkpoint is verified and fits. A damaged one is
        refused where its step was asked for; else the settings say whether the save before it is
        tried. `leftover` says what to do with saved tensors that `into` does not name.
        """
        self.wait()
        found = select_checkpoint(self._folder, step, self._peers, self.config)
        return load_tensors(found, into, leftover, self._peers, self.config)

    def close(self) -> None:
        """Wait for the save in flight and let go of the folder and of the buffers."""
        try:
            self.wait()
        finally:
            self._folder.release()
            self._pieces = StagingBuffers()
            self._peers.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
