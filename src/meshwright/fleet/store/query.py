"""Questions to the store in SQL: DuckDB over the Parquet files that hold the answer."""

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.fleet.store.data_file import DataFile, compute_schema_fingerprint, read_column_names
from meshwright.fleet.store.manifest import Manifest
from meshwright.fleet.store.rollup import build_rollup_merge_sql
from meshwright.fleet.store.schema import ROLLUP_LENGTHS_S, ROLLUPS, SCHEMAS, build_time_conditions
from meshwright.fleet.tables import PRIMARY_KEYS
from meshwright.spec.name_suggestions import build_unknown_name_problem

MEMORY_LIMIT_MIB = 2048
"""What a query may hold before it spills to disk."""

_TYPES = {
    pa.string(): "VARCHAR", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN", pa.list_(pa.string()): "VARCHAR[]",
}  # fmt: skip


def connect(folder: Path, memory_mib: int = MEMORY_LIMIT_MIB) -> Any:
    """Return a DuckDB connection that reads files of this store and of no other place."""
    try:
        import duckdb
    except ImportError:
        raise MissingDependency(
            "the fleet store needs duckdb", "pip install 'meshwright[fleet]'"
        ) from None
    spill = folder / "spill"
    # DuckDB would make it readable for all; where nothing may be written, nothing spills.
    with contextlib.suppress(OSError):
        spill.mkdir(mode=0o700, exist_ok=True)
    link = duckdb.connect(config={"memory_limit": f"{memory_mib}MiB", "threads": _cores()})
    link.execute("SET preserve_insertion_order = false")
    link.execute(f"SET temp_directory = {quote_literal(str(spill))}")
    link.execute(f"SET allowed_directories = [{quote_literal(str(folder) + os.sep)}]")
    link.execute("SET enable_external_access = false")
    return link


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def quote_literal(text: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def quote_columns(columns: Iterable[str]) -> str:
    """Return columns as SQL lists them; `array` and `partition` are words of its own."""
    return ", ".join(f'"{name}"' for name in columns)


def require_table(name: str) -> pa.Schema:
    """Return the schema of a table, or say which there are."""
    if name not in SCHEMAS:
        raise InputError([build_unknown_name_problem("table", name, SCHEMAS)])
    return SCHEMAS[name]


def require_columns(name: str, columns: Iterable[str] | None) -> list[str]:
    """Return the columns that are asked for, or say which there are."""
    known = require_table(name).names
    asked = list(known) if columns is None else list(columns)
    problems = [
        build_unknown_name_problem(f"column of {name}", one, known)
        for one in asked
        if one not in known
    ]
    if problems:
        raise InputError(problems)
    return asked


def build_rows_sql(
    manifest: Manifest,
    table: str,
    columns: Sequence[str],
    *,
    since_s: float | None = None,
    until_s: float | None = None,
    cluster: str | None = None,
) -> str:
    """Return the SQL of all rows of a table of which any part is of a stretch of time."""
    span = ROLLUP_LENGTHS_S.get(table, 0)
    everything, superseded = manifest.read_snapshot(table, cluster)
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
        return build_latest_rows_sql(manifest.folder, table, columns, everything)
    if table in ROLLUP_LENGTHS_S:
        return _windows_sql(manifest.folder, table, columns, parts)
    return f"SELECT {quote_columns(columns)} FROM {build_files_sql(manifest.folder, parts)}"


def build_latest_rows_sql(
    folder: Path, table: str, columns: Sequence[str], parts: list[DataFile]
) -> str:
    """Return the SQL of rows that no later file has another version of.

    The files come in the order of their turns. Later ones are small, so that what is looked up for
    each row of the large first one fits a cache.
    """
    same = " AND ".join(f'mine."{key}" = later."{key}"' for key in PRIMARY_KEYS[table])
    picked = ", ".join(f'mine."{name}"' for name in columns)
    asked = []
    for place, part in enumerate(parts):
        rows = f"SELECT {picked} FROM {build_files_sql(folder, [part])} mine"
        if place + 1 < len(parts):
            keys = (
                f"SELECT {quote_columns(PRIMARY_KEYS[table])} FROM "
                f"{build_files_sql(folder, parts[place + 1 :])}"
            )
            rows += f" ANTI JOIN ({keys}) later ON {same}"
        asked.append(rows)
    return " UNION ALL ".join(asked)


def _windows_sql(folder: Path, table: str, columns: Sequence[str], parts: list[DataFile]) -> str:
    """Return the SQL of windows, put together where two files have samples of the same one."""
    of = next(name for name, rollup in ROLLUPS.items() if table in rollup)
    buckets: dict[tuple[str, int], list[DataFile]] = {}
    for part in parts:
        buckets.setdefault((part.cluster, part.bucket), []).append(part)
    several = {
        one.file
        for bucket in buckets.values()
        for one in bucket
        if any(one is not other and one.may_overlap(other) for other in bucket)
    }
    single = [part for part in parts if part.file not in several]
    asked = []
    if single:
        asked.append(f"SELECT {quote_columns(columns)} FROM {build_files_sql(folder, single)}")
    if several:
        files = build_files_sql(folder, [part for part in parts if part.file in several])
        asked.append(build_rollup_merge_sql(of, columns, ROLLUP_LENGTHS_S[table], files))
    return " UNION ALL ".join(asked)


def build_files_sql(folder: Path, parts: Iterable[DataFile]) -> str:
    """Return what SQL reads files of one table by, older ones with all columns there are now."""
    by_schema: dict[str, list[DataFile]] = {}
    for part in parts:
        by_schema.setdefault(part.schema_fingerprint, []).append(part)
    asked = []
    for fingerprint, same in by_schema.items():
        paths = ", ".join(quote_literal(str(folder / part.file)) for part in same)
        rows = f"read_parquet([{paths}], hive_partitioning = false)"
        schema = SCHEMAS[same[0].table]
        if fingerprint == compute_schema_fingerprint(schema):
            asked.append(rows)
            continue
        there = set(read_column_names(folder, same[0]))
        picked = [
            f'"{name}"' if name in there else f'CAST(NULL AS {_TYPES[kind]}) AS "{name}"'
            for name, kind in zip(schema.names, schema.types, strict=True)
        ]
        asked.append(f"(SELECT {', '.join(picked)} FROM {rows})")
    if len(asked) == 1:
        return asked[0]
    selects = (f"SELECT {quote_columns(schema.names)} FROM {one}" for one in asked)
    return f"({' UNION ALL '.join(selects)})"


def _none(table: str, columns: Sequence[str]) -> str:
    schema = SCHEMAS[table]
    picked = [f'CAST(NULL AS {_TYPES[schema.field(name).type]}) AS "{name}"' for name in columns]
    return f"SELECT {', '.join(picked)} WHERE false"


def build_table_sql(
    manifest: Manifest,
    table: str,
    columns: Sequence[str],
    *,
    since_s: float | None,
    until_s: float | None,
    where: str | None,
) -> str:
    """Return the SQL of rows of a table, of a stretch of time and of a condition."""
    conditions = build_time_conditions(table, since_s, until_s)
    if where:
        conditions.append(f"({where})")
    if not conditions:
        return build_rows_sql(manifest, table, columns)
    everything = SCHEMAS[table].names
    rows = build_rows_sql(manifest, table, everything, since_s=since_s, until_s=until_s)
    return f"SELECT {quote_columns(columns)} FROM ({rows}) WHERE {' AND '.join(conditions)}"


def run_query(link: Any, query: str) -> pa.Table:
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


def create_views(manifest: Manifest, link: Any, query: str) -> None:
    """Make the tables that a query names known to DuckDB, as they are now."""
    for word in set(re.findall(r"\w+", query.lower())) & set(SCHEMAS):
        rows = build_rows_sql(manifest, word, SCHEMAS[word].names)
        link.execute(f"CREATE OR REPLACE TEMP VIEW {word} AS {rows}")
