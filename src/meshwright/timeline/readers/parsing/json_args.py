"""The arguments of spans as a column of texts, and texts that are almost JSON made JSON."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_CHUNK_BYTES = 1 << 23
# Kineto writes what C++ prints for a number that is none: nan, -nan, inf.
_NO_NUMBER = re.compile(rb"(?<=[:\[,\s])[-+]?(?:nan|inf(?:inity)?)(?=[\s,\]}])", re.IGNORECASE)
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|"
    rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}|"
    rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\',
    re.DOTALL,
)
_CONTROLS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")


def repair_json(text: bytes) -> bytes:
    """Make JSON of what some writers leave: no UTF-8, bare nan, half characters, raw controls."""
    if not text.isascii():
        text = text.decode(errors="replace").encode()
    text = _NO_NUMBER.sub(b"null", text)
    if b"\\" in text:
        text = _ESCAPE.sub(_escape, text)
    return _CONTROLS.sub(lambda match: _CONTROL.sub(b" ", match[0]), text)


def _escape(match: re.Match[bytes]) -> bytes:
    found = match[0]
    if found == b"\\":
        return b"\\\\"  # A path of Windows, most likely.
    if len(found) == 6 and found[2] in b"dD" and found[3] in b"89abcdefABCDEF":
        return b"\\ufffd"
    return found


class TextColumn:
    """A column of texts that grows; most rows have none."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self._pending: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], bytes]] = []
        self._pending_bytes = 0
        self._first = 0
        self._rows = 0

    def add(self, rows: npt.NDArray[np.int64], texts: list[Any]) -> None:
        """Give these rows, in order and after all before them, their texts: JSON objects."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        given = lengths > 2  # "{}" says nothing.
        if not given.all():
            texts = [text for text in texts if len(text) > 2]
            rows, lengths = rows[given], lengths[given]
        if not texts:
            return
        joined = b"".join(texts)
        if not joined.isascii():
            try:
                joined.decode()
            except UnicodeDecodeError:
                clean = [bytes(text).decode(errors="replace").encode() for text in texts]
                lengths = np.fromiter(map(len, clean), np.int64, len(clean))
                joined = b"".join(clean)
        self._pending.append((rows, lengths, joined))
        self._pending_bytes += len(joined)

    def grow_to(self, num_rows: int) -> None:
        """There are so many rows now."""
        self._rows = num_rows
        if self._pending_bytes >= _CHUNK_BYTES:
            self._close_chunk()

    def column(self) -> Any | None:
        """All rows as an Arrow column, or None where no row has a text."""
        if self._pending and self._rows > self._first:
            self._close_chunk()
        if not self.chunks:
            return None
        if self._rows > self._first:
            self.chunks.append(pa.nulls(self._rows - self._first, pa.string()))
            self._first = self._rows
        return pa.chunked_array(self.chunks, pa.string())

    def _close_chunk(self) -> None:
        count = self._rows - self._first
        rows = np.concatenate([item[0] for item in self._pending]) - self._first
        lengths = np.concatenate([item[1] for item in self._pending])
        data = b"".join(item[2] for item in self._pending)
        self._pending, self._pending_bytes = [], 0
        offsets = np.zeros(count + 1, dtype=np.int32)
        offsets[rows + 1] = lengths
        np.cumsum(offsets, out=offsets)
        present = np.zeros(count, dtype=np.bool_)
        present[rows] = True
        bits = np.packbits(present, bitorder="little").tobytes()
        buffers = [pa.py_buffer(bits), pa.py_buffer(offsets), pa.py_buffer(data)]
        self.chunks.append(pa.Array.from_buffers(pa.string(), count, buffers))
        self._first = self._rows
