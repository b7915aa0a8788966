"""`CheckpointFolder`: the checkpoints of a run on disk, and the steps that write one.

    000007-step-150/            one checkpoint: the seventh save, after step 150
        rank-00000.safetensors
        checkpoint.json         the record with all checksums, written last
    .partial-000008-step-160/   being written, or left by a crash
    .deleted-000001-step-10/    on its way out

A save gets its visible name in one rename, after everything in it is on the disk. The number in
front orders saves by when they were made: a run that went back to step 100 and saves step 150 is
newer than the step 200 it left behind. Saving the same step twice leaves two folders.
"""

import fcntl
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.train.checkpoint.filesystem import LocalFileSystem
from meshwright.run.train.checkpoint.metadata import (
    METADATA_FILE,
    CheckpointMetadata,
    decode_metadata,
    encode_metadata,
)

_NAME = re.compile(r"(\d{6,})-step-(\d+)", re.ASCII)

_PARTIAL, _DELETED = ".partial-", ".deleted-"


class SavedCheckpoint(NamedTuple):
    """A checkpoint on the disk."""

    save_index: int
    """Number of the save: newer ones have higher numbers."""
    step: int
    path: Path


class CheckpointFolder:
    """Where the checkpoints of one run lie."""

    def __init__(self, path: Path, filesystem: LocalFileSystem) -> None:
        self.path = path
        self.filesystem = filesystem
        self._lock: int | None = None

    def list_saved(self) -> tuple[SavedCheckpoint, ...]:
        """Return the checkpoints that are there by name, oldest save first."""
        if not self.path.is_dir():
            return ()
        matches = [(path, _NAME.fullmatch(path.name)) for path in self.path.iterdir()]
        return tuple(
            sorted(SavedCheckpoint(int(m[1]), int(m[2]), path) for path, m in matches if m)
        )

    def open_partial(self, step: int) -> tuple[int, Path]:
        """Make the hidden folder of the next save; return its number and path."""
        self._claim()
        self._sweep()
        serial = max((found.save_index for found in self.list_saved()), default=0) + 1
        partial = self.path / f"{_PARTIAL}{serial:06d}-step-{step}"
        self.filesystem.make_folder(partial)
        return serial, partial

    def commit(self, partial: Path, record: CheckpointMetadata) -> SavedCheckpoint:
        """Make a complete save visible; its other files are on the disk already."""
        disk = self.filesystem
        file = disk.create(partial / METADATA_FILE)
        try:
            disk.write(file, memoryview(encode_metadata(record)), 0)
            disk.sync(file)
        finally:
            disk.close(file)
        disk.sync_folder(partial)
        path = self.path / partial.name.removeprefix(_PARTIAL)
        disk.rename(partial, path)
        disk.sync_folder(self.path)
        return SavedCheckpoint(record.serial, record.step, path)

    def discard(self, partial: Path) -> None:
        """Delete a save that failed, to give its space back."""
        if partial.exists():
            self.filesystem.remove(partial)

    def prune(self, *, keep_last: int, keep_every: int | None) -> None:
        """Delete what the policy lets go; a folder that cannot be deleted is only warned of."""
        found = {one.save_index: one for one in self.list_saved()}
        present = [
            RetentionEntry(one.save_index, one.step, is_complete(one)) for one in found.values()
        ]
        for serial in select_expired(present, keep_last=keep_last, keep_every=keep_every):
            path = found[serial].path
            hidden = path.with_name(_DELETED + path.name)
            try:
                # Hidden first: a crash in between leaves no half of a checkpoint to be found.
                self.filesystem.rename(path, hidden)
                self.filesystem.sync_folder(self.path)
                self.filesystem.remove(hidden)
            except OSError as error:
                warnings.warn(f"{path} could not be deleted: {error}", stacklevel=2)

    def release(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Refuse to write where another process writes: each would sweep up the other's save."""
        if self._lock is not None:
            return
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            self.filesystem.sync_folder(self.path.parent)
        file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            what = "another process writes checkpoints here"
            fix = "end it, or give this run a folder of its own"
            raise InputError([Problem(str(self.path), what, fix)]) from None
        except OSError:
            pass  # a file system without locks; the number of the save still keeps names apart
        self._lock = file

    def _sweep(self) -> None:
        """Delete what crashes left behind."""
        for path in self.path.iterdir():
            if path.name.startswith((_PARTIAL, _DELETED)):
                self.filesystem.remove(path)


def read_metadata(found: Path) -> CheckpointMetadata:
    """Read a checkpoint's record and compare the sizes of its files, or raise `DamagedFile`."""
    path = found / METADATA_FILE
    try:
        record = decode_metadata(path.read_bytes(), str(path))
        sizes = {file.name: (found / file.name).stat().st_size for file in record.files}
    except OSError as error:
        what = f"cannot read: {error.strerror or error}"
        raise DamagedFile([Problem(str(error.filename), what, "use another checkpoint")]) from None
    wrong = [
        Problem(
            str(found / file.name),
            f"it has {sizes[file.name]:,} bytes of {file.header_bytes + file.data_bytes:,}",
            "use another checkpoint",
        )
        for file in record.files
        if sizes[file.name] != file.header_bytes + file.data_bytes
    ]
    if wrong:
        raise DamagedFile(wrong)
    return record


def is_complete(found: SavedCheckpoint) -> bool:
    """Tell whether a checkpoint has a whole record and files of the right sizes."""
    try:
        read_metadata(found.path)
    except DamagedFile:
        return False
    return True


class RetentionEntry(NamedTuple):
    """What the policy has to know of a checkpoint."""

    serial: int
    step: int
    is_complete: bool
    """Whether it can be loaded, as far as a quick look tells."""


def select_expired(
    present: Sequence[RetentionEntry], *, keep_last: int, keep_every: int | None
) -> tuple[int, ...]:
    """Return the serials to delete.

    The newest `keep_last` sound ones stay, and so does the newest sound one of every step that
    divides by `keep_every`. Damaged ones count for nothing; they go once enough newer sound ones
    are there, so that whatever can be saved of them is there until then. Without any sound
    checkpoint nothing goes.
    """
    newest_first = sorted(present, key=lambda one: -one.serial)
    sound = [one for one in newest_first if one.is_complete]
    if not sound:
        return ()
    last = sound[:keep_last]
    stay = {one.serial for one in last}
    if keep_every is not None:
        for_good: dict[int, int] = {}
        for one in sound:
            if one.step % keep_every == 0:
                for_good.setdefault(one.step, one.serial)
        stay |= set(for_good.values())
    if len(last) < keep_last:
        stay |= {one.serial for one in present if not one.is_complete}
    oldest = last[-1].serial
    return tuple(
        one.serial for one in newest_first if one.serial not in stay and one.serial < oldest
    )
