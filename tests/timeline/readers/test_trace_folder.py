"""Folders of traces: found by what they hold, read one rank at a time."""

import gzip
import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline, write_timeline
from meshwright.timeline.readers.trace_folder import (
    find_traces,
    iter_timelines,
    map_traces,
    read_trace,
)


def trace(path: Path, rank: int | None, *, events: int = 2) -> Path:
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 4}
    info = {} if rank is None else {"rank": rank}
    document = {
        "distributedInfo": info,
        "traceEvents": [{**event, "ts": number} for number in range(events)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def formats(path: Path) -> dict[str, str]:
    return {file.path.name: file.format for file in find_traces(path)}


def test_formats_are_told_by_content_not_by_name(tmp_path: Path) -> None:
    trace(tmp_path / "kineto.bin", 0)
    (tmp_path / "packed").write_bytes(gzip.compress((tmp_path / "kineto.bin").read_bytes()))
    (tmp_path / "bare.txt").write_text('[{"ph": "X", "ts": 1}]')
    with sqlite3.connect(tmp_path / "report") as database:
        database.execute("create table StringIds (id, value)")
    (tmp_path / "et.json").write_text('{"schema": "1.1.0", "pid": 1, "nodes": []}')
    (tmp_path / "dump").write_bytes(
        pickle.dumps({"version": "2.9", "pg_config": {}, "entries": []})
    )
    (tmp_path / "dump.json").write_text('{"version": "2.9", "entries": []}')
    (tmp_path / "snap").write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    (tmp_path / "log").write_text("node1:12:34 [0] NCCL INFO Bootstrap : Using eth0")
    (tmp_path / "readme.md").write_text("{nothing}")
    assert formats(tmp_path) == {
        "kineto.bin": "kineto", "packed": "kineto", "bare.txt": "kineto", "report": "nsight",
        "et.json": "execution trace", "dump": "flight recorder", "dump.json": "flight recorder",
        "snap": "memory snapshot", "log": "nccl log",
    }  # fmt: skip


def test_a_folder_of_our_own_files_is_one_trace(tmp_path: Path) -> None:
    columns = {
        "rank": [0, 1],
        "start_ns": [1, 2],
        "duration_ns": [1, 1],
        "kind": "host",
        "name": "a",
    }
    timeline = Timeline.from_columns(columns, source="measured")
    write_timeline(timeline, tmp_path / "timeline")
    (found,) = find_traces(tmp_path)
    assert (found.path, found.format) == (tmp_path / "timeline", "timeline")
    assert read_trace(tmp_path).equals(timeline)


def test_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in (10, 9, 100):
        trace(tmp_path / f"rank{rank}" / "trace.json", None)
    assert [file.path.parent.name for file in find_traces(tmp_path)] == [
        "rank9",
        "rank10",
        "rank100",
    ]


def test_links_lead_neither_twice_to_a_trace_nor_round_in_circles(tmp_path: Path) -> None:
    run, other = tmp_path / "runs" / "1", tmp_path / "elsewhere"
    run.mkdir(parents=True)
    other.mkdir()
    own, linked = trace(run / "rank-0.json", 0), trace(other / "rank-1.json", 1)
    for name, target in (("again", ".."), ("latest", "1"), ("others", other), ("lost", "nowhere")):
        (tmp_path / "runs" / name).symlink_to(target)
    (run / "newest.json").symlink_to(own)
    found = [file.path for file in find_traces(tmp_path / "runs")]
    assert len(found) == 2
    assert {path.resolve() for path in found} == {own, linked}


def test_each_rank_is_one_timeline(tmp_path: Path) -> None:
    for rank in range(3):
        trace(tmp_path / f"{rank}.json", rank, events=rank + 1)
    found = list(iter_timelines(tmp_path))
    assert [(part.ranks, part.num_spans) for part in found] == [((0,), 1), ((1,), 2), ((2,), 3)]
    assert read_trace(tmp_path).num_spans == 6


def test_traces_that_say_no_rank_have_their_place(tmp_path: Path) -> None:
    for name in "abc":
        trace(tmp_path / f"{name}.json", None)
    found = list(iter_timelines(tmp_path))
    assert [part.ranks for part in found] == [(0,), (1,), (2,)]
    assert "place in the folder" in found[2].metadata["notes"]


def test_a_guessed_rank_gives_way_to_one_that_is_said(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", 1)
    trace(tmp_path / "b.json", None)
    assert [part.ranks for part in iter_timelines(tmp_path)] == [(1,), (0,)]


def test_two_files_whose_rank_shows_only_at_their_end_are_refused(tmp_path: Path) -> None:
    for name in ("before.json", "after.json"):
        events = [{"ph": "X", "ts": number, "name": "x" * 60} for number in range(1000)]
        document = {"traceEvents": events, "distributedInfo": {"rank": 0}}
        (tmp_path / name).write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"rank 0, as .*after\.json is"):
        read_trace(tmp_path)


def test_damage_is_told_after_the_last_rank(tmp_path: Path) -> None:
    whole = trace(tmp_path / "0.json", 0, events=9).read_text()
    (tmp_path / "0.json").write_text(whole[:-80])
    trace(tmp_path / "1.json", 1, events=3)
    with pytest.raises(DamagedFile, match=r"0\.json") as caught:
        read_trace(tmp_path)
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.ranks == (0, 1)
    assert caught.value.readable.num_spans > 9


def count(timeline: Timeline) -> tuple[int, ...]:
    return (*timeline.ranks, timeline.num_spans)


def test_a_rank_cut_off_before_its_events_does_not_keep_the_others_from_being_read(
    tmp_path: Path,
) -> None:
    trace(tmp_path / "rank0.json", 0)
    (tmp_path / "rank1.json").write_text('{"schemaVersion": 1, "deviceProperties": [{"id": 0,')
    with pytest.raises(DamagedFile, match="before its events") as caught:
        read_trace(tmp_path)
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.ranks == (0,)


def test_files_that_only_speak_of_traces_are_left_alone(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json", 0)
    (tmp_path / "config.json").write_text('{"traceEvents": 3}')
    (tmp_path / "water.json").write_text('[{"ph": 7.1, "temperature": 20}]')
    assert formats(tmp_path) == {"rank0.json": "kineto"}


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh9"])
def test_a_packing_that_is_not_read_says_to_unpack_it(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "trace.json.packed").write_bytes(start + bytes(40))
    with pytest.raises(InputError, match="unpack it"):
        read_trace(tmp_path)


def test_other_processes_say_the_same(tmp_path: Path) -> None:
    for rank in range(5):
        trace(tmp_path / f"{rank}.json", rank, events=rank + 1)
    answers = list(map_traces(count, tmp_path, num_workers=2))
    assert answers == list(map_traces(count, tmp_path)) == [(r, r + 1) for r in range(5)]
    in_two, here = (list(iter_timelines(tmp_path, num_workers=jobs)) for jobs in (2, 1))
    assert all(one.equals(other) for one, other in zip(in_two, here, strict=True))


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda _: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no file of a known format"),
        (lambda path: path.write_text("hello"), "is of no known format"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_bytes(pickle.dumps({"segments": []})), "mw memory reads"),
        (lambda path: path.write_text('{"version": "2", "entries": []}'), "mw hang reads"),
        (lambda path: path.write_text('{"schema": 1, "nodes": []}'), "only: execution trace"),
    ],
)
def test_what_holds_no_trace_is_refused(tmp_path: Path, make: Any, fault: str) -> None:
    path = tmp_path / "there"
    make(path)
    with pytest.raises(InputError, match=fault):
        read_trace(path)
