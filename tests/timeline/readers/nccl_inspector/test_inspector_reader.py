"""Records of NCCL's Inspector plugin as timelines."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline
from meshwright.timeline.readers.nccl_inspector.inspector_reader import read_nccl_inspector
from meshwright.timeline.readers.trace_folder import read_trace


def record(**perf: Any) -> dict[str, Any]:
    return {
        "header": {"id": "0xe62d", "rank": 4, "n_ranks": 8, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0", "git_rev": "",
            "dump_timestamp_us": 1_752_867_229_276_385, "hostname": "h", "pid": 4,
        },
        "coll_perf": {
            "coll": "ReduceScatter", "coll_sn": 1231, "coll_msg_size_bytes": 2_147_483_648,
            "coll_exec_time_us": 41_057, "coll_algobw_gbs": 418.4, "coll_busbw_gbs": 366.1, **perf,
        },
    }  # fmt: skip


TIMES = {"kernel_events": [{"channel_id": 0, "kernel_start_ts": 1_752_867_229_235_181}]}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_collective_has_its_time_bytes_and_group(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", json.dumps(record(event_trace_ts=TIMES)))
    timeline = read_trace(path)
    (row,) = timeline.spans.to_pylist()
    assert (row["rank"], row["kind"], row["collective"]) == (4, "communication", "reduce_scatter")
    assert (row["start_ns"], row["duration_ns"]) == (1_752_867_229_235_181_000, 41_057_000)
    assert (row["bytes"], row["group"]) == (8 * 2_147_483_648, "0xe62d")
    assert json.loads(row["extra"])["bus bandwidth (GB/s)"] == 366.1


def test_without_verbose_times_it_ends_when_written_and_a_note_says_so(tmp_path: Path) -> None:
    timeline = read_nccl_inspector(write(tmp_path / "a.log", json.dumps(record())))
    assert timeline.extent_ns[1] == 1_752_867_229_276_385_000
    assert "DUMP_VERBOSE" in timeline.metadata["notes"]


def test_broken_lines_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", json.dumps(record()), '{"header": 1}', "}{")
    with pytest.raises(DamagedFile, match="2 lines") as caught:
        read_nccl_inspector(path)
    assert cast(Timeline, caught.value.readable).num_spans == 1


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_records_is_read(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([record(coll_sn=1), record(coll_sn=2)], indent=indent))
    assert read_trace(path).num_spans == 2


def test_records_over_several_lines_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", *(json.dumps(record(), indent=1) for _ in range(3)))
    assert read_trace(path).num_spans == 3


def test_a_list_that_breaks_off_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([record(), record(), record()])[:-40])
    with pytest.raises(DamagedFile, match="use the 2 records") as caught:
        read_nccl_inspector(path)
    assert cast(Timeline, caught.value.readable).num_spans == 2


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no record"):
        read_nccl_inspector(write(tmp_path / "a.log", "hello"))
