"""Turns what a caller gives into checked Arrow columns, and Arrow columns into numpy.

Every value that enters a timeline from outside passes here once: lists, numpy arrays, Arrow arrays,
`DictionaryColumn` strings or one value for all rows. All problems are listed together. Knows the
schema; does not know files.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.timeline.schema import ABSENT, Column, ColumnType, SpanKind

LABEL_TYPE = pa.dictionary(pa.int32(), pa.string())
_ARROW: dict[ColumnType, Any] = {
    ColumnType.INT32: pa.int32(),
    ColumnType.INT64: pa.int64(),
    ColumnType.FLOAT64: pa.float64(),
    ColumnType.LABEL: LABEL_TYPE,
    ColumnType.TEXT: pa.string(),
}
_JSON_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = "give strings that UTF-8 can hold"
_INT64_MAX = int(np.iinfo(np.int64).max)


class DictionaryColumn(NamedTuple):
    """Strings as numbers: row i says `values[codes[i]]`, or nothing where the code is -1."""

    codes: npt.NDArray[Any]
    """One integer per row."""
    values: Sequence[str]
    """The distinct strings."""


class _Bad(Exception):
    """A column cannot be used; carries what is wrong and what would mend it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def arrow_schema(columns: Iterable[Column], metadata: Mapping[str, str] | None = None) -> pa.Schema:
    """The Arrow schema of these columns."""
    fields = [pa.field(c.name, _ARROW[c.type], nullable=c.nullable) for c in columns]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)


def build_table(given: Mapping[str, object], columns: Mapping[str, Column], what: str) -> pa.Table:
    """Check the given columns and make a table of them.

    Optional columns that were not given are left out of the table; those with a default are
    filled. Raises `InputError` with every problem found.
    """
    problems = [
        build_unknown_name_problem("column", name, columns, what)
        for name in given
        if name not in columns
    ]
    problems += [
        Problem(f"{what}.{column.name}", "is missing", f"give {column.name}: {column.description}")
        for column in columns.values()
        if column.required and column.name not in given
    ]
    known = {name: value for name, value in given.items() if name in columns}
    rows, length_problems = _common_length(known, what)
    problems += length_problems
    arrays: dict[str, Any] = {}
    for column in columns.values():
        if column.name not in known and column.nullable:
            continue
        value = known.get(column.name, column.default)
        if value is None and column.required and column.name not in known:
            continue
        try:
            arrays[column.name] = _array(column, value, rows)
        except _Bad as bad:
            problems.append(Problem(f"{what}.{column.name}", bad.what, bad.fix))
    if not problems:
        problems += _check_ends(arrays, what)
    if problems:
        raise InputError(problems)
    schema = arrow_schema(columns[name] for name in columns if name in arrays)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def add_missing_columns(table: pa.Table, columns: Iterable[Column]) -> pa.Table:
    """The table with every column in schema order; those it lacks are null throughout."""
    schema = arrow_schema(columns)
    arrays = [
        table.column(field.name)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)


def cast_to_schema(table: pa.Table, columns: Mapping[str, Column]) -> pa.Table:
    """The table's known columns with our types, for a file that another tool may have written."""
    names = [name for name in columns if name in table.column_names]
    schema = arrow_schema(columns[name] for name in names)
    arrays = []
    for field in schema:
        array = table.column(field.name)
        if field.type == LABEL_TYPE and not pa.types.is_dictionary(array.type):
            array = array.cast(pa.string()).dictionary_encode()
        array = array if array.type == field.type else array.cast(field.type)
        if array.null_count and not field.nullable:
            raise pa.ArrowInvalid(f"column {field.name} has {array.null_count} rows without value")
        arrays.append(array)
    return pa.table(arrays, schema=schema)


def to_numpy(table: pa.Table, column: Column) -> npt.NDArray[Any]:
    """A number column as numpy; -1 where an integer has no value."""
    if column.name not in table.column_names:
        return np.full(table.num_rows, ABSENT, dtype=column.type.value)
    return chunks_to_numpy(table.column(column.name).chunks, column.type.value)


def to_dictionary(table: pa.Table, column: Column) -> DictionaryColumn:
    """A string column as codes and distinct values."""
    if column.name not in table.column_names:
        return DictionaryColumn(np.full(table.num_rows, ABSENT, dtype=np.int32), ())
    array = table.column(column.name)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    array = array.unify_dictionaries()
    # Arrow copies to combine, even where there is only one chunk.
    whole = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # Older pyarrow returns one for zero chunks.
        return DictionaryColumn(np.empty(0, dtype=np.int32), ())
    return DictionaryColumn(
        chunks_to_numpy([whole.indices], "int32"), tuple(whole.dictionary.to_pylist())
    )


def chunks_to_numpy(chunks: Sequence[Any], dtype: str) -> npt.NDArray[Any]:
    """Arrow numbers as numpy, -1 where there is none, sharing memory where nothing is missing.

    By the buffers: Arrow's own conversion imports pandas wherever that is installed, which takes
    longer than reading a trace.
    """
    parts = []
    for chunk in chunks:
        if not len(chunk):
            continue
        valid, values = chunk.buffers()
        rows = slice(chunk.offset, chunk.offset + len(chunk))
        part = np.frombuffer(values, dtype=dtype)[rows]
        if chunk.null_count:
            bits = np.unpackbits(np.frombuffer(valid, dtype=np.uint8), bitorder="little")
            given = bits[rows].view(np.bool_)
            # Our own arrays hold -1 where they have no value: then there is nothing to fill in.
            if not np.array_equal(part != ABSENT, given):
                part = np.where(given, part, np.dtype(dtype).type(ABSENT))
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | np.generic)


def _common_length(given: Mapping[str, object], what: str) -> tuple[int, list[Problem]]:
    """The number of rows that the columns agree on."""
    lengths: dict[str, int] = {}
    problems = []
    for name, value in given.items():
        if _is_scalar(value):
            continue
        rows = value.codes if isinstance(value, DictionaryColumn) else value
        try:
            lengths[name] = len(rows)  # type: ignore[arg-type]
        except TypeError:
            fix = "give a list, a numpy array, an Arrow array, or one value for all rows"
            problems.append(Problem(f"{what}.{name}", f"is a {type(value).__name__}", fix))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {rows}" for name, rows in lengths.items())
        fix = "give every column as many rows, or one value for all rows"
        problems.append(Problem(what, f"columns have unequal lengths: {listed}", fix))
    return max(lengths.values(), default=0 if not given else 1), problems


def _array(column: Column, value: Any, rows: int) -> Any:
    if column.is_string:
        array = _strings(column, value, rows)
        _check_strings(column, array)
    else:
        array = _numbers(column, value, rows)
    if array.null_count and not column.nullable:
        first = int(np.flatnonzero(pc.is_null(array).to_numpy(zero_copy_only=False))[0])
        fault = f"{array.null_count} rows have no value, first at row {first}"
        raise _Bad(fault, f"give every row its {column.name}")
    return array


def _strings(column: Column, value: Any, rows: int) -> Any:
    """A label or text column as one Arrow array."""
    if isinstance(value, DictionaryColumn):
        array = _from_coded(value)
    elif value is None or isinstance(value, str):
        codes = np.full(rows, ABSENT if value is None else 0, dtype=np.int32)
        array = _from_coded(DictionaryColumn(codes, () if value is None else (str(value),)))
    else:
        try:
            array = _one_array(value, pa.string())
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise _Bad(f"holds something that is not text: {error}", _TEXT) from error
    if column.type is ColumnType.TEXT:
        return array.cast(pa.string())
    if not pa.types.is_dictionary(array.type):
        array = array.cast(pa.string()).dictionary_encode()
    return array if array.type == LABEL_TYPE else array.cast(LABEL_TYPE)


def _from_coded(value: DictionaryColumn) -> Any:
    codes = np.asarray(value.codes)
    if codes.size and not np.issubdtype(codes.dtype, np.integer):
        raise _Bad(f"codes are {codes.dtype}", "give integer codes")
    outside = (codes < ABSENT) | (codes >= len(value.values))
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise _Bad(
            f"code {codes[row]} at row {row} is outside the {len(value.values)} values",
            "use 0 to the number of values - 1, or -1 for no value",
        )
    try:
        values = pa.array([str(text) for text in value.values], pa.string())
    except UnicodeEncodeError as error:
        raise _Bad(f"holds something that is not text: {error}", _TEXT) from error
    absent = codes == ABSENT
    indices = pa.array(codes.astype(np.int32, copy=False), mask=absent if absent.any() else None)
    return pa.DictionaryArray.from_arrays(indices, values)


def _check_strings(column: Column, array: Any) -> None:
    if column.name == "kind":
        unknown = sorted(set(array.dictionary.to_pylist()) - set(SpanKind))
        if unknown:
            found = build_unknown_name_problem(
                "kind", str(unknown[0]), [kind.value for kind in SpanKind]
            )
            raise _Bad("; ".join(f"there is no kind {name!r}" for name in unknown), found.fix)
    if column.name == "extra":
        for text in array.unique().to_pylist():
            try:
                if text is not None:
                    _JSON_OBJECT.decode(text)
            except msgspec.MsgspecError as error:
                fault = f"{text[:80]!r} is not a JSON object: {error}"
                raise _Bad(fault, 'give text such as {"peer": 3}') from error


def _numbers(column: Column, value: Any, rows: int) -> Any:
    """A number column as one Arrow array, exact or refused."""
    arrow_type = _ARROW[column.type]
    if isinstance(value, str):
        raise _Bad(f"is the text {value!r}", "give integers")
    if _is_scalar(value):
        value = [None] * rows if value is None else np.full(rows, value)
    try:
        array = _one_array(value, None)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _Bad(f"holds something that is not a number: {error}", "give integers") from error
    if pa.types.is_null(array.type):
        return array.cast(arrow_type)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise _Bad(f"holds {array.type}, not numbers", "give integers")
    if pa.types.is_floating(array.type):
        _check_finite(array)
    if column.nullable and pc.any(pc.equal(array, ABSENT)).as_py():
        array = pc.if_else(pc.equal(array, ABSENT), pa.scalar(None, array.type), array)
    try:
        array = array.cast(arrow_type)
    except pa.ArrowInvalid as error:
        raise _Bad(
            f"does not fit {column.type}: {error}", "round to whole numbers within its range"
        ) from error
    _check_least(column, array)
    return array


def _one_array(value: Any, arrow_type: Any) -> Any:
    """One contiguous Arrow array of what was given."""
    if isinstance(value, pa.ChunkedArray):
        value = value.unify_dictionaries() if pa.types.is_dictionary(value.type) else value
        value = value.combine_chunks() if value.num_chunks != 1 else value.chunk(0)
    if isinstance(value, pa.ChunkedArray):  # Older pyarrow returns one for zero chunks.
        value = pa.array([], value.type)
    if isinstance(value, pa.Array):
        return value
    if not isinstance(value, np.ndarray) and not isinstance(value, Sequence):
        value = np.asarray(value)
    return pa.array(value, arrow_type)


def _check_finite(array: Any) -> None:
    finite = pc.fill_null(pc.is_finite(array), fill_value=True).to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(~finite)
    if bad.size:
        raise _Bad(
            f"{bad.size} rows are NaN or infinite, first at row {bad[0]}",
            "use -1 for no value where a column may be left out",
        )


def _check_least(column: Column, array: Any) -> None:
    if column.minimum is None or not len(array):
        return
    smallest = pc.min(array).as_py()
    if smallest is not None and smallest < column.minimum:
        below = pc.fill_null(pc.less(array, column.minimum), fill_value=False)
        where = np.flatnonzero(below.to_numpy(zero_copy_only=False))
        raise _Bad(
            f"{where.size} rows are below {column.minimum}, "
            f"first {array[int(where[0])].as_py()} at row {where[0]}",
            f"give {column.minimum} or more" + (", or -1 for no value" if column.nullable else ""),
        )


def _check_ends(arrays: Mapping[str, Any], what: str) -> list[Problem]:
    """No span may end after the largest time that int64 holds."""
    if "duration_ns" not in arrays or not len(arrays["start_ns"]):
        return []
    start, duration = (arrays[name].to_numpy() for name in ("start_ns", "duration_ns"))
    late = np.flatnonzero(start > _INT64_MAX - duration)
    if not late.size:
        return []
    row = late[0]
    fault = f"start {start[row]} plus duration {duration[row]} at row {row} exceeds int64 ns"
    return [Problem(f"{what}.duration_ns", fault, "give times in ns that end before 2**63")]
