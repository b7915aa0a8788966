"""A folder for a while: gone when the work is, and taken away later where the work was killed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, Problem

PREFIX = "meshwright-bench-"


@contextmanager
def scratch(inside: Path) -> Iterator[Path]:
    """Make a folder inside another; whatever lies in it at the end goes with it."""
    try:
        _tidy(inside)
        made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=inside))
    except OSError as fault:
        what = f"{inside} cannot be written to: {fault.strerror or fault}"
        raise InputError([Problem("--folder", what, "name another with --folder")]) from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _tidy(inside: Path) -> None:
    """Remove what earlier ones left that were killed on this machine."""
    for left in inside.glob(f"{PREFIX}*"):
        number = left.name.removeprefix(PREFIX).partition("-")[0]
        if left.is_dir() and number.isdecimal() and not _runs(int(number)):
            shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
