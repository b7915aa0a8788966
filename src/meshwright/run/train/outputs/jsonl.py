"""`JsonLines`: one JSON object for each row, in a file that only grows.

A run that resumes cuts off what it wrote after the step it resumes from, so that every step is
there once. A number that is not finite is null, which every JSON reader takes.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.train.outputs.output import Figures
from meshwright.timeline.paths import sync_folder


class JsonLines:
    """Appends rows to a file."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        """Open the file of a new run, or of one that goes on after the step `resumed_at`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_at is not None:
            cut(path, resumed_at)
        elif path.exists() and path.stat().st_size:
            fix = "resume that run, or give this one a folder of its own"
            raise InputError([Problem(str(path), "it holds the rows of another run", fix)])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, step: int, figures: Figures) -> None:
        """Append a row; it is in the file when this returns."""
        row: dict[str, Any] = {"step": step}
        for name, value in figures.items():
            row[name] = value if math.isfinite(value) else None
        # One call for the whole line: a crash leaves at most one half line, at the end.
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, "there was no room for a row")

    def close(self) -> None:
        """Put the rows on the disk."""
        os.fsync(self._file)
        os.close(self._file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Give the rows of a file; half a line left by a crash is no row."""
    with path.open("rb") as lines:
        for line in lines:
            row = _row(line)
            if row is not None:
                yield row


def cut(path: Path, step: int, stays: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Drop half lines and the rows after a step, but those that stay, in one step.

    A crash leaves all or none.
    """
    if not path.exists():
        return
    new = path.with_name(f".{path.name}.cut")
    dropped = False
    with path.open("rb") as lines, new.open("wb") as kept:
        for line in lines:
            row = _row(line)
            if row is not None and (row["step"] <= step or (stays is not None and stays(row))):
                kept.write(line)
            else:
                dropped = True
        kept.flush()
        os.fsync(kept.fileno())
    if not dropped:
        new.unlink()
        return
    new.replace(path)
    sync_folder(path.parent)


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole else None
