"""A record says what a checkpoint holds, and anything else is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DamagedFile
from meshwright.run.train.checkpoint.metadata import (
    FORMAT_VERSION,
    CheckpointMetadata,
    SavedChunk,
    SavedFile,
    SavedTensor,
    decode_metadata,
    encode_metadata,
)

FILE = SavedFile(
    name="rank-00000.safetensors",
    header_bytes=64,
    data_bytes=96,
    block_bytes=64,
    checksums=(1, 2, 3),
)
HALVES = (
    SavedChunk(offsets=(0, 0), sizes=(2, 4), file=0, start=64),
    SavedChunk(offsets=(2, 0), sizes=(4, 4), file=0, start=96),
)
TENSOR = SavedTensor(dtype="F32", shape=(6, 4), chunks=HALVES)
RECORD = CheckpointMetadata(
    format=FORMAT_VERSION,
    serial=3,
    step=150,
    ranks=1,
    files=(FILE,),
    tensors={"w": TENSOR},
    extra=msgspec.Raw(b'{"a": [1, null]}'),
)


def test_a_record_comes_back_as_it_was() -> None:
    again = decode_metadata(encode_metadata(RECORD), "here")
    assert msgspec.structs.replace(again, extra=RECORD.extra) == RECORD
    assert bytes(again.extra) == bytes(RECORD.extra)


def test_any_flipped_bit_is_found() -> None:
    data = encode_metadata(RECORD)
    for position in range(len(data)):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[position] ^= 1 << bit
            with pytest.raises(DamagedFile):
                decode_metadata(bytes(wrong), "here")


def test_any_missing_end_is_found() -> None:
    data = encode_metadata(RECORD)
    for length in range(len(data)):
        with pytest.raises(DamagedFile):
            decode_metadata(data[:length], "here")


@given(st.binary() | st.text().map(str.encode))
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode_metadata(data, "here")


def _chunk(**changes: Any) -> CheckpointMetadata:
    chunk = msgspec.structs.replace(HALVES[1], **changes)
    tensor = msgspec.structs.replace(TENSOR, chunks=(HALVES[0], chunk))
    return msgspec.structs.replace(RECORD, tensors={"w": tensor})


def _file(**changes: Any) -> CheckpointMetadata:
    return msgspec.structs.replace(RECORD, files=(msgspec.structs.replace(FILE, **changes),))


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (msgspec.structs.replace(RECORD, format=FORMAT_VERSION + 1), "format 2"),
        (_file(name="../../etc/passwd"), "no name of a file of ours"),
        (_file(name=str(Path("/", "rank-00000.safetensors"))), "no name of a file of ours"),
        (_file(block_bytes=0), "negative size"),
        (_file(data_bytes=-1), "negative size"),
        (_file(checksums=(1, 2)), "2 checksums"),
        (_chunk(file=1), "in no file"),
        (_chunk(file=-1), "in no file"),
        (_chunk(sizes=(4,)), "in no file or of another rank"),
        (_chunk(offsets=(3, 0)), "part outside of it"),
        (_chunk(offsets=(-1, 0)), "part outside of it"),
        (_chunk(start=97), r"part outside of rank-00000"),
        (_chunk(start=0), r"part outside of rank-00000"),
        (_chunk(sizes=(3, 4)), "20 of 24 elements"),
        (_chunk(offsets=(1, 0)), "parts that overlap"),
        (
            msgspec.structs.replace(
                RECORD, tensors={"w": msgspec.structs.replace(TENSOR, dtype="PICKLE")}
            ),
            "unknown type 'PICKLE'",
        ),
    ],
)
def test_a_record_that_no_writer_of_ours_would_write_is_refused(
    record: CheckpointMetadata, fault: str
) -> None:
    with pytest.raises(DamagedFile, match=fault):
        decode_metadata(encode_metadata(record), "here")


def test_blocks_cover_a_file_once() -> None:
    assert list(FILE.iter_blocks()) == [(0, 64, 1), (64, 64, 2), (128, 32, 3)]
