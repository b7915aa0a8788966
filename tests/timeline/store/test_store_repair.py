"""Repair closes what can be closed, and says what is still damaged."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import (
    RepairResult,
    Timeline,
    TimelineWriter,
    read_timeline,
    repair_timeline,
    write_timeline,
)
from meshwright.timeline.store import timeline_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three ranks of ten segments each."""
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 10)
    number = np.arange(300)
    columns = {
        "rank": number // 100,
        "start_ns": number % 100 * 10,
        "duration_ns": 5,
        "kind": "compute",
        "name": "op",
    }
    write_timeline(Timeline.from_columns(columns, source="measured"), tmp_path)
    return tmp_path


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def corrupt(path: Path, group: int) -> Path:
    """Change the last byte of a column of one row group."""
    chunk = pq.read_metadata(path).row_group(group).column(3)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 0xFF
    path.write_bytes(data)
    return path


def test_whole_folder_needs_nothing(folder: Path) -> None:
    assert repair_timeline(folder) == RepairResult(repaired=(), damaged=())


def test_cut_file_is_closed_and_the_rest_left(folder: Path) -> None:
    path = folder / "rank-00001.parquet"
    cut(path, path.stat().st_size // 2)
    found = repair_timeline(folder)
    (line,) = found.repaired
    assert line.startswith(str(path))
    assert found.damaged == ()
    assert 200 < read_timeline(folder).num_spans < 300
    assert repair_timeline(folder) == RepairResult(repaired=(), damaged=())


def test_file_of_which_nothing_is_whole_is_still_damaged(folder: Path) -> None:
    path = cut(folder / "rank-00001.parquet", 40)
    found = repair_timeline(folder)
    assert found.repaired == ()
    (line,) = found.damaged
    assert str(path) in line
    assert "nothing in it is whole" in line
    assert path.stat().st_size == 40


def test_corrupt_row_group_is_still_damaged(folder: Path) -> None:
    path = corrupt(folder / "rank-00002.parquet", 4)
    found = repair_timeline(folder)
    assert found.repaired == ()
    (line,) = found.damaged
    assert str(path) in line
    assert "row group 4 is corrupt, its 10 rows are lost" in line


def test_file_can_be_mended_and_still_be_damaged(folder: Path) -> None:
    path = corrupt(folder / "rank-00002.parquet", 1)
    cut(path, path.stat().st_size // 2)
    found = repair_timeline(folder)
    assert len(found.repaired) == len(found.damaged) == 1


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), share=st.floats(0.1, 1))
def test_what_repair_leaves_is_what_read_complains_of(
    folder: Path, where: float, flip: int, share: float
) -> None:
    path = folder / "rank-00001.parquet"
    before = path.read_bytes()
    data = bytearray(before[: int(share * len(before))])
    data[int(where * len(data))] ^= flip
    path.write_bytes(data)
    try:
        damaged = repair_timeline(folder).damaged
        assert all("(fix: " in line for line in damaged)
        complaints: tuple[str, ...] = ()
        try:
            read_timeline(folder)
        except DamagedFile as damage:
            complaints = tuple(map(str, damage.problems))
        assert complaints == damaged
    finally:
        path.write_bytes(before)


def test_live_writer_is_refused_and_the_others_are_mended(folder: Path) -> None:
    path = folder / "rank-00002.parquet"
    cut(path, path.stat().st_size // 2)
    with TimelineWriter(folder, rank=0) as writer:
        with pytest.raises(InputError, match="is being written by another process") as caught:
            repair_timeline(folder)
        writer.span("still mine", 0, 1)
    assert [Path(problem.where).name for problem in caught.value.problems] == [
        "rank-00000.parquet.partial"
    ]
    assert 200 < read_timeline(folder).num_spans < 300


def test_file_instead_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="is a file, not a folder") as caught:
        repair_timeline(folder / "rank-00000.parquet")
    assert caught.value.problems[0].fix == f"give its folder, {folder}"


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        repair_timeline(tmp_path / "nowhere")
    (problem,) = caught.value.problems
    assert problem.where == str(tmp_path / "nowhere")
    assert problem.fix
