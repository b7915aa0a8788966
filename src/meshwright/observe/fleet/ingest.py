"""From a source into the store: rows are gathered, kept, and only then is the cursor moved on."""

import time
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from meshwright.observe.fleet.sources.source import Batch, Source
from meshwright.observe.fleet.store import Put, Store

ROWS_AT_ONCE = 1_000_000
"""Rows gathered before they are kept: fewer make many small files, more need memory."""


class Ingested(NamedTuple):
    """What reading a source brought."""

    source: str
    tables: dict[str, Put]
    notes: dict[str, int]
    """What the source remarked, and how often."""
    took_s: float

    @property
    def total(self) -> Put:
        """What came of all tables together."""
        return sum(self.tables.values(), Put())


def ingest(
    store: Store,
    source: Source,
    *,
    again: bool = False,
    rows_at_once: int = ROWS_AT_ONCE,
    progress: Callable[[Ingested], None] | None = None,
) -> Ingested:
    """Read a source from where it was left, and keep what it gives.

    With `again` it is read from its beginning. Where a source fails midway, what it gave until then
    is kept before its error goes on, so that the next reading begins there.
    """
    gathering = _Gathering(store, source.name, progress)
    try:
        for batch in source.batches(None if again else store.cursor(source.name)):
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
        self, store: Store, source: str, progress: Callable[[Ingested], None] | None
    ) -> None:
        self._store, self._source, self._progress = store, source, progress
        self._waiting: dict[str, list[pa.Table]] = {}
        self._tables: dict[str, Put] = {}
        self._notes: dict[str, int] = {}
        self._cursor: str | None = None
        self._began_s = time.monotonic()
        self.rows = 0

    def take(self, batch: Batch) -> None:
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
            self._tables[table] = self._tables.get(table, Put()) + put
        self._waiting, self.rows = {}, 0
        # A cursor speaks for all rows before it, of whatever table: these are on disk now.
        if self._cursor is not None:
            self._store.set_cursor(self._source, self._cursor)
            self._cursor = None
        if self._progress:
            self._progress(self.ingested())

    def ingested(self) -> Ingested:
        took_s = time.monotonic() - self._began_s
        return Ingested(self._source, dict(self._tables), dict(self._notes), took_s)
