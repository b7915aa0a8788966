"""Flight-recorder dumps: whatever the version, name or form, the same records come out."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    parse_dump,
    read_dump,
    read_flight_recorder,
)
from tests.timeline.readers.small_dumps import STACK, dump, entry


def _write(folder: Path, name: str, data: Any) -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(data))
    return path


@pytest.mark.parametrize(
    "name",
    ["_dump_3", "nccl_trace_rank_3", "host17_3", "node-4-rank3.pickle", "fr_rank_3.pkl", "3.json"],
)
def test_the_rank_is_read_from_the_name(tmp_path: Path, name: str) -> None:
    data = dump([entry(5)])
    path = tmp_path / name
    path.write_bytes(json.dumps(data).encode() if name.endswith("json") else pickle.dumps(data))
    assert read_dump(path).rank == 3


def test_groups_correct_a_name_that_lies(tmp_path: Path) -> None:
    config = {"0": {"name": "0", "desc": "a", "ranks": "[0, 7]"},
              "1": {"name": "1", "desc": "b", "ranks": "[7, 9]"}}  # fmt: skip
    assert read_dump(_write(tmp_path, "x_3", dump([], pg_config=config))).rank == 7


def test_a_name_without_a_rank_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the dump has no rank"):
        read_dump(_write(tmp_path, "dump.pickle", dump([entry(1)])))


def test_pickle_json_and_gzip_say_the_same(tmp_path: Path) -> None:
    data = dump([entry(5, frames=STACK), entry(6, state="completed")])
    plain = _write(tmp_path, "a_1", data)
    (tmp_path / "b_1").write_bytes(gzip.compress(pickle.dumps(data)))
    (tmp_path / "c_1.json").write_text(json.dumps(data))
    reads = [read_dump(path) for path in (plain, tmp_path / "b_1", tmp_path / "c_1.json")]
    assert len({(read.rank, read.operations, read.groups) for read in reads}) == 1


def test_peers_inside_a_pipeline_group_become_ranks_of_the_job() -> None:
    config = {"9": {"name": "9", "desc": "PIPELINE", "ranks": "[2, 6, 10, 14]"}}
    sent = entry(1, process_group=("9", "PIPELINE"), is_p2p=True, profiling_name="nccl:send 1->3")
    got = entry(2, process_group=("9", "PIPELINE"), is_p2p=True, profiling_name="nccl:recv 1<-0")
    found = parse_dump(dump([sent, got], pg_config=config), "d", 6, 9999).operations
    assert [(each.name, each.source, each.destination) for each in found] == [
        ("send", 6, 14), ("recv", 2, 6),
    ]  # fmt: skip


def test_names_that_already_tell_ranks_of_the_job_are_left() -> None:
    config = {"9": {"name": "9", "desc": "PIPELINE", "ranks": "[2, 6, 10, 14]"}}
    sent = entry(1, process_group=("9", "PIPELINE"), is_p2p=True, profiling_name="nccl:send 6->14")
    (found,) = parse_dump(dump([sent], pg_config=config), "d", 6, 9999).operations
    assert (found.source, found.destination) == (6, 14)


def test_an_entry_with_nothing_in_it_is_read() -> None:
    (found,) = parse_dump({"entries": [{}]}, "d", 0, 999).operations
    assert (found.name, found.group.name) == ("", "")
    assert not found.is_pending


def test_counts_of_a_rank_without_entries_are_matched_to_its_groups_by_order() -> None:
    config = {
        "12": {"name": "12", "desc": "EXPERT", "ranks": "[1, 2]"},
        "3": {"name": "3", "desc": "TENSOR", "ranks": "[1, 5]"},
    }
    status = {
        "7": {"last_enqueued_collective": 70, "last_completed_collective": 70},
        "10": {"last_enqueued_collective": 100, "last_completed_collective": 99},
    }
    read = parse_dump(dump([], pg_config=config, pg_status=status), "d", 1, 999)
    assert {group.description: row.last_enqueued for group, row in read.progress.items()} == {
        "TENSOR": 70, "EXPERT": 100,
    }  # fmt: skip


def test_a_folder_is_read_broken_files_are_kept_as_evidence(tmp_path: Path) -> None:
    for rank in (0, 1):
        _write(tmp_path, f"_dump_{rank}", dump([entry(5)]))
    (tmp_path / "_dump_2").write_bytes(pickle.dumps(dump([entry(5)]))[:40])
    (tmp_path / "_dump_3").write_bytes(b"")
    (tmp_path / "run.log").write_text("hello")
    read = read_flight_recorder([tmp_path])
    assert [each.rank for each in read.dumps] == [0, 1]
    assert sorted(read.damaged) == [2, 3]
    assert read.notes == ("run.log is no dump and was left out",)


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [_write(tmp_path, name, dump([entry(5)])) for name in ("a_1", "b_1")]
    with pytest.raises(InputError, match="rank 1"):
        read_flight_recorder(paths)


@pytest.mark.parametrize("data", [3, [], {"a": 1}, {"entries": 4}])
def test_what_is_no_dump_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(InputError, match="no flight-recorder dump"):
        read_dump(_write(tmp_path, "d_0", data))


def test_one_entry_listed_over_and_over_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump_rank_0"
    path.write_bytes(pickle.dumps(dump([entry(1)] * 50_000)))
    with pytest.raises(InputError, match="over and over"):
        read_flight_recorder([path])


def test_why_the_only_dump_cannot_be_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "dump_rank_0"
    path.write_bytes(pickle.dumps(dump([entry(1)]))[:-9])
    with pytest.raises(InputError, match="truncated pickle"):
        read_flight_recorder([path])


def test_one_list_used_for_every_field_does_not_unfold_without_bound() -> None:
    row = [7] * 1000
    sizes = [row] * 1000
    data = dump([entry(n, input_sizes=sizes, output_sizes=sizes) for n in range(1000)])
    with pytest.raises(InputError, match="unfolds"):
        parse_dump(data, "d", 0, 100_000)


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing", "no such file or folder"), ("x" * 300, "cannot read: File name too long")],
)
def test_a_path_that_the_system_refuses_is_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_flight_recorder([tmp_path / name])
    assert caught.value.problems[0].fix


def test_a_dump_in_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(dump([entry(7)])))

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match=r"rank_0: cannot read: Permission denied"):
        read_flight_recorder([tmp_path])
