"""`CorpusVerification`: reads the files of corpora once and compares them with their checksums.

Small files are read before the first batch. Larger ones are read by a thread beside training, which
takes seconds to minutes: damage that it finds ends the run at the next batch, and no checkpoint is
written before all is read. What was found whole is noted with size and time of change, so that the
next run need not read it again. Several ranks share large files among them.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import DamagedFile, Problem

FOREGROUND_BYTES = 256 << 20
"""So much is read before training begins; it takes a fraction of a second."""
CACHE_FILE = "verified.json"


class CorpusCheck(NamedTuple):
    """One file and what reads it."""

    file: Path
    digest: str
    """What its content is compared with; another digest is another check."""
    find_problems: Callable[[], list[Problem]]

    @property
    def key(self) -> str:
        """What is noted of the file: it changes with the file."""
        status = self.file.stat()
        return f"{status.st_size} {status.st_mtime_ns} {self.digest}"


class CorpusVerification:
    """Checks files, each once; any thread may ask for what was found."""

    def __init__(
        self,
        checks: Iterable[CorpusCheck],
        *,
        cache_folder: Path | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Check small files now, and begin with larger ones; raise `DamagedFile` where one is."""
        self._cache = None if cache_folder is None else cache_folder / CACHE_FILE
        self._known = self._read_cache()
        left = [each for each in checks if self._known.get(str(each.file)) != each.key]
        is_small = sum(each.file.stat().st_size for each in left) <= FOREGROUND_BYTES
        # Small ones are read by every rank, so that all end with the same words.
        self._left = left if is_small else [
            each for place, each in enumerate(left) if place % world == rank
        ]  # fmt: skip
        self._problems: list[Problem] = []
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if is_small:
            self._run()
            self.raise_damage()
        else:
            self._thread = threading.Thread(target=self._run, name="data-checks", daemon=True)
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether every file was read."""
        return not self._left

    def raise_damage(self) -> None:
        """Raise where a file is damaged, of those that were read so far."""
        if self._problems:
            raise DamagedFile(self._problems)
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until every file was read; raise where one is damaged."""
        if self._thread is not None:
            self._thread.join()
        self.raise_damage()

    def close(self) -> None:
        """Read no further file."""
        self._closed = True

    def _run(self) -> None:
        found = False
        try:
            while self._left and not self._closed:
                check = self._left[0]
                before = check.key
                problems = check.find_problems()
                self._problems += problems
                if not problems and check.key == before:
                    self._known[str(check.file)] = before
                    found = True
                self._left.pop(0)
        except Exception as error:  # noqa: BLE001 - raised where batches are made
            self._error = error
        if found:
            self._write_cache()

    def _read_cache(self) -> dict[str, str]:
        if self._cache is None:
            return {}
        try:
            return msgspec.json.decode(self._cache.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError):
            return {}

    def _write_cache(self) -> None:
        """Note what is whole; where nothing can be written, the next run reads it again."""
        if self._cache is None:
            return
        with suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            part = self._cache.with_name(f"{CACHE_FILE}.{os.getpid()}.partial")
            known = self._read_cache() | self._known  # other ranks write theirs
            part.write_bytes(msgspec.json.encode(known))
            part.replace(self._cache)


def list_checks(groups: Sequence[Sequence[CorpusCheck]]) -> list[CorpusCheck]:
    """Return the checks of corpora, each file once also where a blend names it twice."""
    return list({str(check.file): check for group in groups for check in group}.values())
