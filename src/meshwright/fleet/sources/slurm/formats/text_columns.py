"""Columns of Slurm's text turned into numbers, whole columns at once."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Floats = npt.NDArray[np.float64]
_UNITS: Final = pa.array(["", "K", "M", "G", "T", "P"])
_FACTORS: Final = np.array([1.0, 2.0**10, 2.0**20, 2.0**30, 2.0**40, 2.0**50])
_SPAN: Final = r"^(?:(?P<d>\d+)-)?(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+(?:\.\d+)?)$"


def to_floats(column: pa.ChunkedArray | pa.Array) -> Floats:
    """Return numbers, NaN where there is none."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    values: Floats = np.array(
        pc.fill_null(pc.cast(column, pa.float64()), float("nan")), dtype=np.float64
    )
    return values


def to_arrow(values: npt.ArrayLike) -> pa.Array:
    """Return numbers as Arrow's, null where they are NaN."""
    return pa.array(np.asarray(values, dtype=np.float64), pa.float64(), from_pandas=True)


def parse_numbers(text: pa.ChunkedArray | pa.Array) -> Floats:
    """Read plain numbers; whatever is none is NaN."""
    plain = pc.match_substring_regex(text, r"^\d+(\.\d+)?$")
    return to_floats(pc.if_else(plain, text, pa.scalar(None, pa.string())))


def parse_sizes(text: pa.ChunkedArray | pa.Array, bare: float, key: str = "") -> Floats:
    """Read sizes in bytes: of the whole field, or behind `key=` in a list of resources."""
    head = rf"(?:^|,){key}=" if key else "^"
    found = pc.extract_regex(text, head + r"(?P<n>\d+(?:\.\d+)?)(?P<u>[KMGTP]?)")
    amount = to_floats(pc.struct_field(found, "n"))
    unit = pc.index_in(pc.struct_field(found, "u"), value_set=_UNITS)
    which = np.array(pc.fill_null(combine_chunks(unit), 0), dtype=np.int64)
    factor = np.where(which == 0, bare, _FACTORS[which])
    result: Floats = amount * factor
    return result


def parse_durations(text: pa.ChunkedArray | pa.Array) -> Floats:
    """Read spans such as `1-02:03:04`, `02:03` or `00:02.447` in seconds."""
    found = pc.extract_regex(text, _SPAN)
    parts = []
    for name in "dhms":
        part = pc.struct_field(found, name)
        empty = pc.equal(part, "")
        parts.append(to_floats(pc.if_else(empty, pa.scalar("0"), part)))
    days, hours, minutes, seconds = parts
    result: Floats = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return result


def parse_distinct(
    text: pa.ChunkedArray | pa.Array, read: Callable[[str], Sequence[Any]], types: Sequence[Any]
) -> list[pa.Array]:
    """Read every text that occurs once, and return a column for each thing it tells."""
    coded = combine_chunks(text)
    coded = coded if pa.types.is_dictionary(coded.type) else pc.dictionary_encode(coded)
    told = [read(value) for value in coded.dictionary.to_pylist()]
    columns = zip(*told, strict=True) if told else [()] * len(types)
    return [
        pa.array(list(column), kind).take(coded.indices)
        for column, kind in zip(columns, types, strict=True)
    ]


def drop_placeholders(text: pa.ChunkedArray | pa.Array, *nothing: str) -> pa.Array:
    """Return text with null where it is empty or one of the words for nothing."""
    text = combine_chunks(text)
    empty = pc.is_in(text, value_set=pa.array(["", *nothing], pa.string()))
    return pc.if_else(empty, pa.scalar(None, pa.string()), text)


def combine_chunks(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column in one piece."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
