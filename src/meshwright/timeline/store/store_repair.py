"""Closes the files of a timeline that a killed writer left open or that were cut short.

Knows which files make a folder's timeline; how one is closed is `segments`' business.
"""

import re
from pathlib import Path

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors, list_folder
from meshwright.timeline.schema import COUNTER_COLUMNS_BY_NAME, SPAN_COLUMNS_BY_NAME
from meshwright.timeline.store.rank_file import SpanFilter, read_rank_file
from meshwright.timeline.store.segmented_file import finalize_file, find_existing_path, is_complete

_NAME = re.compile(r"((?:rank|counters)-\d+\.parquet)(\.partial)?")


class RepairResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair did, and what it could not do."""

    repaired: tuple[str, ...]
    """One line for each file that was closed: its path and the rows it keeps."""
    damaged: tuple[str, ...]
    """One line for each fault that is left: the path, what is wrong and what would help."""


def repair_timeline(folder: str | Path) -> RepairResult:
    """Close the files that a killed writer left open or that were cut short, as far as whole.

    Every file is then read in full, so `damaged` names all that `read` would. What cannot be
    mended is left as it is. A file whose writer still runs, or that may not be written, is refused
    with an `InputError`, after the others were mended.
    """
    folder = Path(folder)
    mended: list[str] = []
    damaged: list[str] = []
    refused: list[Problem] = []
    for name in sorted({match[1] for match in map(_NAME.fullmatch, list_folder(folder)) if match}):
        path = folder / name
        try:
            rows = _closed(path)
        except InputError as error:
            refused += error.problems
            continue
        if rows is not None:
            mended.append(f"{path}: closed with {rows:,} rows")
        damaged += map(str, _faults(path))
    if refused:
        raise InputError(refused)
    return RepairResult(repaired=tuple(mended), damaged=tuple(damaged))


def _closed(path: Path) -> int | None:
    """Close one file; returns the rows it keeps, or None where there is nothing to do."""
    with convert_os_errors(path, "repair"):
        if path.exists() and is_complete(path):
            return None
    return finalize_file(path)


def _faults(path: Path) -> tuple[Problem, ...]:
    """What reading finds wrong with a file."""
    columns = SPAN_COLUMNS_BY_NAME if path.name.startswith("rank") else COUNTER_COLUMNS_BY_NAME
    try:
        part = read_rank_file(
            find_existing_path(path), columns, frozenset(columns), SpanFilter(None, None)
        )
    except InputError as error:
        return error.problems
    return tuple(part.problems)
