"""What a command returns: data for scripts and views for people, never printed by itself."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class TableView(NamedTuple):
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    right_aligned: frozenset[str] = frozenset()
    """Columns of numbers, aligned to the right."""
    wrapped: frozenset[str] = frozenset()
    """Columns of prose, which wrap first where the terminal is narrow."""
    bar_columns: frozenset[str] = frozenset()
    """Columns drawn with marks, each coloured by its kind on a terminal."""


class FieldsView(NamedTuple):
    """Names with values, one to a line."""

    fields: tuple[tuple[str, str], ...]
    title: str = ""


class TextView(NamedTuple):
    """Lines that are not wrapped: configuration files, flags to paste, advice."""

    body: str
    verbatim: bool = False
    """Whether a pipe gets every character as it is, as programs that read it on need."""


class BarView(NamedTuple):
    """One line drawn with marks, each coloured by its kind on a terminal."""

    marks: str
    title: str = ""


class NoteView(NamedTuple):
    """A remark for people that is no part of the answer; goes to stderr."""

    body: str


View = TableView | FieldsView | TextView | BarView | NoteView


class CommandResult(NamedTuple):
    """The result of a command."""

    schema: str
    """Name and version of the JSON form, such as `models/1`."""
    data: Mapping[str, Any]
    """The whole answer as plain data."""
    views: tuple[View, ...]
    """The answer for people."""
    quiet_lines: tuple[str, ...] = ()
    """What `--quiet` prints: only the key values."""
    exit_code: int = 0
    """Exit code: 0 done, 1 the answer is no."""


def make_table(
    columns: str,
    rows: Iterable[Iterable[object]],
    title: str = "",
    *,
    right: str = "",
    wide: str = "",
    bars: str = "",
) -> TableView:
    """Make a table from comma-separated column names and rows of anything."""
    return TableView(
        tuple(column.strip() for column in columns.split(",")),
        tuple(tuple("" if cell is None else str(cell) for cell in row) for row in rows),
        title,
        _words(right),
        _words(wide),
        _words(bars),
    )


def _words(names: str) -> frozenset[str]:
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def make_fields(pairs: Mapping[str, object], title: str = "") -> FieldsView:
    """Make facts from a mapping, leaving out what is None or empty."""
    kept = {name: str(value) for name, value in pairs.items() if value not in (None, "")}
    return FieldsView(tuple(kept.items()), title)
