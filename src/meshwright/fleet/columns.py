"""Columns of pyarrow tables as NumPy arrays: floats, coded text, codes of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class CodedColumn(NamedTuple):
    """A column of text as numbers."""

    codes: Ints
    """Index of each row's text in `values`; -1 for null."""
    values: tuple[str, ...]

    def at(self, row: int) -> str:
        """Return the text of one row; empty for null."""
        code = int(self.codes[row])
        return self.values[code] if code >= 0 else ""

    def equals(self, *wanted: str) -> Flags:
        """Return which rows have one of these texts."""
        known = [place for place, value in enumerate(self.values) if value in wanted]
        return np.isin(self.codes, known)


def read_floats(table: Any, name: str) -> Floats:
    """Return a column of numbers; NaN for null and where the table has no such column."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return to_floats(table.column(name))


def read_text(table: Any, name: str) -> CodedColumn:
    """Return a column of text; null where the table has no such column."""
    if name not in table.column_names or not table.num_rows:
        return CodedColumn(np.full(table.num_rows, -1, dtype=np.int64), ())
    return encode_text(table.column(name))


def to_floats(column: pa.ChunkedArray) -> Floats:
    """Convert a column of numbers; NaN for null."""
    import pyarrow as pa

    cast = column.cast(pa.float64(), safe=False)
    return np.asarray(cast.to_numpy(zero_copy_only=False), dtype=np.float64)


def encode_text(column: pa.ChunkedArray) -> CodedColumn:
    """Number the texts of a column in order of first appearance."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array: Any = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # one without rows keeps its chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], pa.string())
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    codes = pc.fill_null(array.indices.cast(pa.int64()), -1)
    return CodedColumn(
        np.asarray(codes.to_numpy(zero_copy_only=False), dtype=np.int64),
        tuple("" if value is None else str(value) for value in array.dictionary.to_pylist()),
    )


def combine_codes(first: Ints, second: Ints, second_size: int) -> Ints:
    """Return one number for two codes; -1 in the second counts as a value of its own."""
    return first * (second_size + 1) + second + 1


def group_codes(*columns: Ints) -> Ints:
    """Number the distinct combinations of codes from 0; -1 where one of the codes is -1."""
    found = columns[0].copy()
    missing = found < 0
    for codes in columns[1:]:
        missing |= codes < 0
        found = np.unique(found * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1]
    found = found.astype(np.int64)
    found[missing] = -1
    return found


def group_rows(*columns: Any) -> Ints:
    """Number the distinct rows of some pyarrow columns from 0; null is a value like any other.

    The order is that of first appearance in the first column, then in the second, and so on.
    """
    if not columns:
        return np.zeros(0, dtype=np.int64)
    codes = []
    for column in columns:
        array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        encoded = array.dictionary_encode(null_encoding="encode")
        codes.append(np.asarray(encoded.indices, dtype=np.int64))
    return group_codes(*codes)
