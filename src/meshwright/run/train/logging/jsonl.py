"""`JsonlLogger`: one JSON object for each row, in a file that only grows.

A run that resumes cuts off what it wrote after the step it resumes from, so that every step is
there once. A number that is not finite is null, which every JSON reader takes.

Half a line at the end is what a kill leaves, and goes without a word. Any other line that is no row
was damaged by somebody else: a warning names it, and a resumed run leaves it where it is.
"""

import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.file_errors import fsync_folder
from meshwright.run.train.logging.logger import StepMetricValues


class JsonlLogger:
    """Appends rows to a file."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        """Open the file of a new run, or of one that goes on after the step `resumed_at`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_at is not None:
            truncate_after_step(path, resumed_at)
        elif path.exists() and path.stat().st_size:
            fix = "resume that run, or give this one a folder of its own"
            raise InputError([Problem(str(path), "it holds the rows of another run", fix)])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, step: int, figures: StepMetricValues) -> None:
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


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Give the rows of a file; half a line left by a crash is none, a damaged one is named."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            row = _row(line)
            if row is not None:
                yield row
            elif _is_damaged(line):
                _tell_damage(path, number)


def truncate_after_step(
    path: Path, step: int, stays: Callable[[dict[str, Any]], bool] | None = None
) -> None:
    """Drop half lines and the rows after a step, but those that stay, in one step.

    A crash leaves all or none. A damaged line stays if it may be of a step that is not done again.
    """
    if not path.exists():
        return
    new = path.with_name(f".{path.name}.cut")
    dropped, before = False, 0
    with path.open("rb") as lines, new.open("wb") as kept:
        for number, line in enumerate(lines, 1):
            row = _row(line)
            if row is not None:
                keeps = row["step"] <= step or (stays is not None and stays(row))
                before = row["step"]
            elif keeps := _is_damaged(line) and before < step:
                _tell_damage(path, number)
            if keeps:
                kept.write(line)
            dropped = dropped or not keeps
        kept.flush()
        os.fsync(kept.fileno())
    if not dropped:
        new.unlink()
        return
    new.replace(path)
    fsync_folder(path.parent)


def _is_damaged(line: bytes) -> bool:
    """Tell whether what is no row once was: a writer that is killed never ends a line."""
    return line.endswith(b"\n") and not line.isspace()


def _tell_damage(path: Path, number: int) -> None:
    what = f"{path}: line {number} is damaged, and what it told is missing; all others are read"
    warnings.warn(what, stacklevel=2)


def _row(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole else None
