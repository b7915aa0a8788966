"""The bytes of a trace file, unpacked where it is packed, in pieces of bounded size.

Where python-isal is installed it unpacks; it takes half of zlib's time.
"""

import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.timeline.paths import refusals

try:
    _zlib: Any = import_module("isal.isal_zlib")
except ImportError:
    _zlib = zlib

PACKED_BYTES = 1 << 17
_FREE_BYTES = 64 << 20
_MAX_RATIO = 300
"""Past the first 64 MiB a packed file may not grow by more: real traces reach 10 to 60."""
_GZIP = 31  # zlib's word for "with gzip's header"
_ERRORS = (zlib.error, getattr(_zlib, "error", zlib.error), EOFError)


class Source:
    """A file as chunks of text; says afterwards whether its packing was whole."""

    def __init__(self, path: Path, chunk_bytes: int) -> None:
        self.path = path
        self.chunk_bytes = chunk_bytes
        self.fault = ""

    def __iter__(self) -> Iterator[bytes]:
        with refusals(self.path, "read"), self.path.open("rb", buffering=0) as file:
            first = file.read(self.chunk_bytes)
            if first[:2] == b"\x1f\x8b":
                yield from self._unpacked(file, first)
            else:
                while first:
                    yield first
                    first = file.read(self.chunk_bytes)

    def _unpacked(self, file: Any, packed: bytes) -> Iterator[bytes]:
        engine = _zlib.decompressobj(_GZIP)
        left = max(_FREE_BYTES, _MAX_RATIO * self.path.stat().st_size)
        try:
            while packed:
                text = engine.decompress(packed, self.chunk_bytes)
                packed = engine.unconsumed_tail
                left -= len(text)
                if left < 0:
                    self.fault = f"it unpacks to more than {_MAX_RATIO} times its size"
                    return
                if text:
                    yield text
                if engine.eof:
                    packed = engine.unused_data.lstrip(b"\0") or file.read(PACKED_BYTES)
                    engine = _zlib.decompressobj(_GZIP)
                    begun = False
                else:
                    packed = packed or file.read(PACKED_BYTES)
                    begun = True
            if begun:
                self.fault = "its compressed data breaks off"
        except _ERRORS as error:
            self.fault = f"its compressed data is damaged: {error}"
