"""Frames of bytes over a stream: four bytes of length, then as many bytes.

`posttrain/rollout/verifiers/child_main.py` frames its messages by itself, on purpose.
"""

import struct
from collections.abc import Iterator

from meshwright.errors import DamagedFile, Problem

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
"""Bytes of a frame; a longer one can only be a mistake."""


def encode_frame(body: bytes) -> bytes:
    """Return bytes as a frame."""
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Puts frames together from bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that have become whole."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                what = f"a frame of {length:,} bytes"
                raise DamagedFile([Problem("engine", what, "start the server again")])
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
