"""What the system refuses, said as an `InputError` that names the path and a way out.

Also says which folders are made on the way: the one a timeline lies in, never one above it.
Knows nothing of timelines.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, Problem

_NO_SPACE = "free some space there, or choose another place"
_NO_PERMISSION = "get the permission for it, or choose another place"
_FIXES = {
    errno.ENOENT: "give the path of something that is there",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EISDIR: "move that folder away, or choose another name",
    errno.EEXIST: "move what has this name away, or choose another name",
    errno.ENOTDIR: "give a path in which only the last part is a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def problem_of(error: OSError, path: Path, done: str) -> Problem:
    """Say that a path cannot be read, written or whatever should have been done with it."""
    fix = _FIXES.get(error.errno or 0, "check the path and its disk, or choose another place")
    if done == "read" and error.errno == errno.EISDIR:
        fix = "give a file that is in it"
    return Problem(str(path), f"cannot be {done}: {error.strerror or error}", fix)


@contextmanager
def refusals(path: Path, done: str) -> Iterator[None]:
    """Turn the `OSError` of the lines inside into an `InputError` about this path."""
    try:
        yield
    except OSError as error:
        raise InputError([problem_of(error, path, done)]) from error


def check_parent(path: Path) -> None:
    """Refuse to write where the folder above is missing: a typing error shall make no folders."""
    parent = path.absolute().parent
    try:
        with refusals(parent, "written to"):
            mode = parent.stat().st_mode
    except InputError as refused:
        if isinstance(refused.__cause__, FileNotFoundError):
            what = f"lies in {parent}, which does not exist"
            raise InputError([Problem(str(path), what, f"create the folder {parent}")]) from None
        raise
    if not stat.S_ISDIR(mode):
        what = f"lies in {parent}, which is a file, not a folder"
        raise InputError([Problem(str(path), what, "choose another place")])


def make_folder(folder: Path) -> None:
    """Make a folder where there is none; the one above it must be there."""
    check_parent(folder)
    with refusals(folder, "made"):
        if folder.exists() and not folder.is_dir():
            fix = "give a folder, or move the file away"
            raise InputError([Problem(str(folder), "is a file, not a folder", fix)])
        folder.mkdir(exist_ok=True)


def names_in(folder: Path) -> list[str]:
    """The names of what lies in a folder, in order."""
    with refusals(folder, "read"):
        if folder.exists() and not folder.is_dir():
            fix = f"give its folder, {folder.absolute().parent}"
            raise InputError([Problem(str(folder), "is a file, not a folder", fix)])
        return sorted(item.name for item in folder.iterdir())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, so that a power cut does not undo a renaming."""
    with refusals(folder, "written"):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            # Some network file systems cannot do this for folders; they have their own order.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
                raise
        finally:
            os.close(opened)
