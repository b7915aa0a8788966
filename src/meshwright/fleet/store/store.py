"""A fleet's telemetry in a folder: rows come as often and as late as they like, and count once."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.fleet.store import data_file, query, time_bucket
from meshwright.fleet.store.conflicts import JobConflicts, find_job_conflicts
from meshwright.fleet.store.data_file import DataFile
from meshwright.fleet.store.manifest import DELETION_GRACE_S, Manifest
from meshwright.fleet.store.retention import RetentionPolicy, RetentionResult, apply_retention
from meshwright.fleet.store.rollup import roll_up
from meshwright.fleet.store.row_versions import select_new_versions
from meshwright.fleet.store.schema import DAY_S, ROLLUPS, SCHEMAS, SPAN_COLUMNS
from meshwright.fleet.store.schema_check import conform_rows
from meshwright.fleet.tables import PRIMARY_KEYS, TABLE_SCHEMAS

MAX_FILES_PER_BUCKET = 8
"""Files of one bucket before small ones are made into one."""


class PutResult(NamedTuple):
    """What rows that were handed in brought."""

    new: int = 0
    """Rows of keys that were not known."""
    duplicates: int = 0
    """Rows that told nothing new: known already, or older than what is known."""
    updates: int = 0
    """Rows that changed a known one."""
    late: int = 0
    """Rows of a time that has been let go of; see `FleetStore.apply_retention`."""

    def __add__(self, other: object) -> "PutResult":
        if not isinstance(other, PutResult):
            return NotImplemented
        return PutResult(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class TableSize(NamedTuple):
    """How much of one table there is."""

    num_rows: int
    size_bytes: int
    first_s: float | None
    last_s: float | None
    """The last moment that any row names."""


class FleetStore:
    """Tables of `fleet.tables` in a folder, with roll-ups of samples.

    One process writes at a time, others wait; any number may read meanwhile. A store is for one
    thread.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        create: bool = False,
        memory_mib: int = query.MEMORY_LIMIT_MIB,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._manifest = Manifest(self.folder, create=create)
        self._memory_mib = memory_mib
        self._link: Any = None
        self._swept_s = float("-inf")

    def __enter__(self) -> "FleetStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        self._manifest.close()
        if self._link is not None:
            self._link.close()

    def put(self, table: str, rows: pa.Table) -> PutResult:
        """Keep rows of a table; when this returns they are on disk.

        Rows of one key count once. Of tables with `seen_s` the version seen last holds; of moments
        what several rows know is put together.
        """
        ready = conform_rows(table, rows)
        if not ready.num_rows:
            return PutResult()
        with self._manifest.lock_for_writing():
            self._sweep()
            if table in SPAN_COLUMNS:
                return self._put_versions(table, ready)
            horizon = self._manifest.get_horizon(table)
            kept = ready.filter(pc.greater_equal(ready["time_s"], horizon))
            total = PutResult(late=ready.num_rows - kept.num_rows)
            for cut in time_bucket.split_by_bucket(table, kept) if kept.num_rows else ():
                total += self._put_moments(table, cut)
            return total

    def _sweep(self) -> None:
        """Delete what was let go some time ago; at first also what a killed writer left."""
        now_s = time.monotonic()
        if now_s - self._swept_s > DELETION_GRACE_S:
            self._manifest.delete_unlisted_files(everything=self._swept_s == float("-inf"))
            self._swept_s = now_s

    def _put_moments(self, table: str, cut: time_bucket.BucketRows) -> PutResult:
        ready, learned = time_bucket.merge_rows(table, cut.rows, cut.bucket)
        described = data_file.describe_rows(table, cut.cluster, cut.bucket, ready)
        there = self._manifest.list_files(table, cut.cluster, cut.bucket)
        hit = self._sharing_keys(described, ready, there)
        if not hit and len(there) < MAX_FILES_PER_BUCKET:
            self._write_moments(table, cut._replace(rows=ready), [])
            return PutResult(ready.num_rows, cut.rows.num_rows - ready.num_rows - learned, learned)
        if not hit:
            hit = data_file.choose_compaction(there, ready.num_rows, MAX_FILES_PER_BUCKET)
        before = pa.concat_tables([data_file.read_file(self.folder, part) for part in hit])
        both = time_bucket.merge_rows(table, pa.concat_tables([before, ready]), cut.bucket)
        new = both.rows.num_rows - before.num_rows
        if new or both.num_updated_keys:
            self._write_moments(table, cut._replace(rows=both.rows), hit)
        return PutResult(
            new, cut.rows.num_rows - new - both.num_updated_keys, both.num_updated_keys
        )

    def _sharing_keys(
        self, mine: DataFile, rows: pa.Table, there: Iterable[DataFile]
    ) -> list[DataFile]:
        """Return the files of a bucket that have a key of these rows."""
        near = [part for part in there if part.may_overlap(mine)]
        if not near:
            return []
        names = list(PRIMARY_KEYS[mine.table])
        known = [data_file.read_file(self.folder, part, names) for part in near]
        numbers = time_bucket.rank_keys(
            mine.table, pa.concat_tables([rows.select(names), *known]), mine.bucket
        )
        own, end, found = numbers[: rows.num_rows], rows.num_rows, []
        for part in near:
            begin, end = end, end + part.rows
            if time_bucket.intersects(own, numbers[begin:end]):
                found.append(part)
        return found

    def _write_moments(
        self, table: str, cut: time_bucket.BucketRows, replaced: list[DataFile]
    ) -> None:
        part = data_file.describe_rows(table, cut.cluster, cut.bucket, cut.rows)
        dropped = [*replaced, *self._manifest.find_rollup_files([one.file for one in replaced])]
        if table not in ROLLUPS:
            self._manifest.replace_files(
                dropped, [data_file.write_file(self.folder, part, cut.rows)]
            )
            return
        # Arrow lets others run while it encodes, so the roll-up is made meanwhile.
        with ThreadPoolExecutor(1) as other:
            writing = other.submit(data_file.write_file, self.folder, part, cut.rows)
            windows = roll_up(table, cut.rows)
            name = ROLLUPS[table].table_5m
            rolled = data_file.describe_rows(name, cut.cluster, cut.bucket, windows)
            rolled = data_file.write_file(self.folder, rolled, windows)
            written = writing.result()
        self._manifest.replace_files(dropped, [written, rolled._replace(rollup_of=written.file)])

    def _put_versions(self, table: str, rows: pa.Table) -> PutResult:
        total = PutResult()
        horizon = self._manifest.get_horizon(table)
        for cluster in pc.unique(rows["cluster"]).to_pylist():
            mine = rows.filter(pc.equal(rows["cluster"], cluster))
            # What had not ended may have been let go since, so it counts by when it was seen.
            last = pc.coalesce(mine[SPAN_COLUMNS[table][1]], mine["seen_s"])
            kept = mine.filter(pc.fill_null(pc.greater_equal(last, horizon), fill_value=True))
            known = query.build_rows_sql(
                self._manifest, table, TABLE_SCHEMAS[table].names, cluster=cluster
            )
            found = select_new_versions(self._duckdb(), table, kept, known)
            if found.new_rows.num_rows:
                self._write_versions(table, cluster, found.new_rows, found.updates)
            total += PutResult(
                found.new, found.duplicates, found.updates, mine.num_rows - kept.num_rows
            )
        return total

    def _write_versions(self, table: str, cluster: str, rows: pa.Table, newer: int) -> None:
        there = self._manifest.list_files(table, cluster)
        turn = max((part.bucket for part in there), default=0) + 1
        part = data_file.describe_rows(table, cluster, turn, rows)
        old = self._manifest.count_superseded_rows(table, cluster) + newer
        written = data_file.write_file(self.folder, part, rows)
        self._manifest.replace_files([], [written], superseded={(table, cluster): old})
        there.append(written)
        if 4 * old > sum(one.rows for one in there):
            self._merge_versions(there, old)
        elif len(there) > MAX_FILES_PER_BUCKET:
            self._merge_versions(data_file.choose_tail_compaction(there, MAX_FILES_PER_BUCKET), old)

    def _merge_versions(self, merged: list[DataFile], superseded: int) -> None:
        """Make the last files of a table that lasts one, of what holds among them."""
        if len(merged) < 2:
            return
        table, cluster, turn = merged[-1].table, merged[-1].cluster, merged[-1].bucket
        rows = query.build_latest_rows_sql(self.folder, table, TABLE_SCHEMAS[table].names, merged)
        order = ", ".join((SPAN_COLUMNS[table][0], *PRIMARY_KEYS[table]))
        holds = query.run_query(self._duckdb(), f"FROM ({rows}) ORDER BY {order}").cast(
            TABLE_SCHEMAS[table]
        )
        part = data_file.describe_rows(table, cluster, turn, holds)
        left = superseded - (sum(one.rows for one in merged) - holds.num_rows)
        written = data_file.write_file(self.folder, part, holds)
        self._manifest.replace_files(merged, [written], superseded={(table, cluster): left})

    def read_table(
        self,
        name: str,
        columns: Iterable[str] | None = None,
        since_s: float | None = None,
        until_s: float | None = None,
        where: str | None = None,
    ) -> pa.Table:
        """Return rows of a table or roll-up, in no order.

        Of `since_s` up to `until_s`: moments that lie there, windows that begin there, and what
        lasts where any part of it does. `where` is a condition in SQL.
        """
        names = query.require_columns(name, columns)
        text = query.build_table_sql(
            self._manifest, name, names, since_s=since_s, until_s=until_s, where=where
        )
        found = query.run_query(self._duckdb(), text)
        schema = pa.schema([SCHEMAS[name].field(one) for one in names])
        return found if found.schema.equals(schema) else found.cast(schema)

    def iter_days(
        self,
        name: str,
        columns: Iterable[str] | None = None,
        since_s: float | None = None,
        until_s: float | None = None,
        where: str | None = None,
    ) -> Iterator[pa.Table]:
        """Yield moments or windows day by day, for whoever must not hold all of them."""
        names = query.require_columns(name, columns)
        if name in SPAN_COLUMNS:
            raise InputError([Problem(name, "has no days: its rows last", "use read_table")])
        found = sorted({part.bucket // DAY_S for part in self._manifest.list_files(name)})
        for day in found:
            first, last = day * DAY_S, (day + 1) * DAY_S
            low = first if since_s is None else max(since_s, first)
            high = last if until_s is None else min(until_s, last)
            if low < high:
                yield self.read_table(name, names, low, high, where)

    def sql(self, text: str) -> pa.Table:
        """Return the answer to a query over the tables, which are views of DuckDB."""
        link = self._duckdb()
        query.create_views(self._manifest, link, text)
        return query.run_query(link, text)

    def table_sizes(self) -> dict[str, TableSize]:
        """Return how much there is of each table, without reading any of it."""
        found = {}
        for name in SCHEMAS:
            listed = self._manifest.list_files(name)
            firsts = [part.first_s for part in listed if part.first_s > float("-inf")]
            lasts = [part.known_s for part in listed if part.known_s > float("-inf")]
            rows = sum(part.rows for part in listed) - self._manifest.count_superseded_rows(name)
            size = sum(part.size_bytes for part in listed)
            found[name] = TableSize(rows, size, min(firsts, default=None), max(lasts, default=None))
        return found

    def list_clusters(self) -> tuple[str, ...]:
        """Return the clusters that anything is known of."""
        return tuple(
            sorted({part.cluster for name in SCHEMAS for part in self._manifest.list_files(name)})
        )

    def find_job_conflicts(self, rows: pa.Table) -> dict[str, JobConflicts]:
        """Return, by cluster, the jobs that differ from a job of the same name; see `conflicts`."""
        found = {}
        for cluster in pc.unique(rows["cluster"]).to_pylist():
            mine = rows.filter(pc.equal(rows["cluster"], cluster))
            names = ("cluster", "job", "attempt", "submit_s", "start_s", "end_s")
            known = query.build_rows_sql(self._manifest, "jobs", names, cluster=cluster)
            conflicts = find_job_conflicts(self._duckdb(), mine.select(names), known)
            if conflicts.num_jobs:
                found[cluster] = conflicts
        return found

    def add_contribution(self, source: str, cluster: str) -> None:
        """Remember that a source told jobs of a cluster."""
        self._manifest.add_contribution(source, cluster)

    def list_contributors(self, cluster: str) -> list[str]:
        """Return the sources that told jobs of a cluster."""
        return self._manifest.list_contributors(cluster)

    def get_cursor(self, source: str) -> str | None:
        """Return where a source is to be read on, as it was last kept."""
        return self._manifest.get_cursor(source)

    def set_cursor(self, source: str, text: str) -> None:
        """Keep where a source is to be read on, once its rows are kept."""
        self._manifest.set_cursor(source, text)

    def apply_retention(
        self, limits: RetentionPolicy, now_s: float | None = None
    ) -> RetentionResult:
        """Let go of what is older than its limit: samples leave windows, windows leave hours."""
        with self._manifest.lock_for_writing():
            return apply_retention(
                self._manifest, self._duckdb(), limits, time.time() if now_s is None else now_s
            )

    def _duckdb(self) -> Any:
        if self._link is None:
            self._link = query.connect(self.folder, self._memory_mib)
        return self._link
