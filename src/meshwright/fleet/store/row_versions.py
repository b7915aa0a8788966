"""Rows that last and are told again as they change: of each key the version seen last holds."""

from typing import Any, NamedTuple

import pyarrow as pa

from meshwright.fleet.store.query import quote_columns, run_query
from meshwright.fleet.tables import PRIMARY_KEYS, TABLE_SCHEMAS


class VersionedRows(NamedTuple):
    """Rows sorted by what they bring."""

    new_rows: pa.Table
    """New keys, and later versions of known ones."""
    new: int
    updates: int
    duplicates: int


def select_new_versions(link: Any, table: str, rows: pa.Table, known: str) -> VersionedRows:
    """Keep of some rows of one cluster those that tell something `known` (in SQL) does not.

    Of two versions seen at the same moment the one with the larger digest holds: which that is says
    nothing, but it is the same whatever comes first.
    """
    link.register("incoming", rows)
    try:
        found = run_query(link, _sql(table, known))
    finally:
        link.unregister("incoming")
    fate = found["fate"].to_numpy()
    kept = (
        found.filter(pa.array(fate > 0))
        .select(TABLE_SCHEMAS[table].names)
        .cast(TABLE_SCHEMAS[table])
    )
    new, newer = int((fate == 2).sum()), int((fate == 1).sum())
    return VersionedRows(kept, new, newer, rows.num_rows - new - newer)


def _sql(table: str, known: str) -> str:
    names, keys = TABLE_SCHEMAS[table].names, PRIMARY_KEYS[table]
    named = quote_columns(keys)
    fields = {side: ", ".join(f'{side}."{name}"' for name in names) for side in ("n", "o")}
    digest = {side: f"md5(CAST(row({fields[side]}) AS VARCHAR))" for side in ("n", "o")}
    seen = {side: f"coalesce({side}.seen_s, '-inf'::DOUBLE)" for side in ("n", "o")}
    joined = " AND ".join(f"n.{key} IS NOT DISTINCT FROM o.{key}" for key in keys)
    repeated = "PARTITION BY " + ", ".join(f"n.{key}" for key in keys)
    return f"""
        WITH twice AS (
            SELECT {named} FROM incoming GROUP BY {named} HAVING count(*) > 1
        ), best AS (
            SELECT n.* FROM incoming n ANTI JOIN twice o ON {joined}
            UNION ALL
            SELECT n.* FROM incoming n SEMI JOIN twice o ON {joined}
            QUALIFY row_number() OVER (
                {repeated} ORDER BY {seen["n"]} DESC, {digest["n"]} DESC
            ) = 1
        )
        SELECT n.*, CASE
            WHEN o.there IS NULL THEN 2
            WHEN {seen["n"]} > {seen["o"]} THEN 1
            WHEN {seen["n"]} < {seen["o"]} THEN 0
            WHEN row({fields["n"]}) IS NOT DISTINCT FROM row({fields["o"]}) THEN 0
            WHEN {digest["n"]} > {digest["o"]} THEN 1
            ELSE 0 END AS fate
        FROM best n LEFT JOIN (SELECT *, true AS there FROM ({known})) o ON {joined}
    """
