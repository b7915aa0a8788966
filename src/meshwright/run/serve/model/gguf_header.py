"""The header of a GGUF file: metadata and tensors, read with every count checked against the file.

The reader of PyPI's `gguf` believes what a file claims: an array of 2**62 elements keeps it in a
loop without end, and each element costs it more than a kilobyte of memory. Here a count must fit
into the bytes that are left before anything is read, lists of numbers stay views of the file, and
the tensors' places must lie in the file without overlapping.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
"""Kinds of numbers, as letters of `struct`."""
_STRING, _ARRAY = 8, 9
_LEAST_VALUE_BYTES = 8 + 4 + 1
"""Of a metadata pair: the length of its key, the kind of its value, the value."""
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
"""Of a tensor's entry: the length of its name, the number of dimensions, the type, the place."""
_MOST_DIMENSIONS = 4
_MOST_KEY_BYTES = 65_535
_DEFAULT_ALIGNMENT = 32

MetadataValue = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]


class InvalidGguf(Exception):
    """The bytes are no GGUF file that this version reads."""


class GgufTensor(NamedTuple):
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """Rows first, as torch counts."""
    type_id: int
    """Number of the element type."""
    offset: int
    """First byte in the file."""
    size_bytes: int


class GgufHeader(NamedTuple):
    """What the file says before its data."""

    metadata: dict[str, MetadataValue]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads numbers and texts one after the other, never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    @property
    def bytes_left(self) -> int:
        return len(self.data) - self.at

    def require(self, count: int, each: int, what: str) -> None:
        """Refuse a count that the bytes left cannot hold."""
        if count * each > self.bytes_left:
            raise InvalidGguf(f"it claims {count:,} {what}, and {self.bytes_left:,} bytes are left")

    def number(self, letter: str) -> int:
        (value,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += struct.calcsize(f"<{letter}")
        return int(value)

    def text(self, most_bytes: int | None = None) -> str:
        size = self.number("Q")
        self.require(size, 1, "bytes of text")
        if most_bytes is not None and size > most_bytes:
            raise InvalidGguf(f"a key has {size:,} bytes, and {most_bytes:,} are allowed")
        piece = self.data[self.at : self.at + size]
        self.at += size
        return str(piece, "utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        """Pass over texts; nothing but their lengths is looked at."""
        data, at, end, length_of = self.data, self.at, len(self.data), struct.Struct("<Q")
        for _ in range(count):
            at += 8 + length_of.unpack_from(data, at)[0]
            if at > end:
                raise InvalidGguf("a text reaches beyond the end of the file")
        self.at = at


def iter_metadata(data: memoryview) -> Iterator[tuple[str, MetadataValue]]:
    """Yield metadata in the order of the file, as far as it is sound; raise where it is not."""
    cursor = _Cursor(data)
    with _as_invalid():
        _, pairs = _read_counts(cursor)
        for _ in range(pairs):
            yield _read_pair(cursor)


def read_header(data: memoryview, type_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Read and check the header; `type_sizes` has elements and bytes of a block by type."""
    cursor = _Cursor(data)
    with _as_invalid():
        tensors, pairs = _read_counts(cursor)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(pairs):
            key, value = _read_pair(cursor)
            if key in metadata:
                raise InvalidGguf(f"it has the key {key[:80]!r} twice")
            metadata[key] = value
        cursor.require(tensors, _LEAST_TENSOR_BYTES, "tensors")
        entries: dict[str, GgufTensor] = {}
        for _ in range(tensors):
            name, tensor = _read_tensor(cursor, type_sizes)
            if name in entries:
                raise InvalidGguf(f"it has the tensor {name[:80]!r} twice")
            entries[name] = tensor
    alignment = _alignment(metadata)
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, _place_tensors(entries, start, alignment, len(data)))


class _as_invalid:  # noqa: N801 - reads as a statement
    """Turns a number that is cut off by the end of the file into `InvalidGguf`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, struct.error):
            raise InvalidGguf("it breaks off in its header") from None


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Read what the file begins with; return how many tensors and metadata pairs it claims."""
    if bytes(cursor.data[: len(MAGIC)]) != MAGIC:
        raise InvalidGguf("it does not begin with GGUF")
    cursor.at = len(MAGIC)
    version = cursor.number("I")
    if version not in _VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big")
        if big_endian in _VERSIONS:
            raise InvalidGguf("it is written for big-endian machines")
        raise InvalidGguf(f"it has version {version}, and versions 2 and 3 are read")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    cursor.require(tensors, _LEAST_TENSOR_BYTES, "tensors")
    cursor.require(pairs, _LEAST_VALUE_BYTES, "metadata pairs")
    return tensors, pairs


def _read_pair(cursor: _Cursor) -> tuple[str, MetadataValue]:
    key, kind = cursor.text(_MOST_KEY_BYTES), cursor.number("I")
    if kind == _STRING:
        return key, cursor.text()
    if kind == _ARRAY:
        return key, _read_array(cursor, key)
    return key, _read_number(cursor, key, kind)


def _read_number(cursor: _Cursor, key: str, kind: int) -> int | float | bool:
    letter = _NUMBERS.get(kind)
    if letter is None:
        raise InvalidGguf(f"{key[:80]!r} has a value of the unknown kind {kind}")
    (value,) = struct.unpack_from(f"<{letter}", cursor.data, cursor.at)
    cursor.at += struct.calcsize(f"<{letter}")
    number: int | float | bool = value
    return number


def _read_array(cursor: _Cursor, key: str) -> MetadataValue:
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _ARRAY:
        raise InvalidGguf(f"{key[:80]!r} is a list of lists, which is not read here")
    if kind == _STRING:
        cursor.require(count, 8, "texts")
        start = cursor.at
        cursor.skip_texts(count)
        return GgufTexts(cursor.data[start : cursor.at], count)
    letter = _NUMBERS.get(kind)
    if letter is None:
        raise InvalidGguf(f"{key[:80]!r} is a list of the unknown kind {kind}")
    width = struct.calcsize(f"<{letter}")
    cursor.require(count, width, "numbers")
    piece = cursor.data[cursor.at : cursor.at + count * width]
    cursor.at += count * width
    numbers: Any = piece
    return cast(Sequence[int] | Sequence[float], numbers.cast(letter))


class GgufTexts(Sequence[str]):
    """A list of texts, decoded when it is asked for."""

    def __init__(self, data: memoryview, count: int) -> None:
        self._data, self._count = data, count
        self._texts: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int | slice) -> "str | Sequence[str]":  # type: ignore[override]
        return self._decoded()[place]

    def _decoded(self) -> list[str]:
        if self._texts is None:
            cursor = _Cursor(self._data)
            self._texts = [cursor.text() for _ in range(self._count)]
        return self._texts


def _read_tensor(
    cursor: _Cursor, type_sizes: Mapping[int, tuple[int, int]]
) -> tuple[str, GgufTensor]:
    """Read a tensor's entry; its place is counted from the begin of the data."""
    name, dimensions = cursor.text(_MOST_KEY_BYTES), cursor.number("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise InvalidGguf(f"tensor {name[:80]!r} has {dimensions:,} dimensions, not 1 to 4")
    columns_first = tuple(cursor.number("Q") for _ in range(dimensions))
    type_id, offset = cursor.number("I"), cursor.number("Q")
    if type_id not in type_sizes:
        raise InvalidGguf(f"tensor {name[:80]!r} has the unknown type {type_id}")
    per_block, block_bytes = type_sizes[type_id]
    if columns_first[0] % per_block:
        what = f"rows of {columns_first[0]:,}, not a multiple of {per_block}"
        raise InvalidGguf(f"tensor {name[:80]!r} has {what}")
    size = math.prod(columns_first) // per_block * block_bytes
    return name, GgufTensor(columns_first[::-1], type_id, offset, size)


def _alignment(metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 1 or value & (value - 1):
        raise InvalidGguf(f"general.alignment is {str(value)[:40]}, which is no power of two")
    return value


def _place_tensors(
    entries: Mapping[str, GgufTensor], start: int, alignment: int, file_bytes: int
) -> dict[str, GgufTensor]:
    """Return the tensors with their places in the file: within it, and apart from each other."""
    placed: dict[str, GgufTensor] = {}
    for name, tensor in entries.items():
        if tensor.offset % alignment:
            raise InvalidGguf(f"tensor {name[:80]!r} does not begin at a multiple of {alignment}")
        if start + tensor.offset + tensor.size_bytes > file_bytes:
            raise InvalidGguf(f"tensor {name[:80]!r} reaches beyond the end of the file")
        placed[name] = tensor._replace(offset=start + tensor.offset)
    end, before = 0, ""
    for name, tensor in sorted(placed.items(), key=lambda item: item[1][2:]):
        if tensor.size_bytes and tensor.offset < end:
            raise InvalidGguf(f"tensors {before[:80]!r} and {name[:80]!r} share bytes")
        end, before = max(end, tensor.offset + tensor.size_bytes), name
    return placed
