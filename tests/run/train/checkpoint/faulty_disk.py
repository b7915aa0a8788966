"""Disks that fail: at a chosen byte, with what was not synced lost, or by ending the process."""

import os
import signal
from pathlib import Path
from typing import Literal

import torch

from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem

Loss = Literal["none", "unsynced", "zeroed"]
"""What becomes of data that was written and not synced: kept, gone, or a hole of zeros."""


class PowerCut(BaseException):
    """The machine went off; nothing that would clean up runs after it."""


class FailingDisk(LocalFileSystem):
    """Counts every byte written and every other step as one tick, and goes off after so many."""

    def __init__(self, ticks: int | None = None, loss: Loss = "none") -> None:
        self.left = ticks
        self.spent = 0
        self.boundaries: list[int] = []
        self._loss = loss
        self._paths: dict[int, Path] = {}
        self._unsynced: set[Path] = set()
        self._renamed: list[tuple[Path, Path]] = []

    def make_folder(self, path: Path) -> None:
        self._tick()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._tick()
        file = super().create(path)
        self._paths[file] = path
        self._unsynced.add(path)
        return file

    def write(self, file: int, data: memoryview, start: int) -> None:
        fits = len(data) if self.left is None else min(self.left - self.spent, len(data))
        if fits > 0:
            super().write(file, data[:fits], start)
            self.spent += fits
        if fits < len(data):
            self._cut()
        self.boundaries.append(self.spent)

    def sync(self, file: int) -> None:
        self._tick()
        self._unsynced.discard(self._paths[file])

    def sync_folder(self, path: Path) -> None:
        self._tick()
        self._renamed = [pair for pair in self._renamed if pair[1].parent != path]

    def rename(self, old: Path, new: Path) -> None:
        self._tick()
        super().rename(old, new)
        self._renamed.append((old, new))
        self._unsynced = {
            new / path.relative_to(old) if path.is_relative_to(old) else path
            for path in self._unsynced
        }

    def remove(self, path: Path) -> None:
        for file in sorted(path.iterdir()):
            self._tick()
            file.unlink()
        self._tick()
        path.rmdir()

    def _tick(self) -> None:
        if self.left is not None and self.spent >= self.left:
            self._cut()
        self.spent += 1
        self.boundaries.append(self.spent)

    def _cut(self) -> None:
        loss, self._loss = self._loss, "none"
        if loss != "none":
            for path in self._unsynced:
                size = path.stat().st_size
                os.truncate(path, 0)
                os.truncate(path, size if loss == "zeroed" else 0)
            for old, new in reversed(self._renamed):
                new.rename(old)
        raise PowerCut


class DeadlyDisk(FailingDisk):
    """Ends the process by a signal that nothing can catch."""

    def _cut(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(LocalFileSystem):
    """Has no room for tensors."""

    def write(self, *_: object) -> None:
        raise OSError(28, "No space left on device")


def state(step: int) -> dict[str, torch.Tensor]:
    """Return tensors that say which step they are of."""
    return {
        "weight": torch.arange(40, dtype=torch.float32).reshape(5, 8) + step,
        "moment": torch.full((3, 7), step, dtype=torch.bfloat16),
        "count": torch.tensor(step),
    }


def empty() -> dict[str, torch.Tensor]:
    """Return tensors to load `state` into."""
    return {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}


def loaded_step(folder: Path) -> int:
    """Load the newest checkpoint, check that it is whole, and return its step."""
    into = empty()
    with CheckpointManager(folder) as checkpoints:
        loaded = checkpoints.load(into)
    assert loaded.extra == {"step": loaded.step}
    for name, tensor in state(loaded.step).items():
        assert torch.equal(into[name], tensor)
    return loaded.step


def save(folder: Path, step: int, disk: LocalFileSystem, *, keep_last: int = 1) -> None:
    """Save one step with this disk, and wait for it."""
    settings = CheckpointConfig(keep_last=keep_last, threads=1)
    checkpoints = CheckpointManager(folder, settings, disk=disk)
    try:
        checkpoints.save(step, state(step), {"step": step})
        checkpoints.wait()
    finally:
        checkpoints._folder.release()


def save_and_die(folder: Path, step: int, ticks: int) -> None:
    """Save in a process that is killed after so many ticks."""
    save(folder, step, DeadlyDisk(ticks))
