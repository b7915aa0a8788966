"""A segmented file is an ordinary Parquet file, and loses at most what was half-written."""

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.timeline.store.segmented_file import (
    SegmentedFile,
    finalize_file,
    open_parquet,
    partial_path,
    scan_segments,
)

SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("s", pa.dictionary(pa.int32(), pa.string())),
        pa.field("x", pa.float64()),
    ],
    metadata={"meshwright.source": "measured", "note": "kept"},
)
SIZES = [5, 1, 30, 12]


def rows(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    labels = [None if n % 7 == 0 else f"label {n % 3}" for n in numbers]
    columns = [
        pa.array(numbers, pa.int64()),
        pa.array(labels, pa.string()).dictionary_encode(),
        pa.array([n / 2 for n in numbers]),
    ]
    return pa.table(columns, schema=SCHEMA.remove_metadata())


def write(path: Path, sizes: list[int] = SIZES) -> list[int]:
    """Write a closed file; returns the file's length after each segment."""
    file = SegmentedFile(path, SCHEMA)
    ends = []
    for number, size in enumerate(sizes):
        file.append(rows(sum(sizes[:number]), size))
        ends.append(partial_path(path).stat().st_size)
    file.finish()
    file.publish()
    return ends


def numbers(path: Path) -> list[int]:
    opened = open_parquet(path, ["s"])
    if opened.file is None:
        return []
    with opened.file:
        found: list[int] = opened.file.read(columns=["n"]).column("n").to_pylist()
    return found


def test_closed_file_is_plain_parquet(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column("n").to_pylist() == list(range(48))
    assert table.equals(rows(0, 48).cast(table.schema).combine_chunks()) or (
        table.to_pydict() == rows(0, 48).to_pydict()
    )


def test_closed_file_keeps_the_schemas_metadata(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    pairs = pq.read_metadata(tmp_path / "a.parquet").metadata
    assert pairs[b"note"] == b"kept"
    assert not any(b"unfinished" in key for key in pairs)


def test_each_segment_has_statistics_for_skipping_it(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    starts = [
        metadata.row_group(group).column(0).statistics.min
        for group in range(metadata.num_row_groups)
    ]
    assert starts == [0, 5, 6, 36]


def test_file_without_rows_is_valid(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [])
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 0


def test_file_has_its_name_only_once_it_is_published(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    file = SegmentedFile(path, SCHEMA)
    file.append(rows(0, 3))
    assert not path.exists()
    file.finish()
    assert not path.exists()
    file.publish()
    assert [item.name for item in tmp_path.iterdir()] == ["a.parquet"]


def test_unclosed_file_can_be_read_up_to_its_last_segment(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    file = SegmentedFile(path, SCHEMA)
    file.append(rows(0, 3))
    file.append(rows(3, 4))
    assert numbers(partial_path(path)) == list(range(7))
    assert "was not closed" in open_parquet(partial_path(path), []).error
    file.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_cut_file_keeps_every_whole_segment(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.parquet"
    ends = write(path)
    size = int(share * path.stat().st_size)
    path.write_bytes(path.read_bytes()[:size])
    whole = sum(count for count, end in zip(SIZES, ends, strict=True) if end <= size)
    assert open_parquet(path, []).error
    assert numbers(path) == list(range(whole))


def test_cut_at_the_end_of_a_segment_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    ends = write(path)
    path.write_bytes(path.read_bytes()[: ends[1]])
    assert "kept 6 rows of 2 whole segments" in open_parquet(path, []).error


def test_text_that_looks_like_the_end_of_a_file_does_not_confuse(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    file = SegmentedFile(path, SCHEMA)
    for first in (0, 2):
        table = rows(first, 2).set_column(
            1, SCHEMA.field("s"), pa.array(["\x08\0\0\0PAR1" * 9, "PAR1PAR1"]).dictionary_encode()
        )
        file.append(table)
    assert len(scan_segments(partial_path(path)).footers) == 2
    file.close()


def test_what_is_no_parquet_file_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("hello, I am not what my name says")
    opened = open_parquet(path, [])
    assert opened.file is None
    assert "no Parquet file" in opened.error


def test_completing_a_cut_file_makes_it_readable_by_anyone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    ends = write(path)
    path.write_bytes(path.read_bytes()[: ends[2] + 10])
    assert finalize_file(path) == 36
    assert pq.read_table(path).column("n").to_pylist() == list(range(36))
    assert open_parquet(path, []).error == ""


def test_resuming_a_closed_file_adds_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path)
    file = SegmentedFile.resume(path, SCHEMA)
    file.append(rows(48, 2))
    file.finish()
    file.publish()
    assert pq.read_table(path).column("n").to_pylist() == list(range(50))


def test_resuming_a_cut_file_drops_only_the_half_written_end(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    ends = write(path)
    partial_path(path).write_bytes(path.read_bytes()[: ends[1] + 25])
    path.unlink()
    file = SegmentedFile.resume(path, SCHEMA)
    file.append(rows(6, 4))
    file.finish()
    file.publish()
    assert pq.read_table(path).column("n").to_pylist() == list(range(10))


def test_resuming_refuses_a_file_of_someone_else(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(rows(0, 3), path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="not written by a timeline writer"):
        SegmentedFile.resume(path, SCHEMA)
    assert path.read_bytes() == before


def test_resuming_refuses_other_columns(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="other columns"):
        SegmentedFile.resume(tmp_path / "a.parquet", SCHEMA.remove(2))


def damaged_with_live_replacement(path: Path) -> SegmentedFile:
    """A closed file that was cut short, while a writer is busy with its replacement."""
    ends = write(path)
    path.write_bytes(path.read_bytes()[: ends[1] + 10])
    live = SegmentedFile(path, SCHEMA)
    live.append(rows(100, 3))
    return live


@pytest.mark.parametrize("take", [finalize_file, lambda path: SegmentedFile.resume(path, SCHEMA)])
def test_file_with_a_live_writer_is_refused_and_its_writer_not_disturbed(
    tmp_path: Path, take: Callable[[Path], object]
) -> None:
    path = tmp_path / "a.parquet"
    live = damaged_with_live_replacement(path)
    with pytest.raises(InputError, match="is being written by another process"):
        take(path)
    live.append(rows(103, 2))
    live.finish()
    live.publish()
    assert numbers(path) == list(range(100, 105))


def test_live_file_without_a_segment_is_refused_too(tmp_path: Path) -> None:
    live = SegmentedFile(tmp_path / "a.parquet", SCHEMA)
    with pytest.raises(InputError, match="is being written by another process"):
        finalize_file(tmp_path / "a.parquet")
    live.close()


def test_file_is_locked_until_it_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    file = SegmentedFile(path, SCHEMA)
    file.append(rows(0, 3))
    file.finish()
    with pytest.raises(InputError, match="is being written by another process"):
        SegmentedFile.resume(path, SCHEMA)
    file.publish()
    assert numbers(path) == [0, 1, 2]


def test_refused_file_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(rows(0, 3), path)
    with pytest.raises(InputError):
        SegmentedFile.resume(path, SCHEMA)
    assert [item.name for item in tmp_path.iterdir()] == ["a.parquet"]


def test_completing_a_cut_file_leaves_an_unfinished_replacement_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    damaged_with_live_replacement(path).close()
    assert finalize_file(path) == 6
    assert numbers(path) == list(range(6))
    assert numbers(partial_path(path)) == [100, 101, 102]


@pytest.mark.parametrize("failing", ["append", "finish"])
def test_full_disk_costs_only_what_did_not_fit(tmp_path: Path, failing: str) -> None:
    path = tmp_path / "a.parquet"
    file = SegmentedFile(path, SCHEMA)
    file.append(rows(0, 5))
    size = partial_path(path).stat().st_size
    with file_size_limit(size + 100), pytest.raises(InputError) as caught:
        file.append(rows(5, 5)) if failing == "append" else file.finish()
    (problem,) = caught.value.problems
    assert problem.where == str(partial_path(path))
    assert "free some space" in problem.fix
    assert partial_path(path).stat().st_size == size
    file.append(rows(5, 2))
    file.finish()
    file.publish()
    assert numbers(path) == list(range(7))
    assert open_parquet(path, []).error == ""


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond this size: the nearest thing to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
