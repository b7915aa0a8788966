"""Columns of text made into numbers, times and states."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import MissingDependency
from meshwright.fleet.columns import Floats

_TZDATA = "install the system's tzdata, or the Python package of that name"
GIB, MIB = float(1 << 30), float(1 << 20)
_ZONES: Final = {"PDT": -7, "PST": -8, "EDT": -4, "EST": -5, "UTC": 0, "GMT": 0, "Z": 0}
_OFFSET = re.compile(r"^([+-])(\d\d):?(\d\d)$")
_BEGIN = 19
"""Letters of `2023-03-01 00:18:22`, behind which fractions and zones follow."""

JOB_STATE_BY_NAME: Final = {
    "completed": "completed", "pass": "completed", "terminated": "completed",
    "succeeded": "completed", "succeed": "completed",
    "cancelled": "cancelled", "canceled": "cancelled", "killed": "cancelled",
    "failed": "failed", "timeout": "timeout", "node_fail": "node_fail",
    "out_of_memory": "out_of_memory", "preempted": "preempted",
    "running": "running", "pending": "pending", "waiting": "pending",
}  # fmt: skip
"""How an attempt ended, by the words of all traces."""


def read_numbers(block: pa.Table, name: str, times: float = 1.0) -> Floats:
    """Return a column as numbers, NaN where it has none; all NaN where there is no such column."""
    if name not in block.column_names:
        return np.full(block.num_rows, np.nan)
    column = pc.utf8_trim_whitespace(block[name].combine_chunks())
    try:
        values = column.cast(pa.float64())
    except pa.ArrowInvalid:
        values = _by_value(column, _lenient)
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64) * times


def read_text(block: pa.Table, name: str) -> pa.Array:
    """Return a column as text; all null where there is no such column."""
    if name not in block.column_names:
        return pa.nulls(block.num_rows, pa.string())
    return block[name].combine_chunks()


def read_states(block: pa.Table, name: str) -> pa.Array:
    """Return how each attempt ended, in the words of the tables."""
    column = read_text(block, name).dictionary_encode()
    words = [
        JOB_STATE_BY_NAME.get(str(word).strip().lower(), "unknown") for word in column.dictionary
    ]
    known = pa.DictionaryArray.from_arrays(column.indices, pa.array(words, pa.string()))
    return pc.fill_null(known.cast(pa.string()), "unknown")


def read_times(block: pa.Table, name: str, zone: str = "UTC") -> Floats:
    """Return a column of times as seconds since 1970.

    Times say their zone themselves (`+08:00`, `PDT`), or are of the given one; plain numbers are
    seconds already.
    """
    if name not in block.column_names:
        return np.full(block.num_rows, np.nan)
    column = block[name].combine_chunks()
    first = next((value.as_py() for value in column if value.is_valid), "")
    if not re.match(r"\s*\d{4}[-/]\d", first):
        return read_numbers(block, name)
    return parse_times(column, zone)


def parse_times(column: pa.Array, zone: str = "UTC") -> Floats:
    """Return times written as `2023-03-01 00:18:22` with or without a zone."""
    trimmed = pc.replace_substring_regex(pc.utf8_trim_whitespace(column), r"^(.{10})T", r"\1 ")
    begin = pc.replace_substring(pc.utf8_slice_codeunits(trimmed, 0, _BEGIN), "/", "-")
    day_only = pc.equal(pc.utf8_length(begin), 10)
    begin = pc.if_else(day_only, pc.binary_join_element_wise(begin, " 00:00:00", ""), begin)
    local = pc.strptime(begin, format="%Y-%m-%d %H:%M:%S", unit="s", error_is_null=True)
    naive = _floats(local.cast(pa.int64()))
    rest = pc.utf8_slice_codeunits(trimmed, _BEGIN).dictionary_encode()
    told = [_rest(str(word)) for word in rest.dictionary.to_pylist()]
    place = _floats(rest.indices)
    known = ~np.isnan(place)
    index = np.where(known, place, 0).astype(np.int64)
    fraction = np.array([item[0] for item in told] or [0.0])[index]
    offset = np.array([np.nan if item[1] is None else item[1] for item in told] or [0.0])[index]
    untold = np.isnan(offset)
    if untold.any():
        offset = np.where(untold, _offsets(naive, zone), offset)
    found: Floats = naive + fraction - offset
    return found


def _offsets(naive: Floats, zone: str) -> Floats:
    """Return by how many seconds a zone is ahead of UTC at times that were read off its clocks."""
    if zone == "UTC":
        return np.zeros(len(naive))
    try:
        home = ZoneInfo(zone)
    except ZoneInfoNotFoundError:
        raise MissingDependency(
            f"this machine does not know the time zone {zone}", _TZDATA
        ) from None
    known = np.nan_to_num(naive)
    hours, place = np.unique(np.floor_divide(known, 3600), return_inverse=True)
    shifts = [
        datetime.fromtimestamp(hour * 3600, UTC).replace(tzinfo=home).utcoffset() or timedelta()
        for hour in hours.tolist()
    ]
    return np.array([shift.total_seconds() for shift in shifts])[place]


def _rest(word: str) -> tuple[float, float | None]:
    """Return the fraction of a second and the zone's offset that follow a time."""
    digits = re.match(r"^\.\d+", word)
    fraction = float(digits.group()) if digits else 0.0
    zone = word[digits.end() :].strip() if digits else word.strip()
    if zone in _ZONES:
        return fraction, _ZONES[zone] * 3600.0
    found = _OFFSET.match(zone)
    if found is None:
        return fraction, None
    ahead = int(found[2]) * 3600.0 + int(found[3]) * 60.0
    return fraction, ahead if found[1] == "+" else -ahead


def _lenient(word: str) -> float | None:
    """Read a number with a unit behind it, such as `24GB`."""
    found = re.match(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?", word)
    return float(found.group()) if found else None


def _by_value(column: pa.Array, made: Callable[[str], float | None]) -> pa.Array:
    encoded = column.dictionary_encode()
    values = [None if word is None else made(word) for word in encoded.dictionary.to_pylist()]
    return pa.array(values, pa.float64()).take(encoded.indices)


def _floats(column: pa.Array) -> Floats:
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
