"""From a source into the store: rows are gathered, kept, and only then is the cursor moved on."""

import time
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.source import (
    ConflictRule,
    RowBatch,
    TelemetrySource,
    abbreviate_names,
)
from meshwright.fleet.store import FleetStore, PutResult
from meshwright.fleet.store.conflicts import JobConflicts

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
    replace: bool = False,
) -> IngestResult:
    """Read a source from where it was left, and keep what it gives.

    A file that is read for the first time may not change jobs that another told; `replace` lets it.

    With `from_start` it is read from its beginning. Where a source fails midway, what it gave until
    then is kept before its error goes on, so that the next reading begins there.
    """
    cursor = store.get_cursor(source.name)
    rule = getattr(source, "conflict_rule", ConflictRule.REPLACE)
    if replace or cursor is not None:  # A newer version of the same file.
        rule = ConflictRule.REPLACE
    gathering = _Gathering(store, source.name, progress, rule)
    try:
        for batch in source.read_batches(None if from_start else cursor):
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
        self,
        store: FleetStore,
        source: str,
        progress: Callable[[IngestResult], None] | None,
        rule: ConflictRule,
    ) -> None:
        self._store, self._source, self._progress = store, source, progress
        self._rule = rule
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
        waiting, self._waiting, self.rows = self._waiting, {}, 0
        if "jobs" in waiting:
            self._check_conflicts(pa.concat_tables(waiting["jobs"]))
        for table, parts in waiting.items():
            put = self._store.put(table, pa.concat_tables(parts))
            self._tables[table] = self._tables.get(table, PutResult()) + put
        # A cursor speaks for all rows before it, of whatever table: these are on disk now.
        if self._cursor is not None:
            self._store.set_cursor(self._source, self._cursor)
            self._cursor = None
        if self._progress:
            self._progress(self.ingested())

    def _check_conflicts(self, jobs: pa.Table) -> None:
        """Refuse or report jobs that another file tells with other times."""
        conflicts = {}
        if self._rule is not ConflictRule.REPLACE:
            conflicts = self._store.find_job_conflicts(jobs)
        problems = [
            self._describe(cluster, one, jobs.num_rows) for cluster, one in conflicts.items()
        ]
        if problems and self._rule is ConflictRule.REFUSE:
            self._cursor = None
            raise InputError(problems)
        for problem in problems:
            self._notes[str(problem)] = self._notes.get(str(problem), 0) + 1
        for cluster in pc.unique(jobs["cluster"]).to_pylist():
            self._store.add_contribution(self._source, cluster)

    def _describe(self, cluster: str, found: JobConflicts, num_rows: int) -> Problem:
        others = [one for one in self._store.list_contributors(cluster) if one != self._source]
        told = f"those of {abbreviate_names(others)}" if others else "others of it"
        names = ", ".join(found.examples) + (", …" if found.num_jobs > len(found.examples) else "")
        what = (
            f"{found.num_jobs:,} of its {num_rows:,} jobs (such as {names}) have the names of "
            f"other jobs of cluster {cluster!r}: their times are not {told}"
        )
        fix = (
            "give each file its own --cluster NAME, or name the folder that holds both; --replace "
            "keeps the later ones"
        )
        return Problem(self._source, what, fix)

    def ingested(self) -> IngestResult:
        duration_s = time.monotonic() - self._began_s
        return IngestResult(self._source, dict(self._tables), dict(self._notes), duration_s)
