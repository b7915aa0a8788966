"""Frames of bytes over a stream: four bytes of length, then as many bytes."""

import struct
from collections.abc import Iterator

from meshwright.errors import DamagedFile, Problem

_LENGTH = struct.Struct("<I")
LARGEST = 1 << 30
"""Bytes of a frame; a longer one can only be a mistake."""


def framed(body: bytes) -> bytes:
    """Return bytes as a frame."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Puts frames together from bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that have become whole."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > LARGEST:
                what = f"a frame of {length:,} bytes"
                raise DamagedFile([Problem("engine", what, "start the server again")])
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
