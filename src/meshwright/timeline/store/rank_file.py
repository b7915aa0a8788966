"""One Parquet file of a timeline: what its footer says, and reading only what is needed.

Reads the columns and row groups that are asked for, as far as the file is whole. Knows one file;
which files make a timeline is `store`'s business.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors, describe_os_error, require_plausible_rows
from meshwright.timeline.columns import arrow_schema, cast_to_schema, to_dictionary, to_numpy
from meshwright.timeline.schema import (
    SCHEMA_VERSION,
    SPAN_COLUMNS_BY_NAME,
    Column,
    ColumnType,
    SpanKind,
    TimelineSource,
)
from meshwright.timeline.store.segmented_file import open_parquet
from meshwright.timeline.timeline import Window, match_kinds, overlaps_window

_LOST = "restore it from a copy, or read on with what is kept"
_VERSION_DIGITS = 9
_OTHER = "move it out of the timeline's folder"
_VERSION, _SOURCE, _METADATA = (f"meshwright.{key}" for key in ("version", "source", "metadata"))


class FileMetadata(NamedTuple):
    """What a file's footer says about the run."""

    source: TimelineSource
    metadata: dict[str, str]


class SpanFilter(NamedTuple):
    """Which rows are wanted."""

    window_ns: Window | None
    kinds: Collection[SpanKind | str] | None

    def required_columns(self, of: Mapping[str, Column]) -> set[str]:
        """What must be read to decide it."""
        times = {"start_ns", "duration_ns"} if of is SPAN_COLUMNS_BY_NAME else {"time_ns"}
        return (times if self.window_ns else set()) | (
            {"kind"} if self.kinds is not None else set()
        )


class RankFileContent(NamedTuple):
    """What came out of one file."""

    table: Any
    """Its rows; none where the file does not exist or nothing of it is whole."""
    metadata: FileMetadata | None
    """What its footer says; None where it has no rows to speak of."""
    problems: list[Problem]
    """What is wrong with it."""


def file_schema(
    columns: Mapping[str, Column], source: TimelineSource, metadata: Mapping[str, str]
) -> pa.Schema:
    """The schema of a file with what its footer says about the run."""
    pairs: Mapping[Any, Any] = metadata
    problems = [
        Problem(f"metadata.{key}", f"is {value!r}, not text", f"give {str(value)!r}")
        for key, value in pairs.items()
        if not (isinstance(key, str) and isinstance(value, str))
    ]
    if problems:
        raise InputError(problems)
    about = {
        _VERSION: str(SCHEMA_VERSION),
        _SOURCE: source.value,
        _METADATA: msgspec.json.encode(dict(metadata)).decode(),
    }
    return arrow_schema(columns.values(), about)


def merge_metadata(
    path: Path, source: TimelineSource, metadata: Mapping[str, str]
) -> Mapping[str, str]:
    """What a file says about the run and what is given, together.

    Raises `InputError` where one contradicts the other; a file of which nothing is whole says
    nothing.
    """
    with convert_os_errors(path, "read"):
        file = open_parquet(path, []).file
    if file is None:
        return metadata
    with file:
        pairs = file.metadata.metadata or {}
    before = _about(pairs, path)
    elsewhere = "or write to another folder"
    problems = [
        Problem(f"{path}: metadata.{key}", f"is {old!r} in the file, not {metadata[key]!r}", fix)
        for key, old in before.metadata.items()
        if metadata.get(key, old) != old
        for fix in (f"give {old!r}, leave {key} out, {elsewhere}",)
    ]
    if _SOURCE.encode() in pairs and before.source != source:
        what = f"holds a {before.source} run, not a {source} one"
        problems.append(Problem(str(path), what, f"give source {before.source}, {elsewhere}"))
    if problems:
        raise InputError(problems)
    return {**before.metadata, **metadata}


def count_rows(path: Path) -> int:
    """How many rows a file has as far as it is whole, by its footer."""
    try:
        file = open_parquet(path, []).file
    except OSError:
        return 0
    if file is None:
        return 0
    with file:
        return int(file.metadata.num_rows)


def read_rank_file(
    path: Path, columns: Mapping[str, Column], wanted: frozenset[str], chosen: SpanFilter
) -> RankFileContent:
    """Read one file as far as it is whole."""
    nothing = arrow_schema(c for c in columns.values() if c.name in wanted and not c.nullable)

    def only(problem: Problem) -> RankFileContent:
        return RankFileContent(nothing.empty_table(), None, [problem])

    labels = [column.name for column in columns.values() if column.type is ColumnType.LABEL]
    try:
        if not path.exists():
            return RankFileContent(nothing.empty_table(), None, [])
        file, fault = open_parquet(path, labels)
    except OSError as error:
        return only(describe_os_error(error, path, "read"))
    if file is None:
        return only(Problem(str(path), fault, _LOST))
    mend = f"run mw timeline repair {path.parent}"
    faults = [Problem(str(path), fault, mend)] if fault else []
    with file:
        require_plausible_rows(path, file.metadata)
        about = _about(file.metadata.metadata or {}, path)
        lacking = [c.name for c in columns.values() if not c.nullable]
        lacking = [name for name in lacking if name not in file.schema_arrow.names]
        if lacking:
            what = f"is not a timeline: it has no column {', '.join(lacking)}"
            return only(Problem(str(path), what, _OTHER))
        twice = sorted(n for n in columns if file.schema_arrow.names.count(n) > 1)
        if twice:
            what = f"is not a timeline: it has column {', '.join(twice)} twice"
            return only(Problem(str(path), what, _OTHER))
        at = _columns_at(file.metadata)
        groups = _groups_in(file.metadata, at, chosen.window_ns)
        needed = [n for n in columns if n in wanted | chosen.required_columns(columns)]
        needed = [
            n
            for n in needed
            if not (columns[n].nullable and _all_null(file.metadata, at.get(n), groups))
        ]
        table, more = _read_groups(file, path, groups, needed)
    try:
        table = cast_to_schema(table, columns)
    except pa.ArrowException as error:
        what = f"is not a timeline: {error}"
        return only(Problem(str(path), what, _OTHER))
    table = _filter(table, columns, chosen).select([n for n in needed if n in wanted])
    return RankFileContent(table, about, faults + more)


def _about(pairs: Mapping[bytes, bytes], path: Path) -> FileMetadata:
    """What the footer says about the run."""
    version = pairs.get(_VERSION.encode(), b"0").decode(errors="replace")
    known = version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS
    if not known or int(version) > SCHEMA_VERSION:
        what = f"has schema version {version[:40]}, this program reads up to {SCHEMA_VERSION}"
        raise InputError([Problem(str(path), what, "read it with a newer meshwright")])
    source = pairs.get(_SOURCE.encode(), TimelineSource.UNKNOWN.value.encode()).decode(
        errors="replace"
    )
    try:
        metadata = msgspec.json.decode(pairs.get(_METADATA.encode(), b"{}"), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        metadata = {}
    return FileMetadata(
        TimelineSource(source) if source in set(TimelineSource) else TimelineSource.UNKNOWN,
        metadata,
    )


def _columns_at(metadata: Any) -> dict[str, int]:
    return {metadata.schema.column(i).name: i for i in range(metadata.num_columns)}


def _groups_in(metadata: Any, at: Mapping[str, int], window_ns: Window | None) -> list[int]:
    """The row groups that may touch the window, by the footer's smallest and largest values."""
    groups = list(range(metadata.num_row_groups))
    if window_ns is None:
        return groups

    def span_of(group: int) -> tuple[int, int] | None:
        row_group = metadata.row_group(group)
        start = row_group.column(at["start_ns" if "start_ns" in at else "time_ns"]).statistics
        if start is None or not start.has_min_max:
            return None
        if "duration_ns" not in at:
            return start.min, start.max
        duration = row_group.column(at["duration_ns"]).statistics
        if duration is None or not duration.has_min_max:
            return None
        return start.min, start.max + duration.max

    spans = [span_of(group) for group in groups]
    return [
        group
        for group, span in zip(groups, spans, strict=True)
        if span is None or (span[0] < window_ns[1] and span[1] >= window_ns[0])
    ]


def _all_null(metadata: Any, at: int | None, groups: Sequence[int]) -> bool:
    """Whether a column is missing or has no value in these groups."""
    if at is None:
        return True
    for group in groups:
        row_group = metadata.row_group(group)
        statistics = row_group.column(at).statistics
        if statistics is None or statistics.null_count != row_group.num_rows:
            return False
    return True


def _read_groups(
    file: Any, path: Path, groups: Sequence[int], columns: list[str]
) -> tuple[pa.Table, list[Problem]]:
    """Read row groups at once; where one is corrupt, all the others."""
    try:
        return _sound(file.read_row_groups(groups, columns=columns)), []
    except (pa.ArrowException, OSError):
        pass
    tables, problems = [], []
    for group in groups:
        try:
            tables.append(_sound(file.read_row_groups([group], columns=columns)))
        except (pa.ArrowException, OSError) as error:
            rows = file.metadata.row_group(group).num_rows
            what = f"row group {group} is corrupt, its {rows:,} rows are lost: {error}"
            problems.append(Problem(str(path), what, _LOST))
    whole = pa.concat_tables(tables) if tables else file.schema_arrow.empty_table().select(columns)
    return whole, problems


def _sound(table: pa.Table) -> pa.Table:
    """The table, unless codes point outside their dictionary or a text is no UTF-8.

    Page checksums cover what pages hold but not their headers, which say how long a dictionary is,
    and not every writer makes them.
    """
    table.validate(full=True)
    return table


def _filter(table: pa.Table, columns: Mapping[str, Column], chosen: SpanFilter) -> pa.Table:
    """The rows that are wanted."""
    keep: npt.NDArray[np.bool_] | None = None
    if chosen.window_ns is not None and columns is SPAN_COLUMNS_BY_NAME:
        start, duration = (to_numpy(table, columns[n]) for n in ("start_ns", "duration_ns"))
        keep = overlaps_window(start, duration, chosen.window_ns)
    elif chosen.window_ns is not None:
        time = to_numpy(table, columns["time_ns"])
        keep = (time >= chosen.window_ns[0]) & (time < chosen.window_ns[1])
    if chosen.kinds is not None:
        of_kind = match_kinds(to_dictionary(table, columns["kind"]), chosen.kinds)
        keep = of_kind if keep is None else keep & of_kind
    return table if keep is None else table.filter(pa.array(keep))
