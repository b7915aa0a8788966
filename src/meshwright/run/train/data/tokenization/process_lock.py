"""One process of a machine at a time: the first makes what the others wait for and then use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def acquire_exclusive_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock that other processes of this machine wait for; it ends with the process."""
    import fcntl  # POSIX only, as the package is

    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
