"""`CheckpointMetadata`: what a checkpoint holds, where, and with which checksums, as checked JSON.

The record is written last, so a folder without a sound one is no checkpoint. It is plain data:
reading it runs no code of whoever wrote it. It knows neither torch nor the disk.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.errors import DamagedFile, Problem
from meshwright.policy.resharding.tensor_box import TensorBox, any_boxes_overlap

FORMAT_VERSION = 1
METADATA_FILE = "checkpoint.json"
_FILE = re.compile(r"rank-\d{5,}\.safetensors", re.ASCII)

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Names of element types in safetensors files, and their sizes."""


class SavedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One safetensors file, written by one rank."""

    name: str
    header_bytes: int
    """The length field and the JSON header, padded."""
    data_bytes: int
    block_bytes: int
    """Length of the blocks of data with a checksum each; the last may be shorter."""
    checksums: tuple[int, ...]
    """CRC-32 of the header, then of every block."""

    def iter_blocks(self) -> Iterator[tuple[int, int, int]]:
        """Give start, length and checksum of the header and of every block."""
        yield 0, self.header_bytes, self.checksums[0]
        for number, checksum in enumerate(self.checksums[1:]):
            start = number * self.block_bytes
            length = min(self.block_bytes, self.data_bytes - start)
            yield self.header_bytes + start, length, checksum


class SavedChunk(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True
):
    """A box of a tensor, row after row in one file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    """Number of the file in `CheckpointMetadata.files`."""
    start: int
    """Byte of the file at which it starts."""


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor and the boxes it is cut into."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


class CheckpointMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one checkpoint but the numbers in its tensors."""

    format: int
    serial: int
    """Number of the save in its folder: a newer one has a higher number, whatever its step."""
    step: int
    ranks: int
    """How many processes wrote it."""
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]
    extra: msgspec.Raw
    """What the caller saved beside the tensors, as JSON."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    crc32: int
    record: msgspec.Raw


def encode_metadata(record: CheckpointMetadata) -> bytes:
    """Return the record with its own checksum in front."""
    body = msgspec.json.encode(record)
    return msgspec.json.encode(_Envelope(zlib.crc32(body), msgspec.Raw(body)))


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Read a record, or raise a `DamagedFile` that says what is wrong with it."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.record)
        if zlib.crc32(body) != envelope.crc32:
            raise _damaged(where, ["its checksum does not match"])
        record = msgspec.json.decode(body, type=CheckpointMetadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, [f"it is no checkpoint record: {error}"]) from None
    faults = list(_faults(record))
    if faults:
        raise _damaged(where, faults[:8])
    return record


def _damaged(where: str, faults: list[str]) -> DamagedFile:
    return DamagedFile([Problem(where, fault, "use another checkpoint") for fault in faults])


def _faults(record: CheckpointMetadata) -> Iterator[str]:
    """Say what no writer of ours would write: nothing a reader does may leave the folder."""
    if record.format != FORMAT_VERSION:
        yield f"it has format {record.format}, and this version reads {FORMAT_VERSION}"
        return
    for file in record.files:
        if _FILE.fullmatch(file.name) is None:
            yield f"{file.name!r} is no name of a file of ours"
        if min(file.header_bytes, file.data_bytes) < 0 or file.block_bytes < 1:
            yield f"{file.name} has a negative size"
        elif len(file.checksums) != 1 + -(-file.data_bytes // file.block_bytes):
            yield f"{file.name} has {len(file.checksums)} checksums, not one for each block"
    for name, tensor in record.tensors.items():
        yield from _tensor_faults(name, tensor, record.files)


def _tensor_faults(name: str, tensor: SavedTensor, files: tuple[SavedFile, ...]) -> Iterator[str]:
    if tensor.dtype not in DTYPE_BYTES:
        yield f"{name} has the unknown type {tensor.dtype!r}"
        return
    elements = 0
    for chunk in tensor.chunks:
        if not 0 <= chunk.file < len(files) or not (
            len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
        ):
            yield f"{name} has a part in no file or of another rank"
            return
        box = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if any(first < 0 or size < 0 or first + size > whole for first, size, whole in box):
            yield f"{name} has a part outside of it"
        file = files[chunk.file]
        last = chunk.start + math.prod(chunk.sizes) * DTYPE_BYTES[tensor.dtype]
        if chunk.start < file.header_bytes or last > file.header_bytes + file.data_bytes:
            yield f"{name} has a part outside of {file.name}"
        elements += math.prod(chunk.sizes)
    if elements != math.prod(tensor.shape):
        yield f"{name} has {elements:,} of {math.prod(tensor.shape):,} elements"
    elif any_boxes_overlap([TensorBox(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
        yield f"{name} has parts that overlap"


def find_extra_problems(extra: Mapping[str, Any]) -> list[Problem]:
    """Say what of this has no JSON."""
    return list(_unfit(extra, "extra"))


def encode_extra(extra: Mapping[str, Any]) -> msgspec.Raw:
    """Return what is saved beside the tensors as JSON.

    Tuples come back as lists. Whole numbers may have any size (generators have states of 128
    bits); numbers that are not finite have no JSON.
    """
    return msgspec.Raw(json.dumps(extra, allow_nan=False, ensure_ascii=False).encode())


def decode_extra(record: CheckpointMetadata) -> dict[str, Any]:
    """Return what was saved beside the tensors."""
    extra: dict[str, Any] = json.loads(bytes(record.extra))
    return extra


def _unfit(value: object, where: str) -> Iterator[Problem]:
    match value:
        case None | bool() | int() | str():
            pass
        case float():
            if not math.isfinite(value):
                yield Problem(where, f"{value} has no JSON", "leave it out or write it as text")
        case list() | tuple():
            for number, item in enumerate(value):
                yield from _unfit(item, f"{where}[{number}]")
        case Mapping():
            for key, item in value.items():
                if isinstance(key, str):
                    yield from _unfit(item, f"{where}.{key}")
                else:
                    yield Problem(where, f"the key {key!r} is not text", f"use {str(key)!r}")
        case _:
            what = f"a {type(value).__name__} has no JSON"
            yield Problem(where, what, "give numbers, text, lists and tables of them")
