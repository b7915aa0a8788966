"""What a command returns: data for scripts and views for people, never printed by itself."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Table(NamedTuple):
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    right: frozenset[str] = frozenset()
    """Columns of numbers, aligned to the right."""
    wide: frozenset[str] = frozenset()
    """Columns of prose, which wrap first where the terminal is narrow."""
    bars: frozenset[str] = frozenset()
    """Columns drawn with marks, each coloured by its kind on a terminal."""


class Facts(NamedTuple):
    """Names with values, one to a line."""

    pairs: tuple[tuple[str, str], ...]
    title: str = ""


class Text(NamedTuple):
    """Lines printed as they are: configuration files, flags to paste, scripts."""

    body: str


class Bar(NamedTuple):
    """One line drawn with marks, each coloured by its kind on a terminal."""

    marks: str
    title: str = ""


class Note(NamedTuple):
    """A remark for people that is no part of the answer; goes to stderr."""

    body: str


View = Table | Facts | Text | Bar | Note


class Answer(NamedTuple):
    """The result of a command."""

    schema: str
    """Name and version of the JSON form, such as `models/1`."""
    data: Mapping[str, Any]
    """The whole answer as plain data."""
    views: tuple[View, ...]
    """The answer for people."""
    quiet: tuple[str, ...] = ()
    """What `--quiet` prints: only the key values."""
    code: int = 0
    """Exit code: 0 done, 1 the answer is no."""


def table(
    columns: str,
    rows: Iterable[Iterable[object]],
    title: str = "",
    *,
    right: str = "",
    wide: str = "",
    bars: str = "",
) -> Table:
    """Make a table from comma-separated column names and rows of anything."""
    return Table(
        tuple(column.strip() for column in columns.split(",")),
        tuple(tuple("" if cell is None else str(cell) for cell in row) for row in rows),
        title,
        _words(right),
        _words(wide),
        _words(bars),
    )


def _words(names: str) -> frozenset[str]:
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def facts(pairs: Mapping[str, object], title: str = "") -> Facts:
    """Make facts from a mapping, leaving out what is None or empty."""
    kept = {name: str(value) for name, value in pairs.items() if value not in (None, "")}
    return Facts(tuple(kept.items()), title)
