"""Rows that are each of one moment: put into order, and put together where their keys are the same.

What two rows of one key know is put together column by column, the larger value where they differ.
That is the same whatever comes first and however often it comes, so duplicated, late and unordered
rows change nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.store.schema import BUCKET_LENGTHS_S
from meshwright.fleet.tables import PRIMARY_KEYS

Ints = npt.NDArray[np.int64]
_TIME_BITS = 37
"""Bits for the microseconds of a bucket: a day has fewer than 2^37."""


class BucketRows(NamedTuple):
    """Rows of one cluster and one bucket."""

    cluster: str
    bucket: int
    rows: pa.Table


class MergedRows(NamedTuple):
    """Rows in order, each key once."""

    rows: pa.Table
    num_updated_keys: int
    """Keys whose first row learned something from a later one."""


def split_by_bucket(table: str, rows: pa.Table) -> Iterator[BucketRows]:
    """Cut rows by cluster and by bucket of time."""
    times = rows["time_s"].to_numpy()
    buckets = np.floor_divide(times, BUCKET_LENGTHS_S[table]).astype(np.int64)
    codes, names = _codes(rows["cluster"])
    both = buckets * len(names) + codes
    found = np.unique(both)
    for value in found:
        bucket, code = divmod(int(value), len(names))
        part = rows if len(found) == 1 else rows.take(np.flatnonzero(both == value))
        yield BucketRows(names[code], bucket * BUCKET_LENGTHS_S[table], part)


def rank_keys(table: str, rows: pa.Table, bucket: int) -> Ints:
    """Return a number for each row that is the same where keys are, and rises in their order.

    Only numbers of one call can be compared: they count the series among these rows. Times less
    than a microsecond apart are the same.
    """
    series = np.zeros(rows.num_rows, np.int64)
    for name in PRIMARY_KEYS[table]:
        if name in ("cluster", "time_s"):
            continue
        codes, names = _codes(rows[name])
        series = series * len(names) + codes
        if len(names) > 1 and series.size and series.max() >= 1 << (62 - _TIME_BITS):
            series = np.unique(series, return_inverse=True)[1].astype(np.int64)
    micros = np.rint((rows["time_s"].to_numpy() - bucket) * 1e6).astype(np.int64)
    found: Ints = (series << _TIME_BITS) + micros
    return found


def merge_rows(table: str, rows: pa.Table, bucket: int) -> MergedRows:
    """Put rows of one bucket into order, and together where their keys are the same."""
    number = rank_keys(table, rows, bucket)
    steps = np.diff(number)
    if (steps > 0).all():
        return MergedRows(rows, 0)
    # Stable, so that of one key the row that came first stands first.
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    if len(starts) == rows.num_rows:
        return MergedRows(rows.take(order), 0)
    return _put_together(table, rows.take(order), starts)


def _put_together(table: str, rows: pa.Table, starts: Ints) -> MergedRows:
    changed = np.zeros(len(starts), np.bool_)
    columns = []
    for field in rows.schema:
        column = rows[field.name].combine_chunks()
        first = column.take(starts)
        if field.name not in PRIMARY_KEYS[table]:
            best = _largest(column, starts)
            alike = pc.fill_null(pc.equal(first, best), fill_value=False)
            both_null = pc.and_(pc.is_null(first), pc.is_null(best))
            changed |= ~pc.or_(alike, both_null).to_numpy(zero_copy_only=False)
            first = best
        columns.append(first)
    return MergedRows(pa.table(columns, schema=rows.schema), int(changed.sum()))


def _largest(column: pa.Array, starts: Ints) -> pa.Array:
    """Return the largest value of each group of rows; null where none is known."""
    if pa.types.is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False)
        best = np.fmax.reduceat(values, starts)
        return pa.array(best, column.type, from_pandas=True)
    encoded = column.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    place = np.full(len(order) + 1, -1, np.int64)  # the last one is that of what is not known
    place[order] = np.arange(len(order))
    codes = place[pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)]
    top = np.maximum.reduceat(codes, starts)
    return encoded.dictionary.take(pa.array(order)).take(pa.array(top, mask=top < 0))


def _codes(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """Return for each row the place of its value among all values in order, null being the last."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_dictionary(whole.type):
        whole = pc.dictionary_encode(whole, null_encoding="encode")
    values = whole.dictionary
    if len(values) == 1:
        return np.zeros(len(whole), np.int64), values.to_pylist()
    order = pc.sort_indices(values).to_numpy()
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    indices = whole.indices.to_numpy(zero_copy_only=False)
    return place[indices], values.take(order).to_pylist()


def intersects(some: Ints, others: Ints) -> bool:
    """Say whether any of some numbers, which rise, is among others."""
    places = np.searchsorted(some, others)
    places[places == len(some)] = 0
    return bool((some[places] == others).any())
