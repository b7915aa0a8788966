"""`LocalFileSystem`: the few things a checkpoint asks of a file system, in one place.

Each is one step that a crash can fall before or after; tests put a disk in its place that fails.
"""

import os
import shutil
import sys
from pathlib import Path


class LocalFileSystem:
    """The file system of this machine."""

    def make_folder(self, path: Path) -> None:
        """Make a folder that does not exist yet."""
        path.mkdir(parents=True)

    def create(self, path: Path) -> int:
        """Open a new file for writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, file: int, data: memoryview, start: int) -> None:
        """Write all of the data at this byte."""
        while data:
            done = os.pwrite(file, data, start)
            data, start = data[done:], start + done

    def sync(self, file: int) -> None:
        """Wait until what was written would survive a loss of power."""
        if sys.platform == "darwin":
            # There fsync leaves the data in the drive's own cache: fcntl(2), F_FULLFSYNC.
            import fcntl

            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        else:
            os.fsync(file)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder would survive a loss of power."""
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name, in one step."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Delete a folder and all in it."""
        shutil.rmtree(path)
