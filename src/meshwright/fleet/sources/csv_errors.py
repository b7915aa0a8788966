"""Where a CSV file of ours is wrong: the line, the column, the value and what would be right.

Arrow reads such files and says that one cannot be read; this looks again, to say what to mend.
"""

import csv
import gzip
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import Problem
from meshwright.fleet.sources.time_text import parse_times
from meshwright.fleet.tables import TABLE_SCHEMAS
from meshwright.spec.units import format_quantity

NULL_VALUES: Final = ("", "null", "NULL", "NaN", "nan")
"""Fields that are unknown."""
_DURATIONS = ("time_limit_s", "cpu_s")
TIME_COLUMNS: Final = frozenset(
    field.name
    for schema in TABLE_SCHEMAS.values()
    for field in schema
    if field.name.endswith("_s") and field.name not in _DURATIONS
)
"""Columns of our tables that hold moments."""
_LINES_AT_ONCE = 4096
_MOST_TOLD = 5
_MOST_SHOWN = 40


class _Line(NamedTuple):
    number: int
    fields: Sequence[str]


def find_csv_errors(file: Path, schema: pa.Schema, keys: Collection[str]) -> list[Problem]:
    """Return the first things that are wrong with a file; none where all fields can be read."""
    try:
        with open_text(file) as stream:
            lines = _lines(stream)
            names = next(lines, _Line(1, ())).fields
            while some := list(islice(lines, _LINES_AT_ONCE)):
                found = _wrong(str(file), names, some, schema, keys)
                if told := list(islice(found, _MOST_TOLD)):
                    return told
    except (csv.Error, OSError, EOFError):
        pass
    return []


def find_row_lines(file: Path, rows: Sequence[int]) -> dict[int, int]:
    """Return the line on which each of some rows stands; of Parquet, its number from 1."""
    if file.suffix == ".parquet":
        return {row: row + 1 for row in rows}
    found: dict[int, int] = {}
    with open_text(file) as stream:
        for place, line in enumerate(islice(_lines(stream), 1, None)):
            if place in rows:
                found[place] = line.number
            if len(found) == len(rows):
                break
    return found


def open_text(file: Path) -> IO[str]:
    """Open a CSV file, packed or not, so that any byte can be read."""
    opening = gzip.open if file.suffix == ".gz" else open
    return opening(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="")


def _lines(stream: IO[str]) -> Iterator[_Line]:
    reader, number = csv.reader(stream), 1
    for fields in reader:
        if fields:
            yield _Line(number, fields)
        number = reader.line_num + 1


def _wrong(
    file: str,
    names: Sequence[str],
    lines: Sequence[_Line],
    schema: pa.Schema,
    keys: Collection[str],
) -> Iterator[Problem]:
    fitting = []
    for line in lines:
        if len(line.fields) == len(names):
            fitting.append(line)
            continue
        there = format_quantity(len(line.fields), "field")
        what = f"has {there}, but the first line names {len(names)}"
        fix = 'quote fields with commas in them, as "a,b"; leave unknown ones empty'
        yield Problem(f"{file} line {line.number}", what, fix)
    for place, name in enumerate(names):
        if name in schema.names:
            kind = schema.field(name).type
            key = name in keys
            for line in _unreadable(fitting, place, name, kind, key=key):
                where = f"{file} line {line.number}, column {name}"
                yield _problem(where, name, line.fields[place], kind, key=key)


def _unreadable(
    lines: Sequence[_Line], place: int, name: str, kind: pa.DataType, *, key: bool
) -> list[_Line]:
    """Return the lines whose field is of another kind, or empty where it names a row."""
    if _readable([line.fields[place] for line in lines], name, kind, key=key):
        return []
    return [line for line in lines if not _readable([line.fields[place]], name, kind, key=key)]


def _readable(fields: Sequence[str], name: str, kind: pa.DataType, *, key: bool) -> bool:
    try:
        texts = pa.array(
            [None if (text := one.strip()) in NULL_VALUES else text for one in fields], pa.string()
        )
        if name in TIME_COLUMNS:
            if not (parse_times(texts).is_known | pc.is_null(texts).to_numpy(False)).all():
                return False
        elif not pa.types.is_list(kind):
            texts.cast(kind)
    except (pa.ArrowInvalid, UnicodeEncodeError):
        return False
    return not (key and texts.null_count)


def _problem(where: str, name: str, field: str, kind: pa.DataType, *, key: bool) -> Problem:
    if key and field.strip() in NULL_VALUES:
        return Problem(where, "is empty, but rows are told apart by it", "fill it in")
    shown = field if len(field) <= _MOST_SHOWN else f"{field[:_MOST_SHOWN]}…"
    if any("\udc80" <= letter <= "\udcff" for letter in field):
        raw = shown.encode(errors="surrogateescape")
        return Problem(where, f"{raw!r} is not UTF-8", "save the file as UTF-8")
    if pa.types.is_integer(kind):
        wanted = f"a whole number of at most {2 ** (kind.bit_width - 1) - 1:,}"
        fix = "write digits alone, as 8"
    elif pa.types.is_boolean(kind):
        wanted, fix = "true or false", "write one of them"
    elif name in _DURATIONS:
        wanted, fix = "a number of seconds", "write seconds, as 3600"
    elif name.endswith("_s"):
        wanted = "a time in seconds"
        fix = "write seconds since 1970 in UTC, as 1767225600, or 2026-01-01T00:00:00Z"
    else:
        wanted, fix = "a number", "write it without a unit, as 0.5"
    if not key:
        fix += ", or nothing where it is unknown"
    return Problem(where, f"{shown!r} is not {wanted}", fix)
