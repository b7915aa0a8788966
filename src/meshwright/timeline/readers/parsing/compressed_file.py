"""The bytes of a trace file, unpacked where it is packed, in pieces of bounded size.

python-isal unpacks in half of zlib's time; where it is not to be had, zlib does.
"""

import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.file_errors import convert_os_errors

try:
    _zlib: Any = import_module("isal.isal_zlib")
except ImportError:
    _zlib = zlib

COMPRESSED_CHUNK_BYTES = 1 << 17
_FREE_BYTES = 64 << 20
_MAX_RATIO = 300
"""Past the first 64 MiB a packed file may not grow by more: real traces reach 10 to 60."""
UNSUPPORTED_COMPRESSIONS = {
    b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "zstandard", b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2", b"7z\xbc\xaf\x27\x1c": "7-Zip", b"\x04\x22\x4d\x18": "lz4",
    b"Rar!\x1a\x07": "RAR",
}  # fmt: skip
"""First bytes of packed files that are not unpacked here."""
DECOMPRESS_REMEDY = (
    "unpack it and give what is in it; what torch.save has packed, write with pickle.dump "
    "(snapshots: torch.cuda.memory._dump_snapshot)"
)
_GZIP = 31  # zlib's word for "with gzip's header"
_ERRORS = (zlib.error, getattr(_zlib, "error", zlib.error), EOFError)


def detect_compression(start: bytes) -> str:
    """How a file is packed that begins so, in words; empty where it is not, or by gzip."""
    return next(
        (name for magic, name in UNSUPPORTED_COMPRESSIONS.items() if start.startswith(magic)), ""
    )


class TextChunks:
    """A file as chunks of text; says afterwards whether its packing was whole."""

    def __init__(
        self,
        path: Path,
        chunk_bytes: int,
        *,
        always_allowed_bytes: int = _FREE_BYTES,
        max_compression_ratio: int = _MAX_RATIO,
    ) -> None:
        self.path = path
        self.chunk_bytes = chunk_bytes
        self.always_allowed_bytes, self.max_compression_ratio = (
            always_allowed_bytes,
            max_compression_ratio,
        )
        self.error = ""

    def __iter__(self) -> Iterator[bytes]:
        with convert_os_errors(self.path, "read"), self.path.open("rb", buffering=0) as file:
            first = file.read(self.chunk_bytes)
            if first[:2] == b"\x1f\x8b":
                yield from self._unpacked(file, first)
            else:
                while first:
                    yield first
                    first = file.read(self.chunk_bytes)

    def _unpacked(self, file: Any, packed: bytes) -> Iterator[bytes]:
        engine = _zlib.decompressobj(_GZIP)
        left = max(self.always_allowed_bytes, self.max_compression_ratio * self.path.stat().st_size)
        try:
            while packed:
                text = engine.decompress(packed, self.chunk_bytes)
                packed = engine.unconsumed_tail
                left -= len(text)
                if left < 0:
                    self.error = (
                        f"it unpacks to more than {self.max_compression_ratio} times its size"
                    )
                    return
                if text:
                    yield text
                if engine.eof:
                    packed = engine.unused_data.lstrip(b"\0") or file.read(COMPRESSED_CHUNK_BYTES)
                    engine = _zlib.decompressobj(_GZIP)
                    begun = False
                else:
                    packed = packed or file.read(COMPRESSED_CHUNK_BYTES)
                    begun = True
            if begun:
                self.error = "its compressed data breaks off"
        except _ERRORS as error:
            self.error = f"its compressed data is damaged: {error}"
