"""From a source into the store: rows are gathered, kept, and only then is the cursor moved on."""

import time
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from meshwright.fleet.sources.source import RowBatch, TelemetrySource
from meshwright.fleet.store import FleetStore, PutResult

ROWS_PER_PUT = 1_000_000
"""Rows gathered before they are kept: fewer make many small files, more need memory."""


class IngestResult(NamedTuple):
    """What reading a source brought."""

    source: str
    tables: dict[str, PutResult]
    notes: dict[str, int]
    """What the source remarked, and how often."""
    duration_s: float

    @property
    def total(self) -> PutResult:
        """What came of all tables together."""
        return sum(self.tables.values(), PutResult())


def ingest(
    store: FleetStore,
    source: TelemetrySource,
    *,
    from_start: bool = False,
    rows_at_once: int = ROWS_PER_PUT,
    progress: Callable[[IngestResult], None] | None = None,
) -> IngestResult:
    """Read a source from where it was left, and keep what it gives.

    With `from_start` it is read from its beginning. Where a source fails midway, what it gave until
    then is kept before its error goes on, so that the next reading begins there.
    """
    gathering = _Gathering(store, source.name, progress)
    try:
        for batch in source.read_batches(None if from_start else store.get_cursor(source.name)):
            gathering.take(batch)
            if gathering.rows >= rows_at_once:
                gathering.keep()
    except Exception:
        gathering.keep()
        raise
    gathering.keep()
    return gathering.ingested()


class _Gathering:
    def __init__(
        self, store: FleetStore, source: str, progress: Callable[[IngestResult], None] | None
    ) -> None:
        self._store, self._source, self._progress = store, source, progress
        self._waiting: dict[str, list[pa.Table]] = {}
        self._tables: dict[str, PutResult] = {}
        self._notes: dict[str, int] = {}
        self._cursor: str | None = None
        self._began_s = time.monotonic()
        self.rows = 0

    def take(self, batch: RowBatch) -> None:
        for note in batch.notes:
            self._notes[note] = self._notes.get(note, 0) + 1
        if batch.rows.num_rows:
            self._waiting.setdefault(batch.table, []).append(batch.rows)
            self.rows += batch.rows.num_rows
        if batch.cursor is not None:
            self._cursor = batch.cursor

    def keep(self) -> None:
        for table, waiting in self._waiting.items():
            put = self._store.put(table, pa.concat_tables(waiting))
            self._tables[table] = self._tables.get(table, PutResult()) + put
        self._waiting, self.rows = {}, 0
        # A cursor speaks for all rows before it, of whatever table: these are on disk now.
        if self._cursor is not None:
            self._store.set_cursor(self._source, self._cursor)
            self._cursor = None
        if self._progress:
            self._progress(self.ingested())

    def ingested(self) -> IngestResult:
        duration_s = time.monotonic() - self._began_s
        return IngestResult(self._source, dict(self._tables), dict(self._notes), duration_s)
