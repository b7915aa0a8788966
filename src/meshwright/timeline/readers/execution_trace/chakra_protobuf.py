"""Reads Chakra's execution traces in their binary form: protobuf messages, each behind its length.

The first message says what the trace is (GlobalMetadata), each other one is a Node. Field numbers
are those of schema/protobuf/et_def.proto of mlcommons/chakra. The wire format is read here: tags
and lengths are variable-length integers, and fields that are not known are skipped.
"""

import struct
from collections.abc import Iterator
from typing import Any

_LARGEST_MESSAGE_BYTES = 256 << 20
_TYPES = {
    0: "invalid", 1: "metadata", 2: "memory load", 3: "memory store", 4: "compute", 5: "send",
    6: "recv", 7: "collective",
}  # fmt: skip
NODE_TYPES = _TYPES
"""Chakra's numbers of the types of nodes."""
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter", "barrier",
)  # fmt: skip
"""By Chakra's numbers of collectives."""


class InvalidProtobuf(Exception):
    """The bytes are no message of the expected form."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer, and where it ends."""
    value = shift = 0
    for place in range(at, min(at + 10, len(data))):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place + 1
        shift += 7
    raise InvalidProtobuf("a number breaks off")


def read_fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field: an integer, or bytes."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise InvalidProtobuf("a field has number 0")
        value: Any
        if wire == 0:
            value, at = read_varint(data, at)
        elif wire == 2:
            size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
        elif wire in {1, 5}:
            size = 8 if wire == 1 else 4
            value, at = data[at : at + size], at + size
        else:
            raise InvalidProtobuf(f"a field has wire type {wire}")
        if at > len(data):
            raise InvalidProtobuf("a field is longer than its message")
        yield number, wire, value


def read_messages(data: bytes) -> Iterator[bytes]:
    """The messages of a file, one after another."""
    at = 0
    while at < len(data):
        size, at = read_varint(data, at)
        if not 0 < size <= _LARGEST_MESSAGE_BYTES:
            raise InvalidProtobuf(f"a message says it has {size:,} bytes")
        if at + size > len(data):
            raise InvalidProtobuf("a message breaks off")
        yield data[at : at + size]
        at += size


def read_metadata(message: bytes) -> dict[str, Any]:
    """What GlobalMetadata says."""
    found: dict[str, Any] = {}
    for number, wire, value in read_fields(message):
        if (number, wire) == (1, 2):
            found["version"] = _text(value)
        elif (number, wire) == (2, 2):
            found.update([_attribute(value)])
        else:
            raise InvalidProtobuf(f"the first message has field {number}")
    return found


def read_node(message: bytes) -> dict[str, Any]:
    """What a Node says, by the names of its fields; `attr` by the names of the attributes."""
    node: dict[str, Any] = {"ctrl_deps": [], "data_deps": [], "attr": {}}
    for number, wire, value in read_fields(message):
        match number, wire:
            case (1, 0):
                node["id"] = value
            case (2, 2):
                node["name"] = _text(value)
            case (3, 0):
                node["type"] = _TYPES.get(value, "invalid")
            case (4 | 5, 0 | 2):
                deps = node["ctrl_deps" if number == 4 else "data_deps"]
                deps.extend(_packed(value) if wire == 2 else [value])
            case (6, 0):
                node["start_us"] = value
            case (7, 0):
                node["duration_us"] = value
            case (8 | 9, 2):
                parts = {what: _text(said) for what, kind, said in read_fields(value) if kind == 2}
                node["inputs" if number == 8 else "outputs"] = parts
            case (10, 2):
                node["attr"].update([_attribute(value)])
            case _:
                continue
    return node


def _packed(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _attribute(message: bytes) -> tuple[str, Any]:
    name, said = "", None
    for number, wire, value in read_fields(message):
        if (number, wire) == (1, 2):
            name = _text(value)
        elif number > 2:
            said = _value(number, wire, value)
    return name, said


def _value(number: int, wire: int, value: Any) -> Any:
    """The value of an attribute: fields with odd numbers hold one, the next ones a list."""
    if number % 2 == 0 and wire == 2 and number <= 32:
        found = []
        for _, kind, item in read_fields(value):
            if kind == 2 and number < 29:
                found += [_signed(number - 1, part) for part in _list(number - 1, item)]
            else:
                found.append(_value(number - 1, kind, item))
        return found
    if wire == 0:
        return _signed(number, value)
    if wire == 2:
        return _text(value) if number == 29 else value.hex()
    form = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}.get(number)
    if form is None or len(value) != struct.calcsize(form):
        raise InvalidProtobuf(f"an attribute has field {number} of {len(value)} bytes")
    return struct.unpack(form, value)[0]


def _list(number: int, data: bytes) -> Iterator[Any]:
    """The numbers of a packed list."""
    form = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}.get(number)
    if form is None:
        yield from _packed(data)
        return
    if len(data) % struct.calcsize(form):
        raise InvalidProtobuf("a list breaks off")
    for (value,) in struct.iter_unpack(form, data):
        yield value


def _signed(number: int, value: Any) -> Any:
    if not isinstance(value, int):
        return value
    if number == 27:
        return bool(value)
    if number in {15, 17}:  # sint: the sign is the last bit
        return (value >> 1) ^ -(value & 1)
    return value - 2**64 if number in {7, 9} and value >= 2**63 else value
