"""Parquet footers as values: shifted to another place in a file, and joined into one.

A Parquet file ends with a footer that says where each column of each row group lies. Arrow can
write and read footers but not move them, which a file that grows by segments needs. The footer
is a Thrift struct in the compact protocol (Thrift's `thrift-compact-protocol.md`); the field
numbers are those of `parquet.thrift` in apache/parquet-format.

Our footers are sealed: one of their key-value pairs is a checksum of all the rest, because Arrow
ends the whole process over some corrupt footers. Knows bytes only, no files.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = {4, 5, 6}

# FileMetaData, RowGroup, ColumnChunk and ColumnMetaData in parquet.thrift.
_NUM_ROWS, _ROW_GROUPS, _KEY_VALUES = 3, 4, 5
_GROUP_COLUMNS, _GROUP_OFFSET, _GROUP_ORDINAL = 1, 5, 7
_CHUNK_META, _CHUNK_OFFSETS = 3, (2, 4, 6)
_META_OFFSETS = (9, 10, 11, 14)

_SEAL = b"meshwright.crc32"
_NO_SUM = b"00000000"

# A struct is {field number: (type, value)}; a list is (element type, [values]).
Fields = dict[int, tuple[int, Any]]


class InvalidFooter(ValueError):
    """These bytes are not a Parquet footer."""


class _Reader:
    """Decodes compact-protocol values from bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
        return value

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise InvalidFooter("a number is longer than 64 bits")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def raw(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise InvalidFooter("a value is longer than the footer")
        self.at += length
        return self.data[self.at - length : self.at]

    def value(self, kind: int) -> Any:
        if kind in _INTEGERS:
            return self.integer()
        if kind == _BINARY:
            return self.raw(self.varint())
        if kind == _STRUCT:
            return self.fields()
        if kind in {_LIST, _SET}:
            head = self.byte()
            size = head >> 4 if head < 0xF0 else self.varint()
            if size > len(self.data):
                raise InvalidFooter("a list is longer than the footer")
            return head & 0x0F, [self.value(head & 0x0F) for _ in range(size)]
        if kind == _DOUBLE:
            return self.raw(8)
        if kind in {_TRUE, _FALSE, _BYTE}:  # A list holds each boolean as one byte.
            return self.byte()
        raise InvalidFooter(f"there is no Thrift type {kind}")

    def fields(self) -> Fields:
        fields: Fields = {}
        number = 0
        while head := self.byte():
            kind = head & 0x0F
            before, number = number, number + (head >> 4) if head >> 4 else self.integer()
            if number <= before:
                raise InvalidFooter("fields are out of order")
            # A boolean field is its own type and carries no value.
            fields[number] = (kind, None if kind in {_TRUE, _FALSE} else self.value(kind))
        return fields


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(value: int) -> bytes:
    return _varint((value << 1) ^ (value >> 63))


def _encode(kind: int, value: Any) -> bytes:
    if kind in _INTEGERS:
        return _integer(value)
    if kind == _BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == _STRUCT:
        return _encode_fields(value)
    if kind in {_LIST, _SET}:
        element, values = value
        size = len(values)
        head = bytes([size << 4 | element]) if size < 15 else bytes([0xF0 | element])
        return (
            head
            + (b"" if size < 15 else _varint(size))
            + b"".join(_encode(element, item) for item in values)
        )
    if kind == _DOUBLE:
        return bytes(value)
    return bytes([value])


def _encode_fields(fields: Fields) -> bytes:
    out = []
    last = 0
    for number in sorted(fields):
        kind, value = fields[number]
        delta = number - last
        out.append(bytes([delta << 4 | kind]) if delta < 16 else bytes([kind]) + _integer(number))
        if kind not in {_TRUE, _FALSE}:
            out.append(_encode(kind, value))
        last = number
    out.append(b"\0")
    return b"".join(out)


def decode_footer(data: bytes) -> Fields:
    """Read a footer; raises `InvalidFooter` where the bytes are none."""
    reader = _Reader(data)
    try:
        fields = reader.fields()
        if reader.at != len(data):
            raise InvalidFooter("bytes are left over after the footer")
        for group in _groups(fields):
            for chunk in _chunks(group):
                if not isinstance(chunk[_CHUNK_META][1], dict):
                    raise InvalidFooter("a column has no metadata")
        if not isinstance(fields[_NUM_ROWS][1], int):
            raise InvalidFooter("there is no row count")
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InvalidFooter(str(error)) from error
    return fields


def encode_footer(fields: Fields) -> bytes:
    """Write a footer with its length and closing magic, ready to end a file."""
    data = _encode_fields(fields)
    return data + struct.pack("<I", len(data)) + b"PAR1"


def encode_with_checksum(fields: Fields) -> bytes:
    """Write a footer like `encode_footer`, with a checksum inside."""
    data = encode_footer(set_key_value(drop_key_value(fields, _SEAL), _SEAL, _NO_SUM))
    at = _sum_at(data)
    return data[:at] + _sum(data[:-8]) + data[at + len(_NO_SUM) :]


def verify_checksum(data: bytes) -> bool | None:
    """Whether the checksum in a footer is right; None where someone else wrote the footer."""
    at = _sum_at(data)
    if at < 0:
        return None
    whole = data[:at] + _NO_SUM + data[at + len(_NO_SUM) :]
    return _sum(whole) == data[at : at + len(_NO_SUM)]


def _sum(data: bytes) -> bytes:
    return b"%08x" % zlib.crc32(data)


def _sum_at(data: bytes) -> int:
    """Where the checksum's digits are; the last key that looks like it is the one."""
    # The value follows its key as field 2, a string of 8 bytes.
    mark = _SEAL + bytes([1 << 4 | _BINARY, len(_NO_SUM)])
    found = data.rfind(mark)
    return -1 if found < 0 else found + len(mark)


def _groups(fields: Fields) -> list[Fields]:
    groups: list[Fields] = fields[_ROW_GROUPS][1][1]
    return groups


def _chunks(group: Fields) -> list[Fields]:
    chunks: list[Fields] = group[_GROUP_COLUMNS][1][1]
    return chunks


def _shift_fields(fields: Fields, numbers: Sequence[int], by: int) -> Fields:
    """The struct with its offsets moved; 0 and negative values mean "not there"."""
    moved = dict(fields)
    for number in numbers:
        if number in moved and moved[number][1] > 0:
            moved[number] = (moved[number][0], moved[number][1] + by)
    return moved


def shift_offsets(fields: Fields, by: int) -> Fields:
    """The footer for the same row groups, lying `by` bytes further on in the file."""
    groups = []
    for group in _groups(fields):
        chunks = []
        for chunk in _chunks(group):
            moved = _shift_fields(chunk, _CHUNK_OFFSETS, by)
            kind, meta = moved[_CHUNK_META]
            moved[_CHUNK_META] = (kind, _shift_fields(meta, _META_OFFSETS, by))
            chunks.append(moved)
        moved_group = _shift_fields(group, (_GROUP_OFFSET,), by)
        # The ordinal is optional and would no longer count from the file's first group.
        moved_group.pop(_GROUP_ORDINAL, None)
        moved_group[_GROUP_COLUMNS] = (_LIST, (_STRUCT, chunks))
        groups.append(moved_group)
    return {**fields, _ROW_GROUPS: (_LIST, (_STRUCT, groups))}


def join_footers(footers: Sequence[Fields]) -> Fields:
    """One footer for the row groups of all.

    Schema and pairs are those of the last: who continues a file may add to what it says.
    """
    groups = [group for fields in footers for group in _groups(fields)]
    rows = sum(int(fields[_NUM_ROWS][1]) for fields in footers)
    return {
        **footers[-1],
        _NUM_ROWS: (footers[-1][_NUM_ROWS][0], rows),
        _ROW_GROUPS: (_LIST, (_STRUCT, groups)),
    }


def read_key_values(fields: Fields) -> dict[bytes, bytes]:
    """The key-value metadata."""
    if _KEY_VALUES not in fields:
        return {}
    return {pair[1][1]: pair[2][1] for pair in fields[_KEY_VALUES][1][1] if 2 in pair}


def set_key_value(fields: Fields, key: bytes, value: bytes) -> Fields:
    """The footer with one more key-value pair."""
    listed = list(fields[_KEY_VALUES][1][1]) if _KEY_VALUES in fields else []
    listed.append({1: (_BINARY, key), 2: (_BINARY, value)})
    return {**fields, _KEY_VALUES: (_LIST, (_STRUCT, listed))}


def drop_key_value(fields: Fields, key: bytes) -> Fields:
    """The footer without this key."""
    listed = [pair for pair in fields.get(_KEY_VALUES, (0, (0, [])))[1][1] if pair[1][1] != key]
    return {**fields, _KEY_VALUES: (_LIST, (_STRUCT, listed))}


def find_row_group_range(fields: Fields) -> tuple[int, int]:
    """The bytes of the file that the row groups occupy: first in, first out."""
    begins, ends = [], []
    try:
        for group in _groups(fields):
            for chunk in _chunks(group):
                meta: Fields = chunk[_CHUNK_META][1]
                if meta[7][1] == 0:  # A group without rows: some of its columns take no bytes.
                    continue
                # 9 and 11: the first data page and the dictionary page; 7: compressed size.
                begins.append(min(meta[n][1] for n in (9, 11) if n in meta and meta[n][1] > 0))
                ends.append(begins[-1] + meta[7][1])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFooter(f"a column lies nowhere: {error}") from error
    return (min(begins, default=0), max(ends, default=0))
