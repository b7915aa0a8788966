"""Columns of text made into numbers, times and states."""

import re
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.columns import Flags, Floats
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.row_faults import no_rows
from meshwright.fleet.sources.time_text import parse_times
from meshwright.fleet.store.schema_check import MAX_TIME_S

Rows: TypeAlias = pa.Table | TraceBlock
"""Text columns; of a `TraceBlock`, values that cannot be read are counted as faults."""

GIB, MIB = float(1 << 30), float(1 << 20)
_MAX_SHARE: Final = 1.01
"""Means of what is sampled unevenly come out a little above one."""
_NUMBER: Final = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$", re.ASCII)
_MAX_COUNT: Final = float(1 << 31)
_ENOUGH: Final = 20
"""Percentages after which it is told that all of them are shares."""

JOB_STATE_BY_NAME: Final = {
    "completed": "completed", "pass": "completed", "terminated": "completed",
    "succeeded": "completed", "succeed": "completed",
    "cancelled": "cancelled", "canceled": "cancelled", "killed": "cancelled",
    "failed": "failed", "timeout": "timeout", "node_fail": "node_fail",
    "out_of_memory": "out_of_memory", "preempted": "preempted",
    "running": "running", "pending": "pending", "waiting": "pending",
}  # fmt: skip
"""How an attempt ended, by the words of all traces."""


def read_numbers(
    block: Rows, name: str, times: float = 1.0, *, signed: bool = False, units: bool = False
) -> Floats:
    """Return a column as numbers, NaN where it has none; all NaN where there is no such column.

    Numbers below nought are faults unless `signed`; with `units` a unit may follow (`24GB`).
    """
    if name not in block.column_names:
        return np.full(block.num_rows, np.nan)
    column = pc.utf8_trim_whitespace(_text(block, name))
    try:
        values = column.cast(pa.float64())
    except pa.ArrowInvalid:
        values = _by_value(column, _lenient if units else _strict)
    found = np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)
    if isinstance(block, TraceBlock):
        strange = _flags(column.is_valid()) & ~np.isfinite(found)
        block.add_fault(strange, name, "is no number", "write digits, or nothing")
        with np.errstate(invalid="ignore"):
            below = np.less(found, 0) if not signed else no_rows(len(found))
        block.add_fault(below, name, "is below 0", "write what it was, or nothing")
        found = np.where(strange | below, np.nan, found)
    return found * times


def read_shares(block: Rows, name: str) -> Floats:
    """Return a column of percentages as shares; values beyond 0 to 100 are faults."""
    found = read_numbers(block, name, 0.01)
    if isinstance(block, TraceBlock):
        with np.errstate(invalid="ignore"):
            beyond, some = found > _MAX_SHARE, found > 0
        block.add_fault(beyond, name, "is no percentage", "write 0 to 100, as 87.5")
        values = found[some]
        if len(values) >= _ENOUGH and (values <= 0.01).all() and len(np.unique(values)) > 2:
            what = "is a share between 0 and 1, where percentages are meant"
            block.add_fault(some, name, what, "multiply them by 100")
            beyond = some
        found = np.where(beyond, np.nan, found)
    return found


def read_text(block: Rows, name: str) -> pa.Array:
    """Return a column as text; all null where there is no such column."""
    if name not in block.column_names:
        return pa.nulls(block.num_rows, pa.string())
    return _text(block, name)


def _text(block: Rows, name: str) -> pa.Array:
    column = block[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # one without rows keeps its chunks
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.string())
    return column


def read_states(block: Rows, name: str) -> pa.Array:
    """Return how each attempt ended, in the words of the tables."""
    column = read_text(block, name).dictionary_encode()
    words = [
        JOB_STATE_BY_NAME.get(str(word).strip().lower(), "unknown") for word in column.dictionary
    ]
    known = pa.DictionaryArray.from_arrays(column.indices, pa.array(words, pa.string()))
    return pc.fill_null(known.cast(pa.string()), "unknown")


def read_times(
    block: Rows, name: str, zone: str = "UTC", why: str = "", scale: float = 1.0
) -> Floats:
    """Return a column of times as seconds since 1970.

    Times say their zone themselves (`+08:00`, `PDT`), or are of the zone that the user gave, or of
    `zone`, for the reason `why`; plain numbers are so many times `scale` seconds.
    """
    if name not in block.column_names:
        return np.full(block.num_rows, np.nan)
    column = pc.utf8_trim_whitespace(_text(block, name))
    given = block.zone if isinstance(block, TraceBlock) else ""
    parsed = parse_times(column, given or zone, scale)
    if isinstance(block, TraceBlock):
        if parsed.without_zone.any():
            block.faults.note_zone(given or zone, "" if given else why or "as nothing says which")
        strange = _flags(column.is_valid()) & ~np.isfinite(parsed.moments_s)
        what, fix = "is no time that can be told", "write 2026-11-01 08:00:00+01:00, or seconds"
        block.add_fault(strange, name, what, fix)
        with np.errstate(invalid="ignore"):
            far = (np.abs(parsed.moments_s) > MAX_TIME_S) | (parsed.moments_s < 0)
        what = "is no time in seconds since 1970"
        block.add_fault(far, name, what, "divide milliseconds by 1000, microseconds by 1e6")
        return np.where(strange | far, np.nan, parsed.moments_s)
    return parsed.moments_s


def to_counts(values: Floats) -> pa.Array:
    """Return numbers as whole ones; null for what is none, or more than a column holds."""
    with np.errstate(invalid="ignore"):
        known = (values >= 0) & (values < _MAX_COUNT) & (values == np.floor(values))
    return pa.array(np.where(known, values, np.nan), from_pandas=True).cast(pa.int32())


def _strict(word: str) -> float | None:
    return float(word) if _NUMBER.match(word) else None


def _lenient(word: str) -> float | None:
    """Read a number with a unit behind it, such as `24GB`."""
    found = re.match(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?", word)
    return float(found.group()) if found else None


def _by_value(column: pa.Array, made: Callable[[str], float | None]) -> pa.Array:
    encoded = column.dictionary_encode()
    values = [None if word is None else made(word) for word in encoded.dictionary.to_pylist()]
    return pa.array(values, pa.float64()).take(encoded.indices)


def _flags(column: pa.Array) -> Flags:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.bool_)
