"""Questions to the store in SQL: DuckDB over the Parquet files that hold the answer."""

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.fleet.store.catalog import Catalog
from meshwright.observe.fleet.store.layout import ROLLUPS, SCHEMAS, SPAN_OF_ROLLUP, within
from meshwright.observe.fleet.store.parts import Part
from meshwright.observe.fleet.store.parts import names as names_in
from meshwright.observe.fleet.store.parts import shape as shape_of
from meshwright.observe.fleet.store.windows import combining_sql
from meshwright.observe.fleet.tables import KEYS
from meshwright.spec.names import unknown_name

MEMORY_MIB = 2048
"""What a query may hold before it spills to disk."""

_TYPES = {
    pa.string(): "VARCHAR", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN", pa.list_(pa.string()): "VARCHAR[]",
}  # fmt: skip


def connect(folder: Path, memory_mib: int = MEMORY_MIB) -> Any:
    """Return a DuckDB connection that reads files of this store and of no other place."""
    try:
        import duckdb
    except ImportError:
        raise MissingPart(
            "the fleet store needs duckdb", "pip install 'meshwright[fleet]'"
        ) from None
    spill = folder / "spill"
    # DuckDB would make it readable for all; where nothing may be written, nothing spills.
    with contextlib.suppress(OSError):
        spill.mkdir(mode=0o700, exist_ok=True)
    link = duckdb.connect(config={"memory_limit": f"{memory_mib}MiB", "threads": _cores()})
    link.execute("SET preserve_insertion_order = false")
    link.execute(f"SET temp_directory = {quoted(str(spill))}")
    link.execute(f"SET allowed_directories = [{quoted(str(folder) + os.sep)}]")
    link.execute("SET enable_external_access = false")
    return link


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def quoted(text: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def listed(columns: Iterable[str]) -> str:
    """Return columns as SQL lists them; `array` and `partition` are words of its own."""
    return ", ".join(f'"{name}"' for name in columns)


def require_table(name: str) -> pa.Schema:
    """Return the schema of a table, or say which there are."""
    if name not in SCHEMAS:
        raise InputError([unknown_name("table", name, SCHEMAS)])
    return SCHEMAS[name]


def require_columns(name: str, columns: Iterable[str] | None) -> list[str]:
    """Return the columns that are asked for, or say which there are."""
    known = require_table(name).names
    asked = list(known) if columns is None else list(columns)
    problems = [unknown_name(f"column of {name}", one, known) for one in asked if one not in known]
    if problems:
        raise InputError(problems)
    return asked


def rows_sql(
    catalog: Catalog,
    table: str,
    columns: Sequence[str],
    *,
    since_s: float | None = None,
    until_s: float | None = None,
    cluster: str | None = None,
) -> str:
    """Return the SQL of all rows of a table of which any part is of a stretch of time."""
    span = SPAN_OF_ROLLUP.get(table, 0)
    everything, superseded = catalog.snapshot(table, cluster)
    parts = [
        part
        for part in everything
        if (since_s is None or part.last_s >= since_s - span)
        and (until_s is None or part.first_s < until_s)
    ]
    if not parts:
        return _none(table, columns)
    if superseded:
        # A later version may have another time: all files have a say in which row holds.
        return holding_sql(catalog.folder, table, columns, everything)
    if table in SPAN_OF_ROLLUP:
        return _windows_sql(catalog.folder, table, columns, parts)
    return f"SELECT {listed(columns)} FROM {files_sql(catalog.folder, parts)}"


def holding_sql(folder: Path, table: str, columns: Sequence[str], parts: list[Part]) -> str:
    """Return the SQL of rows that no later file has another version of.

    The files come in the order of their turns. Later ones are small, so that what is looked up for
    each row of the large first one fits a cache.
    """
    same = " AND ".join(f'mine."{key}" = later."{key}"' for key in KEYS[table])
    picked = ", ".join(f'mine."{name}"' for name in columns)
    asked = []
    for place, part in enumerate(parts):
        rows = f"SELECT {picked} FROM {files_sql(folder, [part])} mine"
        if place + 1 < len(parts):
            keys = f"SELECT {listed(KEYS[table])} FROM {files_sql(folder, parts[place + 1 :])}"
            rows += f" ANTI JOIN ({keys}) later ON {same}"
        asked.append(rows)
    return " UNION ALL ".join(asked)


def _windows_sql(folder: Path, table: str, columns: Sequence[str], parts: list[Part]) -> str:
    """Return the SQL of windows, put together where two files have samples of the same one."""
    of = next(name for name, rollup in ROLLUPS.items() if table in rollup)
    buckets: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        buckets.setdefault((part.cluster, part.bucket), []).append(part)
    several = {
        one.file
        for bucket in buckets.values()
        for one in bucket
        if any(one is not other and one.meets(other) for other in bucket)
    }
    single = [part for part in parts if part.file not in several]
    asked = []
    if single:
        asked.append(f"SELECT {listed(columns)} FROM {files_sql(folder, single)}")
    if several:
        files = files_sql(folder, [part for part in parts if part.file in several])
        asked.append(combining_sql(of, columns, SPAN_OF_ROLLUP[table], files))
    return " UNION ALL ".join(asked)


def files_sql(folder: Path, parts: Iterable[Part]) -> str:
    """Return what SQL reads files of one table by, older ones with all columns there are now."""
    shapes: dict[str, list[Part]] = {}
    for part in parts:
        shapes.setdefault(part.shape, []).append(part)
    asked = []
    for shape, same in shapes.items():
        paths = ", ".join(quoted(str(folder / part.file)) for part in same)
        rows = f"read_parquet([{paths}], hive_partitioning = false)"
        schema = SCHEMAS[same[0].table]
        if shape == shape_of(schema):
            asked.append(rows)
            continue
        there = set(names_in(folder, same[0]))
        picked = [
            f'"{name}"' if name in there else f'CAST(NULL AS {_TYPES[kind]}) AS "{name}"'
            for name, kind in zip(schema.names, schema.types, strict=True)
        ]
        asked.append(f"(SELECT {', '.join(picked)} FROM {rows})")
    if len(asked) == 1:
        return asked[0]
    return f"({' UNION ALL '.join(f'SELECT {listed(schema.names)} FROM {one}' for one in asked)})"


def _none(table: str, columns: Sequence[str]) -> str:
    schema = SCHEMAS[table]
    picked = [f'CAST(NULL AS {_TYPES[schema.field(name).type]}) AS "{name}"' for name in columns]
    return f"SELECT {', '.join(picked)} WHERE false"


def table_sql(
    catalog: Catalog,
    table: str,
    columns: Sequence[str],
    *,
    since_s: float | None,
    until_s: float | None,
    where: str | None,
) -> str:
    """Return the SQL of rows of a table, of a stretch of time and of a condition."""
    conditions = within(table, since_s, until_s)
    if where:
        conditions.append(f"({where})")
    if not conditions:
        return rows_sql(catalog, table, columns)
    everything = SCHEMAS[table].names
    rows = rows_sql(catalog, table, everything, since_s=since_s, until_s=until_s)
    return f"SELECT {listed(columns)} FROM ({rows}) WHERE {' AND '.join(conditions)}"


def asked(link: Any, query: str) -> pa.Table:
    """Return the answer to a query, or say what is wrong with it."""
    import duckdb

    try:
        found: pa.Table = link.sql(query).to_arrow_table()
    except duckdb.Error as error:
        first = str(error).strip().splitlines()[0]
        fix = f"tables are {', '.join(SCHEMAS)}"
        if isinstance(error, duckdb.OutOfMemoryException):
            fix = "ask for fewer columns or less time, or sum up in SQL"
        raise InputError([Problem("query", first, fix)]) from None
    return found


def views(catalog: Catalog, link: Any, query: str) -> None:
    """Make the tables that a query names known to DuckDB, as they are now."""
    for word in set(re.findall(r"\w+", query.lower())) & set(SCHEMAS):
        rows = rows_sql(catalog, word, SCHEMAS[word].names)
        link.execute(f"CREATE OR REPLACE TEMP VIEW {word} AS {rows}")
