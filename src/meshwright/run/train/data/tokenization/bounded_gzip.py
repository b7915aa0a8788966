"""Opens gzip files of text that may unpack to a bounded multiple of their size."""

import gzip
import io
from pathlib import Path
from typing import Any, BinaryIO, cast

FREE_BYTES = 16 << 20
MAX_RATIO = 200
"""Past the first 16 MiB a file may not grow by more: text reaches 3 to 20, repeated lines 100."""


class _BoundedGzip(io.RawIOBase):
    """The bytes of a gzip file, up to a limit."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = gzip.open(path, "rb")  # noqa: SIM115 - closed with this one
        self._left = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise gzip.BadGzipFile(f"it unpacks to more than {MAX_RATIO} times its size")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bounded_gzip(path: Path) -> BinaryIO:
    """Open a gzip file; reading more than a file of text unpacks to raises `BadGzipFile`."""
    return cast(BinaryIO, io.BufferedReader(_BoundedGzip(path), 1 << 16))
