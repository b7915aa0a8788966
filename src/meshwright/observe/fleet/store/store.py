"""A fleet's telemetry in a folder: rows come as often and as late as they like, and count once."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.store import moments, parts, query
from meshwright.observe.fleet.store.catalog import GRACE_S, Catalog
from meshwright.observe.fleet.store.conforming import conformed
from meshwright.observe.fleet.store.keeping import Kept, Limits, keep
from meshwright.observe.fleet.store.layout import DAY_S, ROLLUPS, SCHEMAS, SPANS
from meshwright.observe.fleet.store.parts import Part
from meshwright.observe.fleet.store.versions import sort_out
from meshwright.observe.fleet.store.windows import rolled_up
from meshwright.observe.fleet.tables import KEYS, TABLES

MOST_PARTS = 8
"""Files of one bucket before small ones are made into one."""


class Put(NamedTuple):
    """What rows that were handed in brought."""

    new: int = 0
    """Rows of keys that were not known."""
    same: int = 0
    """Rows that told nothing new: known already, or older than what is known."""
    newer: int = 0
    """Rows that changed a known one."""
    late: int = 0
    """Rows of a time that has been let go of; see `Store.keep`."""

    def __add__(self, other: object) -> "Put":
        if not isinstance(other, Put):
            return NotImplemented
        return Put(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Held(NamedTuple):
    """How much of one table there is."""

    rows: int
    size: int
    first_s: float | None
    last_s: float | None
    """The last moment that any row names."""


class Store:
    """Tables of `fleet.tables` in a folder, with roll-ups of samples.

    One process writes at a time, others wait; any number may read meanwhile. A store is for one
    thread.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        create: bool = False,
        memory_mib: int = query.MEMORY_MIB,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._catalog = Catalog(self.folder, create=create)
        self._memory_mib = memory_mib
        self._link: Any = None
        self._swept_s = float("-inf")

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        self._catalog.close()
        if self._link is not None:
            self._link.close()

    def put(self, table: str, rows: pa.Table) -> Put:
        """Keep rows of a table; when this returns they are on disk.

        Rows of one key count once. Of tables with `seen_s` the version seen last holds; of moments
        what several rows know is put together.
        """
        ready = conformed(table, rows)
        if not ready.num_rows:
            return Put()
        with self._catalog.writer():
            self._sweep()
            if table in SPANS:
                return self._put_versions(table, ready)
            horizon = self._catalog.horizon(table)
            kept = ready.filter(pc.greater_equal(ready["time_s"], horizon))
            total = Put(late=ready.num_rows - kept.num_rows)
            for cut in moments.cuts(table, kept) if kept.num_rows else ():
                total += self._put_moments(table, cut)
            return total

    def _sweep(self) -> None:
        """Delete what was let go some time ago; at first also what a killed writer left."""
        now_s = time.monotonic()
        if now_s - self._swept_s > GRACE_S:
            self._catalog.sweep(everything=self._swept_s == float("-inf"))
            self._swept_s = now_s

    def _put_moments(self, table: str, cut: moments.Cut) -> Put:
        ready, learned = moments.merged(table, cut.rows, cut.bucket)
        described = parts.described(table, cut.cluster, cut.bucket, ready)
        there = self._catalog.parts(table, cut.cluster, cut.bucket)
        hit = self._sharing_keys(described, ready, there)
        if not hit and len(there) < MOST_PARTS:
            self._write_moments(table, cut._replace(rows=ready), [])
            return Put(ready.num_rows, cut.rows.num_rows - ready.num_rows - learned, learned)
        if not hit:
            hit = parts.worth_merging(there, ready.num_rows, MOST_PARTS)
        before = pa.concat_tables([parts.read(self.folder, part) for part in hit])
        both = moments.merged(table, pa.concat_tables([before, ready]), cut.bucket)
        new = both.rows.num_rows - before.num_rows
        if new or both.changed:
            self._write_moments(table, cut._replace(rows=both.rows), hit)
        return Put(new, cut.rows.num_rows - new - both.changed, both.changed)

    def _sharing_keys(self, mine: Part, rows: pa.Table, there: Iterable[Part]) -> list[Part]:
        """Return the files of a bucket that have a key of these rows."""
        near = [part for part in there if part.meets(mine)]
        if not near:
            return []
        names = list(KEYS[mine.table])
        known = [parts.read(self.folder, part, names) for part in near]
        numbers = moments.keys(
            mine.table, pa.concat_tables([rows.select(names), *known]), mine.bucket
        )
        own, end, found = numbers[: rows.num_rows], rows.num_rows, []
        for part in near:
            begin, end = end, end + part.rows
            if moments.any_of(own, numbers[begin:end]):
                found.append(part)
        return found

    def _write_moments(self, table: str, cut: moments.Cut, replaced: list[Part]) -> None:
        part = parts.described(table, cut.cluster, cut.bucket, cut.rows)
        dropped = [*replaced, *self._catalog.rolled_up_from([one.file for one in replaced])]
        if table not in ROLLUPS:
            self._catalog.replace(dropped, [parts.write(self.folder, part, cut.rows)])
            return
        # Arrow lets others run while it encodes, so the roll-up is made meanwhile.
        with ThreadPoolExecutor(1) as other:
            writing = other.submit(parts.write, self.folder, part, cut.rows)
            windows = rolled_up(table, cut.rows)
            name = ROLLUPS[table].windows
            rolled = parts.described(name, cut.cluster, cut.bucket, windows)
            rolled = parts.write(self.folder, rolled, windows)
            written = writing.result()
        self._catalog.replace(dropped, [written, rolled._replace(of=written.file)])

    def _put_versions(self, table: str, rows: pa.Table) -> Put:
        total = Put()
        horizon = self._catalog.horizon(table)
        for cluster in pc.unique(rows["cluster"]).to_pylist():
            mine = rows.filter(pc.equal(rows["cluster"], cluster))
            # What had not ended may have been let go since, so it counts by when it was seen.
            last = pc.coalesce(mine[SPANS[table][1]], mine["seen_s"])
            kept = mine.filter(pc.fill_null(pc.greater_equal(last, horizon), fill_value=True))
            known = query.rows_sql(self._catalog, table, TABLES[table].names, cluster=cluster)
            found = sort_out(self._duckdb(), table, kept, known)
            if found.kept.num_rows:
                self._write_versions(table, cluster, found.kept, found.newer)
            total += Put(found.new, found.same, found.newer, mine.num_rows - kept.num_rows)
        return total

    def _write_versions(self, table: str, cluster: str, rows: pa.Table, newer: int) -> None:
        there = self._catalog.parts(table, cluster)
        turn = max((part.bucket for part in there), default=0) + 1
        part = parts.described(table, cluster, turn, rows)
        old = self._catalog.superseded(table, cluster) + newer
        written = parts.write(self.folder, part, rows)
        self._catalog.replace([], [written], superseded={(table, cluster): old})
        there.append(written)
        if 4 * old > sum(one.rows for one in there):
            self._merge_versions(there, old)
        elif len(there) > MOST_PARTS:
            self._merge_versions(parts.last_worth_merging(there, MOST_PARTS), old)

    def _merge_versions(self, merged: list[Part], superseded: int) -> None:
        """Make the last files of a table that lasts one, of what holds among them."""
        if len(merged) < 2:
            return
        table, cluster, turn = merged[-1].table, merged[-1].cluster, merged[-1].bucket
        rows = query.holding_sql(self.folder, table, TABLES[table].names, merged)
        order = ", ".join((SPANS[table][0], *KEYS[table]))
        holds = query.asked(self._duckdb(), f"FROM ({rows}) ORDER BY {order}").cast(TABLES[table])
        part = parts.described(table, cluster, turn, holds)
        left = superseded - (sum(one.rows for one in merged) - holds.num_rows)
        written = parts.write(self.folder, part, holds)
        self._catalog.replace(merged, [written], superseded={(table, cluster): left})

    def table(
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
        text = query.table_sql(
            self._catalog, name, names, since_s=since_s, until_s=until_s, where=where
        )
        found = query.asked(self._duckdb(), text)
        schema = pa.schema([SCHEMAS[name].field(one) for one in names])
        return found if found.schema.equals(schema) else found.cast(schema)

    def days(
        self,
        name: str,
        columns: Iterable[str] | None = None,
        since_s: float | None = None,
        until_s: float | None = None,
        where: str | None = None,
    ) -> Iterator[pa.Table]:
        """Yield moments or windows day by day, for whoever must not hold all of them."""
        names = query.require_columns(name, columns)
        if name in SPANS:
            raise InputError([Problem(name, "has no days: its rows last", "use Store.table")])
        found = sorted({part.bucket // DAY_S for part in self._catalog.parts(name)})
        for day in found:
            first, last = day * DAY_S, (day + 1) * DAY_S
            low = first if since_s is None else max(since_s, first)
            high = last if until_s is None else min(until_s, last)
            if low < high:
                yield self.table(name, names, low, high, where)

    def sql(self, text: str) -> pa.Table:
        """Return the answer to a query over the tables, which are views of DuckDB."""
        link = self._duckdb()
        query.views(self._catalog, link, text)
        return query.asked(link, text)

    def held(self) -> dict[str, Held]:
        """Return how much there is of each table, without reading any of it."""
        found = {}
        for name in SCHEMAS:
            listed = self._catalog.parts(name)
            firsts = [part.first_s for part in listed if part.first_s > float("-inf")]
            lasts = [part.known_s for part in listed if part.known_s > float("-inf")]
            rows = sum(part.rows for part in listed) - self._catalog.superseded(name)
            size = sum(part.size for part in listed)
            found[name] = Held(rows, size, min(firsts, default=None), max(lasts, default=None))
        return found

    def clusters(self) -> tuple[str, ...]:
        """Return the clusters that anything is known of."""
        return tuple(
            sorted({part.cluster for name in SCHEMAS for part in self._catalog.parts(name)})
        )

    def cursor(self, source: str) -> str | None:
        """Return where a source is to be read on, as it was last kept."""
        return self._catalog.cursor(source)

    def set_cursor(self, source: str, text: str) -> None:
        """Keep where a source is to be read on, once its rows are kept."""
        self._catalog.set_cursor(source, text)

    def keep(self, limits: Limits, now_s: float | None = None) -> Kept:
        """Let go of what is older than its limit: samples leave windows, windows leave hours."""
        with self._catalog.writer():
            return keep(
                self._catalog, self._duckdb(), limits, time.time() if now_s is None else now_s
            )

    def _duckdb(self) -> Any:
        if self._link is None:
            self._link = query.connect(self.folder, self._memory_mib)
        return self._link
