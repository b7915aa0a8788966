"""Footers that are decoded, moved and joined say what Arrow reads back."""

import io
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.timeline.store import parquet_footer
from meshwright.timeline.store.parquet_footer import InvalidFooter


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=3)
    return sink.getvalue()


def raw_footer(data: bytes) -> bytes:
    (length,) = struct.unpack("<I", data[-8:-4])
    return data[-8 - length : -8]


@pytest.fixture(scope="module")
def data() -> bytes:
    return parquet(
        pa.table(
            {
                "i": pa.array([1, None, 3, 4, 5, 6, 7], pa.int64()),
                "s": pa.array(["a", "b", "a", None, "c", "a", "b"]).dictionary_encode(),
                "f": pa.array([0.5, 1.5, None, -1.0, 2.0, 3.0, 4.0]),
                "b": pa.array([True, False, None, True, True, False, True]),
            }
        )
    )


def test_footer_that_is_decoded_and_encoded_is_the_same(data: bytes) -> None:
    raw = raw_footer(data)
    assert (
        parquet_footer.encode_footer(parquet_footer.decode_footer(raw))
        == raw + struct.pack("<I", len(raw)) + b"PAR1"
    )


def test_extent_covers_the_row_groups(data: bytes) -> None:
    begin, end = parquet_footer.find_row_group_range(parquet_footer.decode_footer(raw_footer(data)))
    assert begin == 4
    assert end <= len(data) - 8 - len(raw_footer(data))


def test_two_files_become_one_by_moving_and_joining_their_footers(data: bytes) -> None:
    fields = parquet_footer.decode_footer(raw_footer(data))
    body = data[4 : -8 - len(raw_footer(data))]
    joined = parquet_footer.join_footers([fields, parquet_footer.shift_offsets(fields, len(body))])
    whole = b"PAR1" + body + body + parquet_footer.encode_footer(joined)
    table = pq.read_table(io.BytesIO(whole))
    once = pq.read_table(io.BytesIO(data))
    assert table.to_pydict() == pa.concat_tables([once, once]).to_pydict()


def test_pairs_are_added_and_taken_away(data: bytes) -> None:
    fields = parquet_footer.decode_footer(raw_footer(data))
    more = parquet_footer.set_key_value(fields, b"k", b"v")
    assert (
        parquet_footer.read_key_values(
            parquet_footer.decode_footer(parquet_footer.encode_footer(more)[:-8])
        )[b"k"]
        == b"v"
    )
    assert b"k" not in parquet_footer.read_key_values(parquet_footer.drop_key_value(more, b"k"))


def test_seal_holds_until_a_byte_changes(data: bytes) -> None:
    sealed = parquet_footer.encode_with_checksum(parquet_footer.decode_footer(raw_footer(data)))[
        :-8
    ]
    assert parquet_footer.verify_checksum(sealed)
    for at in range(len(sealed)):
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        assert not parquet_footer.verify_checksum(changed)


def test_footer_of_someone_else_has_no_seal(data: bytes) -> None:
    assert parquet_footer.verify_checksum(raw_footer(data)) is None


@given(st.binary(max_size=200))
def test_bytes_that_are_no_footer_are_refused(junk: bytes) -> None:
    with pytest.raises(InvalidFooter):
        parquet_footer.decode_footer(junk)


@given(st.data())
def test_damaged_footer_is_refused_or_still_a_footer(data: bytes, choice: st.DataObject) -> None:
    raw = bytearray(raw_footer(data))
    raw[choice.draw(st.integers(0, len(raw) - 1))] ^= choice.draw(st.integers(1, 255))
    try:
        fields = parquet_footer.decode_footer(bytes(raw))
        parquet_footer.find_row_group_range(fields)
    except InvalidFooter:
        return
    assert parquet_footer.encode_footer(fields)
