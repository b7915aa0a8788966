"""Reading what is on a disk, and not what memory kept of it.

`direct` asks the system to pass its page cache by; where a file system knows no such thing, its
cached pages are `dropped` before each pass. One that lives in memory has no disk to read.
"""

import mmap
import os
import sys
from pathlib import Path
from typing import Literal

CacheBypass = Literal["direct", "dropped", "none"]
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_DIRECT = getattr(os, "O_DIRECT", 0)


def detect_file_system(folder: Path) -> str:
    """Return the kind of file system that a folder lies on, as Linux names it; empty elsewhere."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    here, kind, length = str(folder.resolve()), "", 0
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, place, name, *_ = line.split(" ")
        inside = here == place or here.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= length:
            kind, length = name, len(place)
    return kind


def detect_cache_bypass(folder: Path) -> CacheBypass:
    """Return how the cache is passed by in a folder."""
    if detect_file_system(folder) in IN_MEMORY:
        return "none"
    probe = folder / f".meshwright-probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(mmap.PAGESIZE))
        if _DIRECT:
            opened = os.open(probe, os.O_RDONLY | _DIRECT)
            try:
                os.preadv(opened, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
            finally:
                os.close(opened)
            return "direct"
    except OSError:
        pass
    finally:
        probe.unlink(missing_ok=True)
    return "dropped" if sys.platform == "linux" else "none"


class UncachedFile:
    """A file that is read past the cache, or through it."""

    def __init__(self, path: Path, bypass: CacheBypass) -> None:
        self.bypass = bypass
        self.fd = os.open(path, os.O_RDONLY | (_DIRECT if bypass == "direct" else 0))
        self.size = os.fstat(self.fd).st_size

    def __enter__(self) -> "UncachedFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def drop_cache(self) -> None:
        """Drop what the cache holds of it, where that is the way."""
        if self.bypass == "dropped":
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, into: mmap.mmap, start: int) -> None:
        """Fill a buffer, whose length the system may ask to be one of whole pages."""
        read = os.preadv(self.fd, [into], start)
        if read != len(into):
            raise OSError(f"{read} of {len(into)} bytes were read at {start}")
