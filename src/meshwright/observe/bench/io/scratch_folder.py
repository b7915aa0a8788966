"""A folder for a while: gone when the work is, and taken away later where the work was killed.

Whoever works in one holds a lock on a file in it, which the system lets go of with the process.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, Problem

PREFIX = "meshwright-bench-"
LOCK = ".lock"


@contextmanager
def create_scratch_folder(inside: Path) -> Iterator[Path]:
    """Make a folder inside another; whatever lies in it at the end goes with it."""
    try:
        _tidy(inside)
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=inside))
        held = _locked(made)
    except OSError as fault:
        what = f"cannot write to {inside}: {fault.strerror or fault}"
        raise InputError([Problem("--folder", what, "name another with --folder")]) from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def _locked(folder: Path) -> int:
    opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def _tidy(inside: Path) -> None:
    """Remove what earlier ones left that were killed; one that nobody has locked yet stays."""
    for left in inside.glob(f"{PREFIX}*"):
        if not (left / LOCK).exists():
            continue
        try:
            held = _locked(left)
        except OSError:  # somebody works there, or it is another user's
            continue
        shutil.rmtree(left, ignore_errors=True)
        os.close(held)
