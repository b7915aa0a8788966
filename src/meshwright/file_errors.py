"""What the system refuses, said as an `InputError` that names the path and a way out.

Also makes the folders above what a command writes. Knows nothing of timelines.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError, Problem

_NO_SPACE = "free some space there, or choose another place"
_NO_PERMISSION = "get the permission for it, or choose another place"
_FREE_ROWS, _ROWS_PER_BYTE = 1_000_000, 100
_LONGEST = 200
"""Most characters of a library's own words."""
_FIXES = {
    errno.ENOENT: "give the path of something that is there",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
    errno.EISDIR: "remove that folder, or choose another name",
    errno.EEXIST: "remove the existing file, or choose another name",
    errno.ENOTDIR: "give a path in which only the last part is a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def describe_os_error(error: OSError, path: Path, action: str) -> Problem:
    """Say that an action on a path, such as `read` or `write`, failed."""
    fix = _FIXES.get(error.errno or 0, "check the path and its disk, or choose another place")
    if action == "read" and error.errno == errno.EISDIR:
        fix = "give a file that is in it"
    return Problem(str(path), f"cannot {action}: {error.strerror or error}", fix)


@contextmanager
def convert_os_errors(path: Path, action: str) -> Iterator[None]:
    """Turn the `OSError` of the lines inside into an `InputError` about this path."""
    try:
        yield
    except OSError as error:
        raise InputError([describe_os_error(error, path, action)]) from error


@contextmanager
def convert_library_errors(where: str, what: str, fix: str) -> Iterator[None]:
    """Turn whatever a parsing library raises of a file into an `InputError`.

    For libraries that raise bare exceptions. One written in Rust panics at some files; PyO3 raises
    that as a `BaseException`, which would pass every `except Exception` and end a server's thread.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError([Problem(where, f"{what}: {text[:_LONGEST]}", fix)]) from error


def require_plausible_rows(path: Path, metadata: Any) -> None:
    """Refuse a Parquet file that claims more rows than its bytes can mean.

    A run of equal values takes a few bytes, however long it is: a file of ten kilobytes may claim
    a billion rows. Real tables take from 0.1 to 100 bytes for each.
    """
    rows = sum(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    most = max(_FREE_ROWS, _ROWS_PER_BYTE * path.stat().st_size)
    if rows > most:
        what = f"claims {rows:,} rows, more than {most:,} for its size"
        raise InputError([Problem(str(path), what, "write it again, or leave it out")])


def make_parent_folder(path: Path) -> None:
    """Make the folders above a path that a command writes to, where there are none."""
    parent = path.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        above = next(each for each in (parent, *parent.parents) if each.exists())
        what = f"lies in {above}, which is a file, not a folder"
        raise InputError([Problem(str(path), what, "choose another place")]) from None
    except OSError as error:
        raise InputError([describe_os_error(error, parent, "create")]) from error


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where there is none."""
    make_parent_folder(folder)
    with convert_os_errors(folder, "create"):
        if folder.exists() and not folder.is_dir():
            fix = "give a folder, or move the file away"
            raise InputError([Problem(str(folder), "is a file, not a folder", fix)])
        folder.mkdir(exist_ok=True)


def list_folder(folder: Path) -> list[str]:
    """The names of what lies in a folder, in order."""
    with convert_os_errors(folder, "read"):
        if folder.exists() and not folder.is_dir():
            fix = f"give its folder, {folder.absolute().parent}"
            raise InputError([Problem(str(folder), "is a file, not a folder", fix)])
        return sorted(item.name for item in folder.iterdir())


def fsync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, so that a power cut does not undo a renaming."""
    with convert_os_errors(folder, "write"):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            # Some network file systems cannot do this for folders; they have their own order.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
                raise
        finally:
            os.close(opened)
