"""Samples rolled up over stretches of time, so that a report of a week reads no sample."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.fleet.store.schema import BITMASK_METRICS, ROLLUPS, WINDOW_S, build_rollup_schema
from meshwright.fleet.tables import PRIMARY_KEYS

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]


def roll_up(table: str, rows: pa.Table, span_s: int = WINDOW_S) -> pa.Table:
    """Roll up samples that stand in the order of their keys."""
    times = rows["time_s"].to_numpy()
    windows = np.floor_divide(times, span_s)
    starts = _starts(table, rows, windows)
    columns: dict[str, object] = {
        name: rows[name].take(starts) for name in PRIMARY_KEYS[table] if name != "time_s"
    }
    columns["time_s"] = windows[starts] * span_s
    columns["count"] = np.diff(starts, append=rows.num_rows)
    for metric in ROLLUPS[table].metrics:
        column = rows[metric]
        if column.null_count == len(column):
            columns |= _unknown(metric, len(starts))
        else:
            values = column.combine_chunks().to_numpy(zero_copy_only=False)
            columns |= _metric(metric, values, starts, known=column.null_count == 0)
    schema = build_rollup_schema(table)
    return pa.table([_array(columns[field.name], field.type) for field in schema], schema=schema)


def _starts(table: str, rows: pa.Table, windows: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the row at which each window of each series begins."""
    new = np.ones(rows.num_rows, np.bool_)
    new[1:] = windows[1:] != windows[:-1]
    for name in PRIMARY_KEYS[table]:
        if name in ("cluster", "time_s"):
            continue
        column = rows[name].combine_chunks()
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
        if pa.types.is_dictionary(column.type):
            column = column.indices
        codes = column.to_numpy(zero_copy_only=False)
        new[1:] |= codes[1:] != codes[:-1]
    return np.flatnonzero(new)


def _metric(
    metric: str, values: Floats, starts: npt.NDArray[np.int64], *, known: bool
) -> dict[str, object]:
    lengths = np.diff(starts, append=len(values))
    there = None if known else ~np.isnan(values)
    count = lengths if there is None else np.add.reduceat(there.astype(np.int32), starts)
    zeros = np.add.reduceat((values == 0).astype(np.int32), starts)
    empty = count == 0
    some = np.where(empty, 1, count)
    found: dict[str, object] = {
        f"{metric}_zero": pa.array((zeros / some).astype(np.float32), mask=empty),
        f"{metric}_count": count,
    }
    filled = values if there is None else np.where(there, values, values.dtype.type(0))
    if metric in BITMASK_METRICS:
        bits = np.bitwise_or.reduceat(filled.astype(np.int64), starts)
        return found | {f"{metric}_any": pa.array(bits, mask=empty)}
    # Sums of a few dozen float32 would lose what a byte counter of 80 GiB has in its last digits.
    mean = np.add.reduceat(filled.astype(np.float64), starts) / some
    most = np.fmax.reduceat(values, starts)
    return found | {
        f"{metric}_mean": pa.array(mean.astype(values.dtype), mask=empty),
        f"{metric}_max": pa.array(most, mask=empty),
    }


def _unknown(metric: str, length: int) -> dict[str, object]:
    kinds = ("any", "zero") if metric in BITMASK_METRICS else ("mean", "max", "zero")
    found: dict[str, object] = {f"{metric}_{kind}": pa.nulls(length) for kind in kinds}
    return found | {f"{metric}_count": np.zeros(length, np.int32)}


def _array(values: object, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    made = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return made if made.type == kind else made.cast(kind)


def build_rollup_merge_sql(table: str, columns: Iterable[str], span_s: int, rows: str) -> str:
    """Return the SQL that puts windows of one series and time together into longer or whole ones.

    A window whose samples came in two files has a row in each; weights are how many samples a row
    is of.
    """
    keys = [name for name in PRIMARY_KEYS[table] if name != "time_s"]
    start = f"floor(time_s / {span_s}) * {span_s}"
    kinds = {field.name: field.type for field in build_rollup_schema(table)}
    picked = [_combined(name, start, keys, kinds[name]) for name in columns]
    return f"SELECT {', '.join(picked)} FROM {rows} GROUP BY {', '.join([*keys, start])}"


def _combined(name: str, start: str, keys: list[str], column_type: pa.DataType) -> str:
    metric, _, kind = name.rpartition("_")
    if name in keys:
        return name
    if name == "time_s":
        return f"{start} AS time_s"
    if name == "count" or kind == "count":
        return f"CAST(sum({name}) AS INTEGER) AS {name}"
    if kind == "max":
        return f"max({name}) AS {name}"
    if kind == "any":
        return f"bit_or({name}) AS {name}"
    weight = f"{metric}_count"
    mean = f"sum(CAST({name} AS DOUBLE) * {weight}) / nullif(sum({weight}), 0)"
    return f"CAST({mean} AS {'FLOAT' if column_type == pa.float32() else 'DOUBLE'}) AS {name}"
