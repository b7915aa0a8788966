"""Write what a command makes, or say why it cannot be."""

from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.file_errors import make_parent_folder


def write_text(path: str, text: str) -> None:
    """Write a text file, in a folder that is made where there is none."""
    make_parent_folder(Path(path))
    try:
        # Names of files may hold bytes that are no UTF-8.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise InputError([Problem(path, what, "name a file that can be written")]) from None
