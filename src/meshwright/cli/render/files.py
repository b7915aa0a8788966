"""Write what a command makes, or say why it cannot be."""

from pathlib import Path

from meshwright.errors import InputError, Problem


def write_text(path: str, text: str) -> None:
    """Write a text file."""
    try:
        # Names of files may hold bytes that are no UTF-8.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise InputError([Problem(path, what, "name a file in a folder that exists")]) from None
