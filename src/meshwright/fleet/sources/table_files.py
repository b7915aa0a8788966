"""Files that are laid out as our own tables: CSV or Parquet, named by the table they hold.

`jobs.csv`, `gpu_samples.parquet`, `gpu_samples-2026-11-16.csv.gz`: the name up to a dot or a dash
is that of the table. Columns may stand in any order and be missing, but those that name a row;
`cluster` may be given with `--cluster`. In CSV an empty field is unknown, and semicolons join a
list.
"""

import csv
import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from meshwright.errors import InputError, Problem
from meshwright.file_errors import require_plausible_rows
from meshwright.fleet.columns import to_floats
from meshwright.fleet.sources.csv_errors import (
    NULL_VALUES,
    TIME_COLUMNS,
    find_csv_errors,
    find_row_lines,
    open_text,
)
from meshwright.fleet.sources.job_checks import JobFault, find_job_faults
from meshwright.fleet.sources.row_faults import RowFaults
from meshwright.fleet.sources.source import (
    ConflictRule,
    RowBatch,
    SourceOptions,
    TelemetrySource,
    abbreviate_names,
    list_unread_files,
    make_rows,
)
from meshwright.fleet.sources.time_text import parse_times, parse_zone
from meshwright.fleet.store.schema import SPAN_COLUMNS
from meshwright.fleet.store.schema_check import list_required_columns
from meshwright.fleet.tables import FRACTION_METRICS, PRIMARY_KEYS, TABLE_SCHEMAS
from meshwright.spec.name_suggestions import build_unknown_name_problem

_ROWS = 262_144
_LOOKED_AT = 100
"""Rows whose moments are looked at to see whether they are written as dates."""
_MOST_SHARE = 1.01
"""Means of what is sampled unevenly come out a little above one."""
_CHECKED = ("submit_s", "start_s", "end_s", "gpus")
_NEVER_NEGATIVE = ("gpus", "gpu_fraction", "memory_used", "memory_total", "power_w", "cpus")
OPTIONS = {"zone": "time zone of dates that do not say theirs (default UTC)"}
"""What `--option NAME=VALUE` may say."""
_ENDINGS = (".csv", ".csv.gz", ".parquet")


def matches(where: str) -> bool:
    """Say whether a file is named and laid out as a table of ours, or a folder holds such files."""
    path = Path(where)
    if path.is_dir():
        return any(_is_ours(one) for one in _inside(path))
    return path.is_file() and _is_ours(path)


def open_source(where: str, asked: SourceOptions) -> TelemetrySource:
    """Open a file, or a folder of files."""
    path = Path(where)
    if not path.exists():
        raise InputError([Problem(where, "there is no such file or folder")])
    problems = [
        build_unknown_name_problem("option of our own tables", name, OPTIONS, "--option")
        for name in asked.kind_options
        if name not in OPTIONS
    ]
    if problems:
        raise InputError(problems)
    parse_zone(asked.kind_options.get("zone", "UTC"))
    files = _inside(path) if path.is_dir() else [path]
    named = [file for file in files if parse_table_name(file)]
    if not named:
        examples = "jobs.csv or gpu_samples-1.parquet"
        fix = f"name it after a table ({', '.join(TABLE_SCHEMAS)}), as {examples}"
        raise InputError([Problem(where, "holds no file that is named after a table", fix)])
    return TableFileSource(path.absolute(), named, asked)


class TableFileSource:
    """Files of rows; those that have not changed since are not read again."""

    conflict_rule = ConflictRule.REFUSE

    def __init__(self, place: Path, files: list[Path], asked: SourceOptions) -> None:
        self.name = f"tables {place}"
        self._files, self._asked = files, asked
        left = list_unread_files(place, files)
        self._notes = (
            (f"left out, not named after a table: {abbreviate_names(left)}",) if left else ()
        )

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give the rows of files that are new or have changed."""
        done: dict[str, str] = json.loads(cursor) if cursor else {}
        for file in self._files:
            state = file.stat()
            mark = f"{state.st_size} {state.st_mtime_ns}"
            if done.get(file.name) == mark:
                continue
            table = parse_table_name(file)
            first_row, faults = 0, RowFaults(str(file))
            for read in _read(file):
                _refuse_repeats(read, file)
                rows = self._with_moments(read, faults, first_row)
                made = self._wanted(table, rows, file, state.st_mtime)
                _refuse_faults(table, made, faults, first_row, file)
                first_row += rows.num_rows
                yield RowBatch(table, _of_the_time(table, made, self._asked))
            self._notes = (*self._notes, *faults.list_zone_notes())
            done[file.name] = mark
            yield RowBatch(table, TABLE_SCHEMAS[table].empty_table(), json.dumps(done), self._notes)
            self._notes = ()

    def _wanted(self, table: str, rows: pa.Table, file: Path, written_s: float) -> pa.Table:
        twice = sorted({name for name in rows.column_names if rows.column_names.count(name) > 1})
        if twice:
            what = f"has the column {', '.join(twice)} twice"
            raise InputError([Problem(str(file), what, "leave one of them out")])
        columns = {name: rows[name] for name in rows.column_names}
        for name, known in (("cluster", self._asked.cluster), ("seen_s", written_s)):
            if name in TABLE_SCHEMAS[table].names and name not in columns and known:
                columns[name] = pa.repeat(pa.scalar(known), rows.num_rows)
        missing = [key for key in PRIMARY_KEYS[table] if key not in columns]
        if missing:
            fix = "give --cluster NAME" if missing == ["cluster"] else "add these columns"
            if missing == ["since_s"]:
                fix = (
                    "add since_s: from when on it was so, seconds since 1970; 0 where nobody knows"
                )
            what = f"lacks {', '.join(missing)}, by which rows of {table} are told apart"
            raise InputError([Problem(str(file), what, fix)])
        try:
            made = make_rows(table, columns)
        except InputError as error:
            raise InputError(
                problem._replace(where=f"{file}: {problem.where}") for problem in error.problems
            ) from None
        except pa.ArrowException as error:
            raise InputError([Problem(str(file), str(error)[:300])]) from None
        if any(made[key].null_count for key in list_required_columns(table)) and (
            found := _faults(file)
        ):
            raise InputError(found)
        _check_shares(made, file)
        return made

    def _with_moments(self, rows: pa.Table, faults: RowFaults, first_row: int) -> pa.Table:
        """Return rows whose moments, where they are text, are seconds."""
        zone = self._asked.kind_options.get("zone", "")
        for name in TIME_COLUMNS.intersection(rows.column_names):
            column = rows[name].combine_chunks()
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.string())
            elif not pa.types.is_string(column.type):
                continue
            parsed = parse_times(column, zone or "UTC")
            strange = np.flatnonzero(column.is_valid().to_numpy(False) & ~parsed.is_known)
            if len(strange):
                first = column.take(pa.array(strange[:8])).to_pylist()
                what, fix = "is no time", "write 2026-11-01T08:00:00Z, or seconds since 1970 in UTC"
                faults.add(strange + first_row, name, first, what, fix)
            if parsed.without_zone.any():
                faults.note_zone(zone or "UTC", "" if zone else "as nothing says which")
            moments = pa.array(parsed.moments_s, from_pandas=True)
            rows = rows.set_column(rows.column_names.index(name), name, moments)
        return rows


def _refuse_faults(
    table: str, rows: pa.Table, faults: RowFaults, first_row: int, file: Path
) -> None:
    """Refuse a file with rows that cannot be: with a time before another, or less than no GPUs."""
    told = {name: to_floats(rows[name]) for name in _CHECKED if name in rows.column_names}
    wrong = []
    if table == "jobs":
        wrong = find_job_faults(*(told[name] for name in ("submit_s", "start_s", "end_s", "gpus")))
    elif table in SPAN_COLUMNS:
        first, last = (to_floats(rows[name]) for name in SPAN_COLUMNS[table])
        with np.errstate(invalid="ignore"):
            wrong.append(
                JobFault(SPAN_COLUMNS[table][1], last < first, "lies before the start", "")
            )
    with np.errstate(invalid="ignore"):
        for name in (*FRACTION_METRICS, *_NEVER_NEGATIVE):
            if name not in rows.column_names or (table == "jobs" and name == "gpus"):
                continue
            if (pc.min(rows[name]).as_py() or 0) < 0:
                below = to_floats(rows[name]) < 0
                wrong.append(JobFault(name, below, "is below 0", "write what it was, or nothing"))
    for fault in wrong:
        places = np.flatnonzero(fault.rows)
        if len(places):
            first_values = rows[fault.column].take(pa.array(places[:8])).to_pylist()
            faults.add(places + first_row, fault.column, first_values, fault.what, fault.fix)
    if problems := faults.list_problems(partial(find_row_lines, file)):
        raise InputError(problems)


def _refuse_repeats(rows: pa.Table, file: Path) -> None:
    names = rows.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        what = f"has {', '.join(twice[:3])} twice among its columns"
        raise InputError([Problem(str(file), what, "keep the one that is meant")])


def _check_shares(rows: pa.Table, file: Path) -> None:
    """Refuse percentages where shares are meant: they would all count as fully busy."""
    for name in FRACTION_METRICS:
        most = pc.max(rows[name]).as_py() if name in rows.column_names else None
        if most is not None and most > _MOST_SHARE:
            what = f"holds {most:g}, and is a share between 0 and 1"
            raise InputError([Problem(f"{file}: {name}", what, "divide percentages by 100")])


def _of_the_time(table: str, rows: pa.Table, asked: SourceOptions) -> pa.Table:
    first, last = SPAN_COLUMNS.get(table, ("time_s", "time_s"))
    if asked.since_s is not None:
        rows = rows.filter(pc.fill_null(pc.greater_equal(rows[last], asked.since_s), True))
    if asked.until_s is not None:
        rows = rows.filter(pc.fill_null(pc.less(rows[first], asked.until_s), True))
    return rows


def parse_table_name(file: Path) -> str:
    """Return the table that a file is named after; empty where there is none."""
    name = file.name.lower()
    if not name.endswith(_ENDINGS):
        return ""
    word = name.partition(".")[0].partition("-")[0]
    return word if word in TABLE_SCHEMAS else ""


def _inside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and parse_table_name(path))


def _is_ours(file: Path) -> bool:
    """Say whether a file has the columns that name a row, and no columns that are not ours."""
    table = parse_table_name(file)
    if not table:
        return False
    try:
        if file.suffix == ".parquet":
            names = set(pq.read_schema(file).names)
        else:
            with pcsv.open_csv(file) as reader:
                names = set(reader.schema.names)
    except (pa.ArrowException, OSError, UnicodeError):
        return False
    return set(PRIMARY_KEYS[table]) - {"cluster"} <= names <= set(TABLE_SCHEMAS[table].names)


def _read(file: Path) -> Iterator[pa.Table]:
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as parquet:
                require_plausible_rows(file, parquet.metadata)
                for batch in parquet.iter_batches(_ROWS):
                    yield pa.Table.from_batches([batch])
            return
        schema = TABLE_SCHEMAS[parse_table_name(file)]
        lists = [field.name for field in schema if pa.types.is_list(field.type)]
        kinds = {field.name: field.type for field in schema if field.name not in lists}
        kinds |= dict.fromkeys(_list_written_times(file), pa.string())
        convert = pcsv.ConvertOptions(
            column_types=kinds | dict.fromkeys(lists, pa.string()),
            strings_can_be_null=True,
            null_values=list(NULL_VALUES),
        )
        with pcsv.open_csv(file, convert_options=convert) as reader:
            for batch in reader:
                rows = pa.Table.from_batches([batch])
                for name in set(lists) & set(rows.column_names):
                    place = rows.schema.get_field_index(name)
                    rows = rows.set_column(place, name, pc.split_pattern(rows[name], ";"))
                yield rows
    except (pa.ArrowException, OSError, UnicodeError) as error:
        found = _faults(file) or [Problem(str(file), f"cannot read: {error}")]
        raise InputError(found) from None


def _list_written_times(file: Path) -> list[str]:
    """Return the columns of moments whose first values are dates, and no plain numbers."""
    with open_text(file) as stream:
        try:
            rows = list(islice(csv.DictReader(stream), _LOOKED_AT))
        except csv.Error:
            return []
    return [
        name
        for name in TIME_COLUMNS
        if any((row.get(name) or "").strip()[4:5] in ("-", "/") for row in rows)
    ]


def _faults(file: Path) -> list[Problem]:
    table = parse_table_name(file)
    return (
        []
        if file.suffix == ".parquet"
        else find_csv_errors(file, TABLE_SCHEMAS[table], list_required_columns(table))
    )
