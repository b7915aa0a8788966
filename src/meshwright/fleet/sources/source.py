"""What every source of telemetry offers: batches of rows of the shared tables, and where to go on.

A source lives in a package of its own, listed in `source_registry`, which has two functions:

    def matches(where: str) -> bool:
        "Say whether a path or URL looks like ours, without reading more than a few kilobytes."

    def open_source(where: str, asked: SourceOptions) -> TelemetrySource:
        "Open it; raise InputError where it cannot be read, MissingDependency where a package is
        missing."

Whoever ingests opens a source, hands every batch to the store, and keeps a batch's cursor only once
the rows before it are on disk. A reading that is broken off therefore begins again where rows were
last kept, and rows that come twice are one row.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.fleet.tables import TABLE_SCHEMAS


class Secret:
    """A token that does not show itself: not in a log, not in a traceback, not when pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the token, for the header of a request and for nothing else."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")


def _nobody(said: str) -> None:
    del said


class SourceOptions(NamedTuple):
    """What is asked of a source."""

    cluster: str = ""
    """Name of the cluster, for sources that do not tell it; empty: the source finds a name."""
    since_s: float | None = None
    """Rows before this moment are not wanted; None: as far back as there are any."""
    until_s: float | None = None
    """Rows from this moment on are not wanted; None: up to now."""
    sample_step_s: float = 30.0
    """How far samples are apart, where a source is asked for a series."""
    token: Secret = Secret("")
    """What goes behind `Authorization: Bearer`; never into a name, a cursor or a note."""
    ca_file: str = ""
    """Certificates to check a server against, in place of the system's."""
    kind_options: Mapping[str, str] = {}
    """What one kind of source alone understands, as `--option NAME=VALUE`."""
    on_progress: Callable[[str], None] = _nobody
    """Takes what somebody who waits should know at once, such as that a server does not answer."""
    columns: Mapping[str, str] = {}
    """Columns of a list of jobs by the names of ours, as `--column gpus=num_gpus`."""


class ConflictRule(Enum):
    """What becomes of jobs that differ from jobs of the same name which another source told."""

    REPLACE = "replace"
    """They hold: the source is asked again and again, and knows best."""
    REPORT = "report"
    """They hold, and it is reported."""
    REFUSE = "refuse"
    """They are refused: a list of jobs that is over does not change."""


class RowBatch(NamedTuple):
    """Rows of one table, and where to go on once they are kept."""

    table: str
    """A name of `tables.TABLES`."""
    rows: pa.Table
    """Rows in the schema of the table; make them with `make_rows` where columns are missing."""
    cursor: str | None = None
    """Text by which this source goes on after these rows; None: as before."""
    notes: tuple[str, ...] = ()
    """What was left out, guessed or tried again, each a sentence for people; repeats are merged."""


@runtime_checkable
class TelemetrySource(Protocol):
    """Something that telemetry is read from.

    It may have a `conflict_rule`; without one, jobs that it tells anew replace what is known.
    """

    @property
    def name(self) -> str:
        """What it is and where, without credentials; cursors are kept under this name."""
        ...

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give rows in batches of at most a few hundred thousand, going on from a cursor.

        `seen_s` is when the facts held: the time of the query, or when a file was written. A batch
        of `gpu_samples` should hold all metrics of its moments in one row each; rows that come
        apart are put together, but cost a second writing.
        """
        ...


def make_rows(table: str, columns: Mapping[str, object]) -> pa.Table:
    """Make rows of a table from some of its columns; the others are null.

    Columns are arrays, Arrow arrays or lists of one length, turned into the type of the table.
    """
    schema = TABLE_SCHEMAS[table]
    unknown = sorted(set(columns) - set(schema.names))
    if unknown:
        fix = f"columns of {table} are {', '.join(schema.names)}"
        raise InputError([Problem(name, f"is no column of {table}", fix) for name in unknown])
    arrays = {name: _typed(value, schema.field(name).type) for name, value in columns.items()}
    length = len(next(iter(arrays.values()))) if arrays else 0
    return pa.table(
        [arrays.get(field.name, pa.nulls(length, field.type)) for field in schema], schema=schema
    )


def _typed(values: Any, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    made = values
    if not isinstance(made, pa.Array | pa.ChunkedArray):
        # NumPy's NaN is what a source does not know.
        made = pa.array(values, from_pandas=True)
    return made if made.type == kind else made.cast(kind)


def abbreviate_names(names: Sequence[str]) -> str:
    """Name the first three of some files, and say how many there are where there are more."""
    more = f", … ({len(names):,} in all)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def list_unread_files(where: Path, read: Collection[Path]) -> list[str]:
    """Name the files of a folder that are not read; hidden ones and a README are left aside."""
    inside = sorted(where.iterdir()) if where.is_dir() else ()
    return [
        path.name
        for path in inside
        if path.is_file() and path not in read and not path.name.startswith((".", "README"))
    ]


def strip_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment, to show and to keep."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    place = f"{host}:{parts.port}" if parts.port else host
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", ""))
