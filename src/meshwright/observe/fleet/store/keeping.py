"""How long what is kept, and what is left of it after that."""

from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.store import parts, query
from meshwright.observe.fleet.store.catalog import Catalog
from meshwright.observe.fleet.store.layout import BUCKETS, DAY_S, HOUR_S, ROLLUPS, SCHEMAS, SPANS
from meshwright.observe.fleet.store.windows import combining_sql
from meshwright.observe.fleet.tables import TABLES


class Limits(NamedTuple):
    """For how many days each thing is kept; None: for ever."""

    samples: float | None = 14
    """Samples as they came; their five-minute windows stay."""
    windows: float | None = 120
    """Five-minute windows; their hours stay."""
    hours: float | None = None
    """Windows of an hour."""
    others: float | None = None
    """Jobs, nodes, events and the like, from their end on."""


class Kept(NamedTuple):
    """What was let go."""

    rows: dict[str, int]
    """Rows of each table that went."""
    files: int
    """Files deleted from disk; others follow once nobody can be reading them."""


def keep(catalog: Catalog, link: Any, limits: Limits, now_s: float) -> Kept:
    """Let go of what is older than its limit; only a writer may."""
    below = [name for name, days in limits._asdict().items() if days is not None and days < 0]
    if below:
        raise InputError([Problem(below[0], "days to keep are not negative", "use 0 or more")])
    if limits.windows is not None and (limits.samples is None or limits.samples > limits.windows):
        what = "samples would outlast the windows that are made of them"
        raise InputError([Problem("windows", what, "keep windows as long as samples, or longer")])
    keeping = _Keeping(catalog, link, now_s, {})
    for table, rollup in ROLLUPS.items():
        keeping.let_go(table, limits.samples)
        keeping.to_hours(table, limits.windows)
        keeping.let_go(rollup.hours, limits.hours)
    keeping.let_go("events", limits.others)
    for table in SPANS:
        keeping.forget(table, limits.others)
    return Kept(keeping.gone, catalog.sweep(everything=True))


class _Keeping(NamedTuple):
    catalog: Catalog
    link: Any
    now_s: float
    gone: dict[str, int]

    def before(self, table: str, days: float) -> int:
        """Return the time before which whole buckets go."""
        span = BUCKETS.get(table, DAY_S)
        return int((self.now_s - days * DAY_S) // span * span)

    def let_go(self, table: str, days: float | None) -> None:
        """Drop the buckets that are too old."""
        if days is None:
            return
        before = self.before(table, days)
        old = [part for part in self.catalog.parts(table) if part.bucket < before]
        horizon = max(self.catalog.horizon(table), before)
        self.catalog.replace(old, [], horizon={table: horizon})
        self.went(table, sum(part.rows for part in old))

    def to_hours(self, table: str, days: float | None) -> None:
        """Make hours of the windows that go, cluster by cluster and day by day."""
        if days is None:
            return
        name, hours = ROLLUPS[table].windows, ROLLUPS[table].hours
        before = self.before(table, days)
        old = [part for part in self.catalog.parts(name) if part.bucket < before]
        days_of: dict[tuple[str, int], list[parts.Part]] = {}
        for part in old:
            days_of.setdefault((part.cluster, part.bucket // DAY_S * DAY_S), []).append(part)
        for (cluster, bucket), mine in sorted(days_of.items()):
            files = query.files_sql(self.catalog.folder, mine)
            names = SCHEMAS[hours].names
            sql = f"{combining_sql(table, names, HOUR_S, files)} ORDER BY ALL"
            rows = query.asked(self.link, sql).cast(SCHEMAS[hours])
            part = parts.described(hours, cluster, bucket, rows)
            self.catalog.replace(mine, [parts.write(self.catalog.folder, part, rows)])
            self.went(name, sum(one.rows for one in mine))

    def forget(self, table: str, days: float | None) -> None:
        """Drop the rows that ended long ago."""
        if days is None:
            return
        before = self.now_s - days * DAY_S
        made, dropped, counts = [], [], {}
        for cluster in sorted({part.cluster for part in self.catalog.parts(table)}):
            there = self.catalog.parts(table, cluster)
            stays = self._staying(table, cluster, before)
            rows = sum(part.rows for part in there) - self.catalog.superseded(table, cluster)
            if stays.num_rows == rows:
                continue
            self.went(table, rows - stays.num_rows)
            turn = max(part.bucket for part in there) + 1
            if stays.num_rows:
                part = parts.described(table, cluster, turn, stays)
                made.append(parts.write(self.catalog.folder, part, stays))
            dropped += there
            counts[table, cluster] = 0
        horizon = {table: max(self.catalog.horizon(table), before)}
        self.catalog.replace(dropped, made, superseded=counts, horizon=horizon)

    def _staying(self, table: str, cluster: str, before: float) -> pa.Table:
        """Return the rows of a table that last until `before`; what has not ended, by its sight."""
        schema, last = TABLES[table], SPANS[table][1]
        holding = query.rows_sql(self.catalog, table, schema.names, cluster=cluster)
        stays = f"FROM ({holding}) WHERE coalesce({last}, seen_s, {before!r}) >= {before!r}"
        return query.asked(self.link, stays).cast(schema)

    def went(self, table: str, rows: int) -> None:
        """Note that rows went."""
        if rows:
            self.gone[table] = self.gone.get(table, 0) + rows
