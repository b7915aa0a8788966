"""Mutations that keep a file's syntax valid, so that the search gets past the parser.

libFuzzer mutates bytes; most such mutants of JSON, pickles, Parquet and framed headers fail at the
first check. These change one value and write the file anew. They take turns with libFuzzer's own.
"""

import io
import json
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from meshwright.errors import InputError
from meshwright.timeline.readers.safe_pickle.safe_pickle import parse_pickle
from scripts.fuzzing.mutations import NUMBERS, ODD, as_json, as_pickle, spoiled_bytes, spoiled_value

Mutator = Callable[[bytes, random.Random], bytes | None]
"""Returns a mutant, or None where the bytes cannot be parsed."""
_WRITE_FAULTS = (ValueError, TypeError, RecursionError, OverflowError, AttributeError)


def mutate_json(data: bytes, rng: random.Random) -> bytes | None:
    """Change some values of a JSON document."""
    try:
        value = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = spoiled_value(value, rng)
        return as_json(value, rng)
    except _WRITE_FAULTS:
        return None


def mutate_json_lines(data: bytes, rng: random.Random) -> bytes | None:
    """Change one line of JSON lines."""
    lines = data.splitlines() or [b"{}"]
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng) or spoiled_bytes(lines[at], rng)
    return b"\n".join(lines)


def mutate_text(data: bytes, rng: random.Random) -> bytes | None:
    """Replace one number or word of a text."""
    words = data.split(b" ")
    at = rng.randrange(len(words))
    words[at] = str(rng.choice((*NUMBERS, *ODD))).encode("utf-8", "replace")[:200]
    return b" ".join(words)


def mutate_pickle(data: bytes, rng: random.Random) -> bytes | None:
    """Change some values of a pickle and write it with another protocol."""
    try:
        value = parse_pickle(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = spoiled_value(value, rng)
        return as_pickle(value, rng)
    except (*_WRITE_FAULTS, InputError, pickle.PicklingError):
        return None


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes | None:
    """Change a value of the header and frame it with its new length."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = mutate_json(data[8 : 8 + length], rng)
    except (struct.error, OverflowError):
        return None
    if header is None:
        return None
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


_TYPES = (
    pa.int8(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.string(), pa.large_string(),
    pa.binary(), pa.bool_(), pa.timestamp("ns"), pa.timestamp("s", "UTC"), pa.date32(),
    pa.duration("us"), pa.decimal128(38, 3), pa.list_(pa.int32()), pa.list_(pa.string()),
    pa.struct([("a", pa.int32())]), pa.dictionary(pa.int32(), pa.string()), pa.null(),
    pa.map_(pa.string(), pa.int64()), pa.time64("ns"), pa.binary(4),
)  # fmt: skip


def mutate_parquet(data: bytes, rng: random.Random) -> bytes | None:
    """Change a column's type, name, values or place, and write the file anew."""
    try:
        table = pq.read_table(io.BytesIO(data))
        for _ in range(rng.choice((1, 1, 2))):
            table = _change_column(table, rng)
        written = io.BytesIO()
        pq.write_table(
            table, written, use_dictionary=rng.random() < 0.5, write_statistics=rng.random() < 0.8,
            compression=rng.choice(("none", "snappy", "zstd", "gzip", "brotli")),
            row_group_size=rng.choice((1, 3, 1000)), store_schema=rng.random() < 0.5,
            data_page_version=rng.choice(("1.0", "2.0")),
            allow_truncated_timestamps=True,
        )  # fmt: skip
    except (*_WRITE_FAULTS, pa.ArrowException, OSError, KeyError):
        return None
    return written.getvalue()


def _change_column(table: pa.Table, rng: random.Random) -> pa.Table:
    if not table.num_columns:
        return table.append_column("added", pa.nulls(table.num_rows, pa.int64()))
    at = rng.randrange(table.num_columns)
    name, column, way = table.column_names[at], table.column(at), rng.random()
    if way < 0.1:
        return table.remove_column(at)
    if way < 0.2:
        other = rng.choice(("time_s", "rank", "x" * 300, "", "node", name, "a.b", "\x1b[2J"))
        return table.rename_columns(
            [*table.column_names[:at], other, *table.column_names[at + 1 :]]
        )
    if way < 0.3:
        return pa.concat_tables([table] * rng.choice((2, 5, 50)))
    if way < 0.4:
        metadata = {
            key: rng.choice((b"", b"{", b"7", b"\xff")) for key in table.schema.metadata or {}
        }
        return table.replace_schema_metadata(metadata)
    if way < 0.6:
        made: Any = pa.nulls(table.num_rows, rng.choice(_TYPES))
    elif way < 0.8:
        made = _cast(column, rng)
    else:
        values = column.to_pylist()
        for _ in range(min(len(values), 3)):
            values[rng.randrange(len(values))] = rng.choice((*NUMBERS, *ODD))
        made = _array(values, column.type)
    return table.set_column(at, name, made)


def _cast(column: Any, rng: random.Random) -> Any:
    kind = rng.choice(_TYPES)
    try:
        return column.cast(kind, safe=False)
    except pa.ArrowException:
        return pa.nulls(len(column), kind)


def _array(values: list[Any], kind: pa.DataType) -> Any:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, *_WRITE_FAULTS):
        return pa.array([str(value)[:100] for value in values])


def mutate_arrow(data: bytes, rng: random.Random) -> bytes | None:
    """Change a column of one of the streams of a file and write the streams anew."""
    try:
        source = pa.BufferReader(data)
        tables = [pa.ipc.open_stream(source).read_all() for _ in range(2)]
        at = rng.randrange(len(tables))
        tables[at] = _change_column(tables[at], rng)
        written = io.BytesIO()
        for table in tables:
            with pa.ipc.new_stream(written, table.schema) as stream:
                stream.write_table(table)
    except (*_WRITE_FAULTS, pa.ArrowException, OSError, KeyError):
        return None
    return written.getvalue()
