"""Small binary traces of Chakra's, written field by field."""

from collections.abc import Iterable


def varint(value: int) -> bytes:
    """Write a variable-length integer."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def number(field: int, value: int) -> bytes:
    """Write a field with an integer."""
    return varint(field << 3) + varint(value)


def block(field: int, value: bytes | str) -> bytes:
    """Write a field with a text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def attribute(name: str, value: bytes) -> bytes:
    """Write an attribute of a node, with its value as a field."""
    return block(10, block(1, name) + value)


def trace(nodes: Iterable[bytes], version: str = "0.0.4") -> bytes:
    """Write a file: what it is, then its nodes."""
    messages = [block(1, version), *nodes]
    return b"".join(varint(len(message)) + message for message in messages)


COMPUTE = (
    number(1, 7) + block(2, "gemm") + number(3, 4) + block(4, varint(300) + varint(2))
    + number(5, 6) + number(6, 1000) + number(7, 25)
    + attribute("is_cpu_op", number(27, 0)) + attribute("rf_id", number(9, 41))
    + block(8, block(1, "[1]") + block(2, "[[2, 3]]") + block(3, "['Tensor(float)']"))
)  # fmt: skip
REDUCE = (
    number(1, 8) + block(2, "ncclDevKernel_AllReduce") + number(3, 7) + number(6, 1030)
    + number(7, 9) + attribute("comm_type", number(9, 0)) + attribute("comm_size", number(13, 4096))
    + attribute("is_cpu_op", number(27, 0)) + attribute("pg_name", block(29, "0"))
    + attribute("dims", block(10, block(1, varint(1) + varint(2**64 - 1))))
)  # fmt: skip
