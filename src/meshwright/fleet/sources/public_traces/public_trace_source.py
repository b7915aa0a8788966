"""Opens a public trace and gives its rows."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.public_traces import (
    alibaba,
    job_lists,
    metric_series,
    pai,
    philly,
    training_log,
)
from meshwright.fleet.sources.public_traces.fault_log import FaultLog, find_odd_lines
from meshwright.fleet.sources.public_traces.mapped_jobs import (
    TIME_UNITS_S,
    define_mapped_format,
)
from meshwright.fleet.sources.public_traces.trace_files import TraceTable, find_tables, open_table
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    match_format,
)
from meshwright.fleet.sources.row_faults import MAX_FAULTY_FRACTION
from meshwright.fleet.sources.source import (
    ConflictRule,
    RowBatch,
    SourceOptions,
    abbreviate_names,
)
from meshwright.fleet.sources.time_text import parse_zone
from meshwright.fleet.tables import TABLE_SCHEMAS
from meshwright.spec.field_checks import check_number, raise_problems
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import parse_number

TRACE_FORMATS: Final[tuple[TraceFormat, ...]] = (
    *job_lists.TRACE_FORMATS,
    *philly.TRACE_FORMATS,
    *alibaba.TRACE_FORMATS,
    *pai.TRACE_FORMATS,
    *metric_series.TRACE_FORMATS,
)
PHILLY_JOB_FORMAT: Final = define_format("Philly jobs", "", None, "Philly")
PICKLED_CURVE_FORMAT: Final = define_format("pickled curves", "", None)
FIGURE_CURVE_FORMAT: Final = define_format("curves of figures", "", None)
_MOST_ROWS = 250_000
"""Rows of a batch."""
_CLAIMED_FILES = 8
"""Of a folder so many files are looked into before it is said to be none of ours."""
OPTIONS: Final = {
    "zone": "time zone of dates that do not say theirs, such as Europe/Berlin",
    "time-unit": "unit of plain numbers with --column: us, ms, s, min, h or d (default s)",
    "bad-rows": "share of rows that may be faulty and left out (default 0.1)",
}
"""What `--option NAME=VALUE` may say."""
_KNOWN = "Acme, Helios, Philly, Alibaba, Muri, Sia, Chronus, Zhejiang Lab"


class RecognizedTable(NamedTuple):
    """A part whose form is known."""

    table: TraceTable
    format: TraceFormat


def recognize_tables(where: Path) -> Iterator[RecognizedTable]:
    """Find the parts of known forms in a file or under a folder."""
    for part in find_tables(where):
        known = _form_of(part)
        if known is not None:
            yield known


def _form_of(part: TraceTable) -> RecognizedTable | None:
    if part.kind == "json":
        with open_table(part) as stream:
            head = stream.read(1 << 16)
        if philly.is_job_list(head):
            return RecognizedTable(part, PHILLY_JOB_FORMAT)
        return RecognizedTable(part, FIGURE_CURVE_FORMAT) if b"_cdf_pct" in head else None
    if part.kind == "pickle":
        return RecognizedTable(part, PICKLED_CURVE_FORMAT)
    if metric_series.is_wide_table(part):
        return RecognizedTable(part, metric_series.WIDE_TABLE_FORMAT)
    known = match_format(part, TRACE_FORMATS)
    if known is None:
        part = pai.add_header(part) if part.kind == "csv" else part
        known = match_format(part, TRACE_FORMATS) or (
            training_log.match_log_format(part) if part.kind == "csv" else None
        )
    return RecognizedTable(part, known) if known else None


def parse_cluster_name(part: TraceTable) -> str:
    """Return the cluster that a file is of: the first telling word of its name, or its folder."""
    words = [word for word in part.stem.split("_") if word.lower() not in _SAY_NOTHING]
    place = Path(part.member) if part.member and Path(part.member).parent.name else part.path
    name = words[0] if words else place.resolve().parent.name
    return name[:1].upper() + name[1:]


_SAY_NOTHING = frozenset(
    ("all", "cluster", "data", "gpu", "job", "jobs", "list", "log", "number", "table", "trace")
)


def matches(where: str) -> bool:
    """Say whether a path holds a public trace."""
    path = Path(where)
    if "://" in where or not path.exists():
        return False
    try:
        return any(_form_of(part) for part in islice(find_tables(path), _CLAIMED_FILES))
    except InputError:
        return False


def open_source(where: str, asked: SourceOptions) -> "PublicTraceSource":
    """Open a trace; say which are known where it is none of them."""
    path = Path(where)
    forms = partial(_form_as_mapped, asked=asked) if asked.columns else _form_of
    parts = [(part, forms(part)) for part in find_tables(path)]
    known = [one for _, one in parts if one is not None]
    found = [one for one in known if one.format.read_block or one.format.name in _JOINED]
    if not found and known:
        what = f"holds statistics ({known[0].format.name}), not telemetry"
        raise InputError([Problem(where, what, "compare them with ours by mw validate fleet")])
    if not found:
        what = "holds no public trace that is known here"
        raise InputError([Problem(where, what, f"known are those of {_KNOWN}")])
    read = {one.table.label for one in found}
    unread = tuple(part for part, _ in parts if part.label not in read and _is_table(part))
    return PublicTraceSource(path, asked, tuple(found), unread)


def _form_as_mapped(part: TraceTable, asked: SourceOptions) -> RecognizedTable | None:
    """Return a table as the list of jobs that `--column` makes of it."""
    if part.kind not in ("csv", "parquet"):
        return None
    unit = asked.kind_options.get("time-unit", "s")
    if unit not in TIME_UNITS_S:
        raise InputError(
            [build_unknown_name_problem("unit", unit, TIME_UNITS_S, "--option time-unit")]
        )
    if part.kind == "csv" and pai.add_header(part) != part:
        return None
    return RecognizedTable(part, define_mapped_format(part, asked.columns, unit))


def _is_table(part: TraceTable) -> bool:
    """Say whether a part is more than a text that lies beside the data."""
    return len(part.columns) > 1 and part.path.suffix not in (".md", ".rst", ".txt", "")


_JOINED = frozenset(
    {
        PHILLY_JOB_FORMAT.name,
        pai.JOB_FORMAT.name,
        pai.INSTANCE_FORMAT.name,
        training_log.LOG_FORMAT.name,
    }
)
"""Forms that take more than one block of one table to read."""


class PublicTraceSource:
    """The rows of a public trace."""

    conflict_rule = ConflictRule.REFUSE

    def __init__(
        self,
        where: Path,
        asked: SourceOptions,
        found: tuple[RecognizedTable, ...],
        unread: tuple[TraceTable, ...] = (),
    ) -> None:
        self._where, self._asked, self._unread = where, asked, unread
        self._zone, self._max_faulty = _read_options(where, asked, found)
        self._found = tuple(one for one in found if not self._repeats(one, found))
        self._left_out = [one for one in found if one not in self._found]
        self._several = Counter((one.format.name, one.table.path.parent) for one in found)

    @property
    def name(self) -> str:
        """What it is and where."""
        return f"public:{self._where.absolute()}"

    @staticmethod
    def _repeats(one: RecognizedTable, found: tuple[RecognizedTable, ...]) -> bool:
        """Say whether a list of nodes is part of another beside it, with other numbers for them."""
        if one.format.name != alibaba.NODES_2023:
            return False
        beside = [
            other.table for other in found
            if other.format == one.format and other.table.path.parent == one.table.path.parent
        ]  # fmt: skip
        return one.table != next((part for part in beside if "all" in part.stem), beside[0])

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give the rows part by part; a cursor has the parts that were read to their end."""
        done: dict[str, str] = json.loads(cursor) if cursor and cursor.startswith("{") else {}
        unread = (self._not_read(),) if self._unread else ()
        for one in self._found:
            state = one.table.path.stat()
            mark = f"{state.st_size} {state.st_mtime_ns}"
            if done.get(one.table.label) == mark:
                continue
            last: RowBatch | None = None
            skipped: list[int] = []
            log = FaultLog(self._max_faulty)
            for tables in self._tables(one, skipped, log):
                log.open(one.table).num_wrong_width = len(skipped)
                log.refuse_if_many()
                for table, whole in tables.items():
                    for rows in _pieces(self._within(table, whole)):
                        if last is not None:
                            yield last
                        last = RowBatch(table, rows)
            if last is None and one.table.kind in ("csv", "parquet") and _is_list(one):
                done[one.table.label] = mark
                empty, said = (
                    TABLE_SCHEMAS["jobs"].empty_table(),
                    f"no rows can be made of {one.table.label}",
                )
                yield RowBatch("jobs", empty, json.dumps(done), (said, *unread))
                unread = ()
            elif last is not None:
                left = f"{one.table.label}: {len(skipped):,} rows of a wrong width left out"
                if skipped:
                    lines = ", ".join(f"{line}" for line in find_odd_lines(one.table))
                    left += (
                        f" (lines {lines}{', …' if len(skipped) > lines.count(',') + 1 else ''})"
                    )
                again = [
                    f"{other.table.label} left out: its nodes are in {one.table.label} too, under "
                    "other names"
                    for other in self._left_out
                    if other.table.path.parent == one.table.path.parent
                    and one.format.name == alibaba.NODES_2023
                ]
                notes = (
                    f"read as {one.format.name}",
                    *([left] if skipped else []),
                    *log.take_notes(),
                    *again,
                    *unread,
                )
                unread = ()
                done[one.table.label] = mark
                yield last._replace(cursor=json.dumps(done), notes=notes)

    def _not_read(self) -> str:
        names = [part.member or part.path.name for part in self._unread]
        return f"left out, as no telemetry can be made of it: {abbreviate_names(names)}"

    def _tables(
        self, one: RecognizedTable, skipped: list[int], log: FaultLog
    ) -> Iterator[RowsByTable]:
        part, form = one.table, one.format
        told = ReadContext(
            self._cluster(one), part.path.stat().st_mtime, part, zone=self._zone, log=log
        )
        if form.name == PHILLY_JOB_FORMAT.name:
            yield philly.read_jobs(part, told)
        elif form.name == training_log.LOG_FORMAT.name:
            yield training_log.read_log(part, self._beside(training_log.POD_FORMAT), told)
        elif form.name == pai.JOB_FORMAT.name:
            beside = pai.JobMetadata(self._beside(pai.TAG_FORMAT), self._beside(pai.SENSOR_FORMAT))
            yield pai.read_jobs(part, self._other(pai.TASK_FORMAT), beside, told)
        elif form.name == pai.INSTANCE_FORMAT.name:
            yield from pai.read_allocations(
                part, pai.read_tasks(self._other(pai.TASK_FORMAT)), told
            )
        elif form.read_block is not None:
            blocks = part.iter_blocks(skipped=skipped)
            if form.needs_whole_table:
                whole = list(blocks)
                blocks = iter([pa.concat_tables(whole)] if whole else [])
            rows = 0
            for block in blocks:
                yield _read_block(form, block, told._replace(first_row=rows))
                rows += block.num_rows

    def _beside(self, wanted: TraceFormat) -> TraceTable | None:
        """Return another table of the same trace, where there is one."""
        folder = self._where if self._where.is_dir() else self._where.parent
        found = (one.table for one in recognize_tables(folder) if one.format.name == wanted.name)
        return next(found, None)

    def _other(self, wanted: TraceFormat) -> TraceTable:
        """Return the table that this one is joined with."""
        found = self._beside(wanted)
        if found is not None:
            return found
        what = f"needs the table of {wanted.name} beside it, which is not there"
        raise InputError([Problem(str(self._where), what, "put it into the same folder")])

    def _cluster(self, one: RecognizedTable) -> str:
        if self._asked.cluster or one.format.cluster:
            return self._asked.cluster or one.format.cluster
        if one.format.name in _NAMED:
            return parse_cluster_name(one.table)
        folder = one.table.path.resolve().parent.name
        many = self._several[one.format.name, one.table.path.parent] > 1
        # Each of several workloads in a folder numbers its jobs from nought. The one that others
        # were made from belongs to the nodes beside it.
        apart = many and one.format.name in _WORKLOADS and not one.table.stem.endswith("default")
        return f"{folder}/{one.table.stem}" if apart else folder

    def _within(self, table: str, rows: pa.Table) -> pa.Table:
        """Leave out what is not of the time that is asked for."""
        since, until = self._asked.since_s, self._asked.until_s
        begin, end = _TIMES.get(table, ("", ""))
        if not begin or (since is None and until is None):
            return rows
        kept = pa.array([True] * rows.num_rows)
        if until is not None:
            kept = pc.and_(kept, pc.fill_null(pc.less(rows[begin], until), True))
        if since is not None:
            kept = pc.and_(kept, pc.fill_null(pc.greater_equal(rows[end], since), True))
        return rows.filter(kept)


def _is_list(one: RecognizedTable) -> bool:
    """Say whether each file of a form has rows of its own: not all logs and metrics have."""
    return one.format.read_block is not None and not one.format.needs_whole_table


def _read_block(form: TraceFormat, rows: pa.Table, told: ReadContext) -> RowsByTable:
    """Make rows of a block, without those of faulty ones, which are counted."""
    assert form.read_block is not None
    block = told.open_block(rows, told.table)
    made = form.read_block(block, told)
    sound = {table: block.keep_sound_rows(table, whole) for table, whole in made.items()}
    block.faults.count_block(block.faulty)
    return sound


def _read_options(
    where: Path, asked: SourceOptions, found: tuple[RecognizedTable, ...]
) -> tuple[str, float]:
    """Return the zone of times without one, and which share of rows may be faulty."""
    options = asked.kind_options
    problems = [
        build_unknown_name_problem("option of public traces", name, OPTIONS, "--option")
        for name in options
        if name not in OPTIONS
    ]
    zone, share = options.get("zone", ""), options.get("bad-rows", "")
    if zone and not any(one.format.has_dates for one in found):
        forms = ", ".join(sorted({one.format.name for one in found}))
        what = f"{where} has no dates, to which a zone belongs ({forms})"
        problems.append(Problem("--option zone", what, "leave it out"))
    if "time-unit" in options and not asked.columns:
        what = "belongs to lists whose columns --column maps"
        problems.append(Problem("--option time-unit", what, "add --column gpus=NAME"))
    if problems:
        raise InputError(problems)
    if zone:
        parse_zone(zone)
    if not share:
        return zone, MAX_FAULTY_FRACTION
    fraction = parse_number(share, "--option bad-rows")
    raise_problems(check_number("--option bad-rows", fraction, 0.0, 1.0))
    return zone, fraction


def _pieces(rows: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into as many rows as a batch may have; of an empty one there is one."""
    for begin in range(0, max(rows.num_rows, 1), _MOST_ROWS):
        yield rows.slice(begin, _MOST_ROWS)


_TIMES: Final = {
    "jobs": ("submit_s", "end_s"),
    "allocations": ("start_s", "end_s"),
    "gpu_samples": ("time_s", "time_s"),
    "node_samples": ("time_s", "time_s"),
    "nodes": ("since_s", "until_s"),
}
_NAMED: Final = frozenset({"Helios jobs", "jobs", "GPUs by day"})
_WORKLOADS: Final = frozenset(
    {"Muri workload", "Muri run", "Sia workload", "Chronus workload", "Alibaba 2023 pods"}
)
