"""Rows as their table has them, or what is wrong with them."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.fleet.store.query import require_columns, require_table
from meshwright.fleet.store.schema import SPAN_COLUMNS
from meshwright.fleet.tables import PRIMARY_KEYS, TABLE_SCHEMAS

MAX_TIME_S = 1e11
"""As a time in seconds three thousand years hence, in milliseconds that of 1973."""
_MAY_BE_NULL = {"events": frozenset({"gpu", "code"})}


def list_required_columns(table: str) -> list[str]:
    """Return the columns that every row of a table must have a value in."""
    return [key for key in PRIMARY_KEYS[table] if key not in _MAY_BE_NULL.get(table, ())]


def conform_rows(table: str, rows: pa.Table) -> pa.Table:
    """Return rows in the schema of their table, or say what is wrong with them.

    Columns that are missing are unknown, and so is what is no number.
    """
    if table not in TABLE_SCHEMAS:
        require_table(table)
        raise InputError([Problem(table, "is made by the store and takes no rows", "put samples")])
    require_columns(table, rows.column_names)
    missing = [key for key in PRIMARY_KEYS[table] if key not in rows.column_names]
    if missing:
        what = "is missing; it is part of the key"
        raise InputError([Problem(f"{table}.{key}", what) for key in missing])
    schema, columns, problems = TABLE_SCHEMAS[table], [], []
    for field in schema:
        if field.name not in rows.column_names:
            columns.append(pa.nulls(rows.num_rows, field.type))
            continue
        try:
            columns.append(_typed(rows[field.name], field.type))
        except pa.ArrowInvalid as error:
            problems.append(Problem(f"{table}.{field.name}", str(error)))
        else:
            problems += _wrong(table, field.name, columns[-1])
    if problems:
        raise InputError(problems)
    return pa.table(columns, schema=schema)


def _typed(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = column if column.type == kind else column.cast(kind)
    if not pa.types.is_floating(kind):
        return column
    strange = pc.invert(pc.is_finite(column))
    if not pc.any(strange).as_py():
        return column
    return pc.if_else(strange, pa.scalar(None, kind), column)


def _wrong(table: str, name: str, column: pa.ChunkedArray) -> Iterator[Problem]:
    """Say what is wrong with the values of a column."""
    where = f"{table}.{name}"
    if name in list_required_columns(table) and column.null_count:
        what = f"is unknown in {column.null_count} of {len(column)} rows"
        yield Problem(where, what, "it is part of the key")
    if name in ("time_s", "seen_s", *SPAN_COLUMNS.get(table, ())):
        latest = pc.max(column).as_py()
        if latest is not None and latest > MAX_TIME_S:
            what = f"{latest:.0f} is no time in seconds since 1970"
            yield Problem(where, what, "divide milliseconds by 1000")
