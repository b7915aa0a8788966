"""`AsyncSave`: one save on its way to the disk, in threads of its own.

Pieces come in over a queue from the thread that trains. Worker threads compute their checksums
and write them; one more thread talks to the other ranks. The first rank commits once every rank
has written and synced its file. The threads start with the save and end with it, and a process
that ends meanwhile waits for them.
"""

import os
import threading
import zlib
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import msgspec

from meshwright.errors import DamagedFile, MeshwrightError
from meshwright.run.train.checkpoint.checkpoint_config import CheckpointConfig
from meshwright.run.train.checkpoint.checkpoint_folder import CheckpointFolder, SavedCheckpoint
from meshwright.run.train.checkpoint.checksums import verify_files
from meshwright.run.train.checkpoint.metadata import FORMAT_VERSION, CheckpointMetadata, SavedFile
from meshwright.run.train.checkpoint.rank_coordinator import RankCoordinator
from meshwright.run.train.checkpoint.save_plan import SavePlan
from meshwright.run.train.checkpoint.staging import StagedBuffer, StagingBuffers


class CheckpointSaveError(MeshwrightError):
    """A save did not come to its end; what was there before it is untouched."""

    exit_code: ClassVar[int] = 3


class AsyncSave:
    """A save in flight."""

    def __init__(
        self,
        step: int,
        planned: SavePlan,
        extra: msgspec.Raw,
        *,
        folder: CheckpointFolder,
        peers: RankCoordinator,
        pieces: StagingBuffers,
        settings: CheckpointConfig,
    ) -> None:
        self.step = step
        self._planned, self._extra = planned, extra
        self._folder, self._peers, self._pieces = folder, peers, pieces
        self._settings = settings
        self._block_bytes = pieces.buffer_bytes
        self._file = _OpenFile()
        self._arrivals: SimpleQueue[StagedBuffer | None] = SimpleQueue()
        # Where the pieces hold everything, writing starts after the last copy: until then
        # somebody waits for the copies, and the writers would take memory bandwidth from them.
        self._may_write = threading.Event()
        if pieces.total_bytes < planned.file_layout.data_bytes:
            self._may_write.set()
        self._error: BaseException | None = None
        self._found: SavedCheckpoint | None = None
        self._workers = [
            threading.Thread(target=self._work, name=f"checkpoint-{step}-{number}")
            for number in range(settings.threads)
        ]
        self._leader = threading.Thread(target=self._lead, name=f"checkpoint-{step}")
        for thread in (*self._workers, self._leader):
            thread.start()

    def write(self, filled: StagedBuffer) -> None:
        """Take a piece; it is given back once it is written."""
        self._arrivals.put(filled)

    def finish(self, error: BaseException | None = None) -> None:
        """Say that no more pieces come, and what went wrong with them, if anything did."""
        if error is not None:
            self._fail(error)
        for _ in self._workers:
            self._arrivals.put(None)
        self._may_write.set()

    def wait(self) -> SavedCheckpoint:
        """Wait for the end; return the checkpoint, or raise what kept it from being saved."""
        self._leader.join()
        if self._error is not None:
            what = (
                f"the checkpoint of step {self.step} was not saved: {self._error}; look at the "
                f"space and the rights in {self._folder.path}"
            )
            raise CheckpointSaveError(what) from self._error
        assert self._found is not None
        return self._found

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error

    def _work(self) -> None:
        self._may_write.wait()
        while (filled := self._arrivals.get()) is not None:
            try:
                file = self._file.wait()
                # After a failure the pieces are only handed back, so that nobody waits for one.
                if self._error is None and file is not None:
                    data = filled.wait_for_bytes()
                    self._folder.filesystem.write(
                        file, data, len(self._planned.file_layout.header) + filled.start
                    )
                    self._file.sums[filled.start] = zlib.crc32(data)
            except BaseException as error:  # noqa: BLE001 - the next save or wait raises it
                self._fail(error)
            finally:
                self._pieces.release(filled.buffer)

    def _lead(self) -> None:
        partial: Path | None = None
        try:
            with self._peers.expect_write_delay(self._planned.file_layout.data_bytes):
                serial, partial = self._peers.all_reduce(
                    lambda: None, lambda _: self._folder.open_partial(self.step)
                )
                opened = partial
                self._found = self._peers.all_reduce(
                    lambda: self._write(opened),
                    lambda files: self._commit(opened, serial, files),
                )
        except BaseException as error:  # noqa: BLE001 - the next save or wait raises it
            self._fail(error)
            self._abandon(partial)
        finally:
            self._file.give_up()
            for worker in self._workers:
                worker.join()

    def _abandon(self, partial: Path | None) -> None:
        if partial is not None and self._peers.is_coordinator:
            try:
                self._folder.discard(partial)
            except BaseException as error:  # noqa: BLE001 - told along with what came before it
                if self._error is not None:
                    self._error.add_note(f"its partial folder could not be deleted: {error}")

    def _write(self, partial: Path) -> SavedFile | None:
        """Write this rank's file and wait until it is on the disk."""
        image, disk = self._planned.file_layout, self._folder.filesystem
        if not image.written_boxes:
            self._file.give_up()
            self._join()
            return None
        file = disk.create(partial / image.name)
        try:
            disk.write(file, memoryview(image.header), 0)
            self._file.open(file)
            self._join()
            disk.sync(file)
            saved = SavedFile(
                name=image.name,
                header_bytes=len(image.header),
                data_bytes=image.data_bytes,
                block_bytes=self._block_bytes,
                checksums=(zlib.crc32(image.header), *self._file.in_order()),
            )
            if self._settings.verify == "checksum-save-load":
                self._read_back(partial, file, saved)
        finally:
            disk.close(file)
        return saved

    def _join(self) -> None:
        """Wait until every piece is written."""
        for worker in self._workers:
            worker.join()
        if self._error is not None:
            raise self._error

    def _read_back(self, partial: Path, file: int, saved: SavedFile) -> None:
        if hasattr(os, "posix_fadvise"):
            # Else the check would read the copy that the system still holds in memory.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        problems = verify_files(partial, [saved], self._settings.threads)
        if problems:
            raise DamagedFile(problems)

    def _commit(self, partial: Path, serial: int, files: list[SavedFile | None]) -> SavedCheckpoint:
        written = tuple(file for file in files if file is not None)
        for file in written:
            path = partial / file.name
            if not path.is_file() or path.stat().st_size != file.header_bytes + file.data_bytes:
                raise CheckpointSaveError(
                    f"the first rank does not see all of {path}: "
                    "the folder must be on storage that all nodes share"
                )
        found = self._folder.commit(
            partial,
            CheckpointMetadata(
                format=FORMAT_VERSION,
                serial=serial,
                step=self.step,
                ranks=self._peers.ranks,
                files=written,
                tensors=self._planned.tensors,
                extra=self._extra,
            ),
        )
        self._folder.prune(keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)
        return found


class _OpenFile:
    """A file that workers wait for, and the checksums of what they wrote."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._file: int | None = None
        self.sums: dict[int, int] = {}

    def open(self, file: int) -> None:
        self._file = file
        self._settled.set()

    def give_up(self) -> None:
        self._settled.set()

    def wait(self) -> int | None:
        self._settled.wait()
        return self._file

    def in_order(self) -> tuple[int, ...]:
        return tuple(self.sums[start] for start in sorted(self.sums))
