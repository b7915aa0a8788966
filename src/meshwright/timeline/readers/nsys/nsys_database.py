"""Opens an SQLite export of Nsight Systems and hands out the columns of its known tables.

The file is not trusted. It is opened read-only; nothing but SELECT on the tables of `TABLES` is
allowed, so neither its views, triggers and generated columns nor the environment of the profiled
process, which Nsight stores in META_DATA_CAPTURE and TARGET_INFO_SYSTEM_ENV, is ever touched.
A file cannot have more rows than its bytes can hold, however its pages refer to each other.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.timeline.readers.parsing.compressed_file import TextChunks

CHUNK_ROWS = 1 << 12
"""What fits into the processor's cache; 16 times as many take a quarter longer."""
MAX_TEXT_CHARS = 4096
"""Longer names are cut."""
MAX_DECOMPRESSED_BYTES = 64 << 30
_SPARE_DISK_BYTES = 1 << 30
_VALUE_LIMIT_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_LEAST_ROW_BYTES = 8
_MAGIC = b"SQLite format 3\0"
SQLITE_ERRORS = (sqlite3.Error, sqlite3.Warning, MemoryError, OverflowError, UnicodeError)
"""What SQLite raises of a damaged file; it says "out of memory" where a size is corrupt."""
_FUNCTIONS = frozenset({"ifnull", "substr", "printf", "format"})
KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, GRAPH, EVENT = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in (
        "KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "GRAPH_TRACE", "CUDA_EVENT",
    )
)  # fmt: skip
TABLES = frozenset({
    KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, GRAPH, EVENT, "CUPTI_ACTIVITY_KIND_DRIVER",
    "NVTX_EVENTS", "PROFILER_OVERHEAD", "StringIds", "PROCESSES", "ThreadNames",
    "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE", "TARGET_INFO_SESSION_START_TIME",
    "ANALYSIS_DETAILS", "META_DATA_EXPORT", "EXPORT_META_DATA",
})  # fmt: skip


class NotAnNsysExport(Exception):
    """The file is no database, or none of Nsight Systems."""


def build_integer_sql(column: str) -> str:
    """The SQL of a whole number; -1 where there is none."""
    return f'CAST(IFNULL("{column}", -1) AS INTEGER)'


def build_text_sql(column: str) -> str:
    """The SQL of a text of bounded length, which comes as bytes, or None."""
    return f'substr(CAST("{column}" AS TEXT), 1, {MAX_TEXT_CHARS})'


def decode_text(given: object) -> str:
    """A text of the database; what is no UTF-8 in it is replaced."""
    return given.decode(errors="replace") if isinstance(given, bytes) else ""


class NsysDatabase:
    """The known tables of an export."""

    def __init__(self, path: Path) -> None:
        with convert_os_errors(path, "read"), path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise NotAnNsysExport("is no SQLite database")
            size_bytes = path.stat().st_size
        self.rows_left = size_bytes // _LEAST_ROW_BYTES + 1000
        self.columns: dict[str, frozenset[str]] = {}
        """The columns of each known table that there is."""
        self.unknown_tables: frozenset[str] = frozenset()
        """Names of tables that are not known."""
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        self.error = ""
        try:
            try:
                self._find_tables()
            except SQLITE_ERRORS as error:
                # SQLite refuses a file that is shorter than it says, unless it is asked to
                # overlook that: the tables before the end can still be read.
                self.error = str(error)
                self._connection.execute("PRAGMA writable_schema=ON").fetchall()
                self._find_tables()
        except SQLITE_ERRORS as error:
            self.close()
            raise NotAnNsysExport(f"is no SQLite database that can be read: {error}") from None

    def _find_tables(self) -> None:
        connection = self._connection
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_LIMIT_BYTES)
        connection.text_factory = bytes
        for setting in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            connection.execute(f"PRAGMA {setting}").fetchall()
        # A virtual table has no page of its own: its rows come from code, not from the file.
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0 "
            "AND sql LIKE 'CREATE TABLE %' LIMIT 10000"
        ).fetchall()
        names = {decode_text(name) for (name,) in found}
        self.unknown_tables = frozenset(names - TABLES)
        for table in sorted(names & TABLES):
            # Generated columns are not among these.
            rows = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
            self.columns[table] = frozenset(decode_text(row[1]) for row in rows)
        connection.set_authorizer(self._allowed)

    def _allowed(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        fine = (
            action == sqlite3.SQLITE_SELECT
            or (action == sqlite3.SQLITE_READ and first in self.columns)
            or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY

    def has_columns(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with these columns."""
        return table in self.columns and self.columns[table].issuperset(columns)

    def build_integer_sql(self, table: str, column: str) -> str:
        """The SQL of a column of whole numbers; -1 throughout where the table lacks it."""
        return build_integer_sql(column) if self.has_columns(table, column) else "-1"

    def build_coalesce_sql(self, table: str, *columns: str) -> str:
        """The SQL of the first of some columns of whole numbers that a row has; -1 for none."""
        there = [f'"{column}"' for column in columns if self.has_columns(table, column)]
        found = "-1"
        for column in reversed(there):
            found = f"IFNULL({column}, {found})"
        return f"CAST({found} AS INTEGER)"

    def is_text_column(self, table: str, column: str) -> bool:
        """Whether a column has texts themselves, where other versions have their ids."""
        found: list[tuple[Any, ...]] = []
        with suppress(*SQLITE_ERRORS):
            if self.has_columns(table, column):
                select = f'SELECT "{column}" FROM "{table}" LIMIT 8'
                found = self._connection.execute(select).fetchall()
        return any(isinstance(value, bytes) for (value,) in found)

    def build_text_sql(self, table: str, column: str) -> str:
        """The SQL of a column of texts; none where the table lacks it."""
        return build_text_sql(column) if self.has_columns(table, column) else "NULL"

    def iter_chunks(self, table: str, *columns: str) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a table in pieces, each as one tuple per column; nothing where it is not."""
        if table not in self.columns:
            return
        cursor = self._connection.execute(f'SELECT {", ".join(columns)} FROM "{table}"')
        while rows := cursor.fetchmany(CHUNK_ROWS):
            self.rows_left -= len(rows)
            if self.rows_left < 0:
                raise sqlite3.DatabaseError("it has more rows than its bytes can hold")
            yield list(zip(*rows, strict=True))

    def read_rows(self, table: str, *columns: str, most: int) -> list[tuple[Any, ...]]:
        """The first rows of a small table; as many as can be read where it is damaged."""
        found: list[tuple[Any, ...]] = []
        with suppress(*SQLITE_ERRORS):
            for piece in self.iter_chunks(table, *columns):
                found += zip(*piece, strict=True)
                if len(found) >= most:
                    break
        return found[:most]

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[Path, str]]:
    """The file, or what is packed in it as a file for as long as this lasts; and a fault in it."""
    with convert_os_errors(path, "read"), path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if not packed:
        yield path, ""
        return
    source = TextChunks(path, _CHUNK_BYTES)
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free - _SPARE_DISK_BYTES
    limit = min(MAX_DECOMPRESSED_BYTES, free_bytes)
    with tempfile.NamedTemporaryFile(prefix="meshwright-", suffix=".sqlite") as whole:
        place, written = Path(whole.name), 0
        for chunk in source:
            written += len(chunk)
            if written > limit:
                what = f"is larger than {limit:,} bytes when unpacked"
                raise InputError([Problem(str(path), what, "unpack it and give the .sqlite file")])
            with convert_os_errors(place, "write"):
                whole.write(chunk)
        with convert_os_errors(place, "write"):
            whole.flush()
        yield place, source.error
