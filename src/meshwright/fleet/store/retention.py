"""How long what is kept, and what is left of it after that."""

from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.fleet.store import data_file, query
from meshwright.fleet.store.manifest import Manifest
from meshwright.fleet.store.rollup import build_rollup_merge_sql
from meshwright.fleet.store.schema import (
    BUCKET_LENGTHS_S,
    DAY_S,
    HOUR_S,
    ROLLUPS,
    SCHEMAS,
    SPAN_COLUMNS,
)
from meshwright.fleet.tables import TABLE_SCHEMAS


class RetentionPolicy(NamedTuple):
    """For how many days each thing is kept; None: for ever."""

    samples: float | None = 14
    """Samples as they came; their five-minute windows stay."""
    rollups_5m: float | None = 120
    """Five-minute rollups; their one-hour rollups stay."""
    rollups_1h: float | None = None
    """One-hour rollups."""
    records: float | None = None
    """Jobs, nodes, events and the like, from their end on."""


class RetentionResult(NamedTuple):
    """What was let go."""

    deleted_rows: dict[str, int]
    """Rows of each table that went."""
    deleted_files: int
    """Files deleted from disk; others follow once nobody can be reading them."""


def apply_retention(
    manifest: Manifest, link: Any, limits: RetentionPolicy, now_s: float
) -> RetentionResult:
    """Let go of what is older than its limit; only a writer may."""
    below = [name for name, days in limits._asdict().items() if days is not None and days < 0]
    if below:
        raise InputError([Problem(below[0], "days to keep are not negative", "use 0 or more")])
    rollups = limits.rollups_5m
    if rollups is not None and (limits.samples is None or limits.samples > rollups):
        what = "samples would outlast the rollups that are made of them"
        fix = "keep rollups as long as samples, or longer"
        raise InputError([Problem("rollups_5m", what, fix)])
    keeping = _Keeping(manifest, link, now_s, {})
    for table, rollup in ROLLUPS.items():
        keeping.let_go(table, limits.samples)
        keeping.to_hours(table, limits.rollups_5m)
        keeping.let_go(rollup.table_1h, limits.rollups_1h)
    keeping.let_go("events", limits.records)
    for table in SPAN_COLUMNS:
        keeping.forget(table, limits.records)
    return RetentionResult(keeping.gone, manifest.delete_unlisted_files(everything=True))


class _Keeping(NamedTuple):
    manifest: Manifest
    link: Any
    now_s: float
    gone: dict[str, int]

    def before(self, table: str, days: float) -> int:
        """Return the time before which whole buckets go."""
        span = BUCKET_LENGTHS_S.get(table, DAY_S)
        return int((self.now_s - days * DAY_S) // span * span)

    def let_go(self, table: str, days: float | None) -> None:
        """Drop the buckets that are too old."""
        if days is None:
            return
        before = self.before(table, days)
        old = [part for part in self.manifest.list_files(table) if part.bucket < before]
        horizon = max(self.manifest.get_horizon(table), before)
        self.manifest.replace_files(old, [], horizon={table: horizon})
        self.went(table, sum(part.rows for part in old))

    def to_hours(self, table: str, days: float | None) -> None:
        """Make hours of the windows that go, cluster by cluster and day by day."""
        if days is None:
            return
        name, hours = ROLLUPS[table].table_5m, ROLLUPS[table].table_1h
        before = self.before(table, days)
        old = [part for part in self.manifest.list_files(name) if part.bucket < before]
        days_of: dict[tuple[str, int], list[data_file.DataFile]] = {}
        for part in old:
            days_of.setdefault((part.cluster, part.bucket // DAY_S * DAY_S), []).append(part)
        for (cluster, bucket), mine in sorted(days_of.items()):
            files = query.build_files_sql(self.manifest.folder, mine)
            names = SCHEMAS[hours].names
            sql = f"{build_rollup_merge_sql(table, names, HOUR_S, files)} ORDER BY ALL"
            rows = query.run_query(self.link, sql).cast(SCHEMAS[hours])
            part = data_file.describe_rows(hours, cluster, bucket, rows)
            self.manifest.replace_files(
                mine, [data_file.write_file(self.manifest.folder, part, rows)]
            )
            self.went(name, sum(one.rows for one in mine))

    def forget(self, table: str, days: float | None) -> None:
        """Drop the rows that ended long ago."""
        if days is None:
            return
        before = self.now_s - days * DAY_S
        made, dropped, counts = [], [], {}
        for cluster in sorted({part.cluster for part in self.manifest.list_files(table)}):
            there = self.manifest.list_files(table, cluster)
            stays = self._staying(table, cluster, before)
            rows = sum(part.rows for part in there) - self.manifest.count_superseded_rows(
                table, cluster
            )
            if stays.num_rows == rows:
                continue
            self.went(table, rows - stays.num_rows)
            turn = max(part.bucket for part in there) + 1
            if stays.num_rows:
                part = data_file.describe_rows(table, cluster, turn, stays)
                made.append(data_file.write_file(self.manifest.folder, part, stays))
            dropped += there
            counts[table, cluster] = 0
        horizon = {table: max(self.manifest.get_horizon(table), before)}
        self.manifest.replace_files(dropped, made, superseded=counts, horizon=horizon)

    def _staying(self, table: str, cluster: str, before: float) -> pa.Table:
        """Return the rows of a table that last until `before`; what has not ended, by its sight."""
        schema, last = TABLE_SCHEMAS[table], SPAN_COLUMNS[table][1]
        holding = query.build_rows_sql(self.manifest, table, schema.names, cluster=cluster)
        stays = f"FROM ({holding}) WHERE coalesce({last}, seen_s, {before!r}) >= {before!r}"
        return query.run_query(self.link, stays).cast(schema)

    def went(self, table: str, rows: int) -> None:
        """Note that rows went."""
        if rows:
            self.gone[table] = self.gone.get(table, 0) + rows
