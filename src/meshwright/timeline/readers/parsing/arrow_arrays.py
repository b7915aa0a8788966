"""Arrow arrays of numpy's, without the detour by which pyarrow imports pandas where it finds it.

`pyarrow.array` looks whether it was given something of pandas and imports it for that, which takes
longer than reading a rank's trace. Buffers are handed over as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.timeline.columns import LABEL_TYPE, chunks_to_numpy
from meshwright.timeline.schema import ABSENT, Column

_TYPES = {
    np.dtype(np.int32): pa.int32(),
    np.dtype(np.int64): pa.int64(),
    np.dtype(np.float64): pa.float64(),
}


def to_number_array(values: npt.NDArray[Any], *, nullable: bool = False) -> Any:
    """Numbers as an Arrow array; a nullable one has no value where it is -1."""
    values = np.ascontiguousarray(values)
    validity, missing = (None, 0) if not nullable else _validity(values)
    buffers = [validity, pa.py_buffer(values)]
    return pa.Array.from_buffers(_TYPES[values.dtype], len(values), buffers, missing)


def to_bool_array(values: npt.NDArray[np.bool_]) -> Any:
    """Truth values as an Arrow array."""
    buffers = [None, pa.py_buffer(np.packbits(values, bitorder="little"))]
    return pa.Array.from_buffers(pa.bool_(), len(values), buffers, 0)


def integers_to_numpy(array: Any) -> npt.NDArray[np.int64]:
    """Arrow's integers as numpy's, -1 where there is none."""
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    return chunks_to_numpy(chunks, str(array.type)).astype(np.int64, copy=False)


def take_rows(column: Any, rows: npt.NDArray[Any]) -> Any:
    """Some rows of a column in chunks, as one array.

    Chunk by chunk: Arrow's own way copies the whole column first, whatever few rows are wanted.
    """
    if not column.num_chunks:
        return pa.nulls(0, column.type)
    order = None
    if np.any(rows[1:] < rows[:-1]):
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    cuts = [0, *np.searchsorted(rows, ends).tolist()]
    begins = [0, *ends.tolist()]
    parts = [
        chunk.take(
            to_number_array((rows[cuts[place] : cuts[place + 1]] - begins[place]).astype(np.int64))
        )
        for place, chunk in enumerate(column.chunks)
        if cuts[place + 1] > cuts[place] or not place
    ]
    whole = pa.concat_arrays(parts)
    if order is None:
        return whole
    back = np.empty(order.size, dtype=np.int64)
    back[order] = np.arange(order.size)
    return whole.take(to_number_array(back))


def to_string_array(values: Sequence[str]) -> Any:
    """Strings as an Arrow array; what UTF-8 cannot hold becomes a question mark."""
    encoded = [value.encode(errors="replace") for value in values]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers, 0)


def to_dictionary_array(codes: npt.NDArray[np.int32], values: Sequence[str]) -> Any:
    """Labels by their codes; no value where the code is -1."""
    codes = np.ascontiguousarray(codes, dtype=np.int32)
    indices = to_number_array(codes, nullable=True)
    return pa.DictionaryArray.from_arrays(indices, to_string_array(values), safe=False)


def build_arrow_table(arrays: Mapping[str, Any], columns: Mapping[str, Column]) -> pa.Table:
    """The table of these columns; an optional one that says nothing is left out."""
    kept = {
        name: arrays[name]
        for name, column in columns.items()
        if name in arrays and not (column.nullable and arrays[name].null_count == len(arrays[name]))
    }
    fields = [
        pa.field(name, array.type, nullable=columns[name].nullable) for name, array in kept.items()
    ]
    assert all(field.type in {LABEL_TYPE, pa.string(), *_TYPES.values()} for field in fields)
    return pa.table(list(kept.values()), schema=pa.schema(fields))


def _validity(values: npt.NDArray[Any]) -> tuple[Any, int]:
    present = values != ABSENT
    missing = len(values) - int(np.count_nonzero(present))
    if not missing:
        return None, 0
    return pa.py_buffer(np.packbits(present, bitorder="little")), missing
