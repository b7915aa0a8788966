"""`Checkpoints`: saves and loads the state of a run, whatever happens in between.

    checkpoints = Checkpoints(run / "checkpoints", CheckpointSettings(every_steps=500))
    loaded = checkpoints.load(tensors)  # in place; loaded.step, loaded.extra
    checkpoints.save(step, tensors, extra)  # returns once the tensors are copied
    checkpoints.close()  # waits for the last save

Tensors are whole, `DTensor`, or `Placed`: parts of a whole, wherever they lie. What was saved under
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
from meshwright.run.train.checkpoint.disk import Disk
from meshwright.run.train.checkpoint.folder import Folder, Found, is_sound
from meshwright.run.train.checkpoint.given import Tensors
from meshwright.run.train.checkpoint.loading import Leftover, Loaded, choose, load_into
from meshwright.run.train.checkpoint.peers import Peers
from meshwright.run.train.checkpoint.plan import Planned, Planner
from meshwright.run.train.checkpoint.record import encode_extra, extra_problems
from meshwright.run.train.checkpoint.settings import CheckpointSettings
from meshwright.run.train.checkpoint.staging import PIECE_BYTES, Pieces, stage
from meshwright.run.train.checkpoint.writing import Writing

_BLOCKING_BYTES = 4 * PIECE_BYTES
"""Host memory of a save that training waits for: it need not hold a whole checkpoint."""


class Staged(NamedTuple):
    """How long a save held up the thread that called it."""

    step: int
    staged_bytes: int
    """What this process writes."""
    waited_s: float
    """For the save before it to end."""
    planned_s: float
    copied_s: float
    """For the copies, and in a save that is not asynchronous, for the disk."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointSettings | None = None,
        *,
        disk: Disk | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Look at a folder, which need not exist; all processes of a run call this together.

        The alarm of a `mesh` ends all of them where one does not come to a save or load.
        """
        self.settings = settings = settings or CheckpointSettings()
        self._folder = Folder(Path(folder), disk or Disk())
        self._peers = Peers(mesh)
        self._planner = Planner(self._peers)
        limit_bytes = settings.staging_bytes
        if not settings.asynchronous:
            limit_bytes = min(limit_bytes or _BLOCKING_BYTES, _BLOCKING_BYTES)
        self._pieces = Pieces(limit_bytes)
        self._writing: Writing | None = None

    def due(self, step: int) -> bool:
        """Tell whether the settings ask for a checkpoint after this step."""
        return self.settings.due(step)

    def list(self) -> tuple[Found, ...]:
        """Return the checkpoints that are there, oldest save first."""
        return self._folder.found()

    def latest(self) -> Found | None:
        """Return the newest save whose record and sizes are sound; None where there is none."""
        return next((found for found in reversed(self._folder.found()) if is_sound(found)), None)

    def prepare(self, tensors: Tensors) -> None:
        """Plan the first save and take its host memory now, rather than in the midst of training.

        Pinning memory takes about as long as writing it; later saves use the same again.
        """
        self.wait()
        self._ready(tensors, [])
        self._planner.let_go()
        self._pieces.touch()

    def save(self, step: int, tensors: Tensors, extra: Mapping[str, Any]) -> Staged:
        """Save the state after a step; return once it is copied and may change again.

        On CUDA it returns once the copies are queued: what changes the tensors has to come after
        them on the current stream. Waits for the save before it, and raises what that failed with.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        problems = extra_problems(extra)
        if step < 0:
            problems.append(Problem("step", f"{step} is below 0", "count steps from 0"))
        planned = self._ready(tensors, problems)
        planned_at = time.perf_counter()
        self._writing = writing = Writing(
            step,
            planned,
            encode_extra(extra),
            folder=self._folder,
            peers=self._peers,
            pieces=self._pieces,
            settings=self.settings,
        )
        try:
            stage(map(self._planner.local, planned.pieces), self._pieces, writing.send)
        except BaseException as error:
            writing.end(error)
            raise
        finally:
            self._planner.let_go()
        writing.end()
        if not self.settings.asynchronous:
            self.wait()
        return Staged(
            step=step,
            staged_bytes=planned.image.data_bytes,
            waited_s=waited - began,
            planned_s=planned_at - waited,
            copied_s=time.perf_counter() - planned_at,
        )

    def _ready(self, tensors: Tensors, problems: Sequence[Problem]) -> Planned:
        planned = self._planner.plan(tensors, problems)
        self._pieces.fit(planned.image.data_bytes, pinned=self._planner.on_gpu)
        return planned

    def wait(self) -> None:
        """Wait for the save in flight; raises `CheckpointFailed` where it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def load(
        self,
        into: Tensors,
        step: int | None = None,
        *,
        leftover: Leftover = "refuse",
    ) -> Loaded:
        """Load a step, or the latest save, into these tensors.

        Nothing is changed before the whole checkpoint is verified and fits. A damaged one is
        refused where its step was asked for; else the settings say whether the save before it is
        tried. `leftover` says what to do with saved tensors that `into` does not name.
        """
        self.wait()
        found = choose(self._folder, step, self._peers, self.settings)
        return load_into(found, into, leftover, self._peers, self.settings)

    def close(self) -> None:
        """Wait for the save in flight and let go of the folder and of the buffers."""
        try:
            self.wait()
        finally:
            self._folder.release()
            self._pieces = Pieces()
            self._peers.leave()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
