"""Frames of JSON between the process that asks and those that judge.

They are framed as by `serve/frame_codec.py`, on purpose in a copy: what judges imports the standard
library alone.
"""

import json
import socket
import struct
import time
from typing import Any

HEADER = struct.Struct("<I")


class FrameTooLargeError(Exception):
    """The other side sends more than is read."""


def encode_frame(message: object) -> bytes:
    """Return a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def read_frame(
    connection: socket.socket, *, most_bytes: int | None = None, until_s: float | None = None
) -> Any:
    """Return the next frame; None where there are no more.

    Raises `TimeoutError` where it has not come by `until_s` of the monotonic clock.
    """
    head = _read_exactly(connection, HEADER.size, until_s)
    if head is None:
        return None
    (length,) = HEADER.unpack(head)
    if most_bytes is not None and length > most_bytes:
        raise FrameTooLargeError(f"it answered {length:,} bytes, {most_bytes:,} are read")
    body = _read_exactly(connection, length, until_s)
    return None if body is None else json.loads(body)


def _read_exactly(connection: socket.socket, count: int, until_s: float | None) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
