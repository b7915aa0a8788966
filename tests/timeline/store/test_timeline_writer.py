"""Spans recorded one by one are all there, also after a kill."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import (
    SpanKind,
    Timeline,
    TimelineSource,
    TimelineWriter,
    read_timeline,
    repair_timeline,
)

EVERYTHING: dict[str, Any] = {
    "kind": SpanKind.COMMUNICATION,
    "lane": "stream 20",
    "process": "gpu 0",
    "flow_out": 4,
    "flow_in": 3,
    "bytes": 1 << 40,
    "collective": "send",
    "group": "pp",
    "dtype": "bf16",
    "stage": 1,
    "microbatch": 2,
    "layer": 3,
    "extra": '{"peer": 1}',
}


def test_span_is_read_with_all_it_says(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=5) as writer:
        writer.span("send", 10, 20, **EVERYTHING)
    (row,) = read_timeline(tmp_path).spans.to_pylist()
    assert row == {"rank": 5, "name": "send", "start_ns": 10, "duration_ns": 20, **EVERYTHING}


def test_span_needs_only_name_and_times(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0) as writer:
        writer.span("step", 0, 7)
    (row,) = read_timeline(tmp_path).spans.to_pylist()
    assert (row["kind"], row["lane"], row["process"]) == ("compute", "main", "main")


def test_numpy_numbers_are_taken(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0) as writer:
        writer.span("a", np.int64(5), np.int32(6), bytes=np.int64(7), flow_in=np.int64(8))  # type: ignore[arg-type]
    (row,) = read_timeline(tmp_path).spans.to_pylist()
    assert [row[name] for name in ("start_ns", "duration_ns", "bytes", "flow_in")] == [5, 6, 7, 8]


def test_counter_is_read(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=1) as writer:
        writer.counter("memory allocated", 3, 2**40, unit="bytes")
    assert read_timeline(tmp_path).counters.to_pylist() == [
        {"rank": 1, "name": "memory allocated", "unit": "bytes", "time_ns": 3, "value": 2.0**40}
    ]


def test_segments_become_one_file_on_closing(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0, segment_spans=10) as writer:
        for i in range(95):
            writer.span(f"op {i % 7}", i, 1, layer=i % 3)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.parquet"]
    assert pq.read_metadata(tmp_path / "rank-00000.parquet").num_row_groups == 10
    timeline = read_timeline(tmp_path)
    assert timeline.column("start_ns").tolist() == list(range(95))
    assert timeline.spans.column("name").to_pylist() == [f"op {i % 7}" for i in range(95)]
    assert timeline.column("layer").tolist() == [i % 3 for i in range(95)]


def test_memory_holds_no_more_than_one_segment(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0, segment_spans=100) as writer:
        most = 0
        for i in range(1000):
            writer.span("a", i, 1, bytes=i)
            most = max(most, len(writer._rows))
    assert most < 100 * 5


def test_columns_are_added_at_once(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=2, source="simulated") as writer:
        writer.span("before", 0, 1)
        writer.extend({"start_ns": [1, 2], "duration_ns": 1, "kind": "host", "name": "bulk"})
        writer.span("after", 3, 1)
    timeline = read_timeline(tmp_path)
    assert timeline.spans.column("name").to_pylist() == ["before", "bulk", "bulk", "after"]
    assert (timeline.ranks, timeline.source) == ((2,), TimelineSource.SIMULATED)


def test_columns_of_another_rank_are_refused(tmp_path: Path) -> None:
    columns = {"rank": [2, 3], "start_ns": 0, "duration_ns": 1, "kind": "host", "name": "x"}
    with (
        TimelineWriter(tmp_path, rank=2) as writer,
        pytest.raises(InputError, match="has rank 3 in the file of rank 2"),
    ):
        writer.extend(columns)


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (("a", 0, -1), "span.duration_ns: 1 rows are below 0, first -1"),
        (("a", 0.5, 1), "span.start_ns: does not fit int64"),
        (("a", "0", 1), "span.start_ns"),
        (("a", 2**63 - 1, 1), "exceeds int64 ns"),
        (("a", 2**70, 1), "span.start_ns"),
        ((5, 0, 1), "span.name"),
        (("\ud800", 0, 1), "span.name: holds something that is not text"),
        (("a", 0, 1, {"kind": "comput"}), "did you mean compute"),
        (("a", 0, 1, {"bytes": -5}), "span.bytes: 1 rows are below 0"),
        (("a", 0, 1, {"stage": 2**31}), "span.stage: does not fit int32"),
        (("a", 0, 1, {"flow_out": "x"}), "span.flow_out"),
        (("a", 0, 1, {"flow_in": -3}), "span.flow_in: 1 rows are below 0"),
        (("a", 0, 1, {"extra": "{"}), "is not a JSON object"),
    ],
)
def test_bad_span_is_refused_at_once_and_others_are_kept(
    tmp_path: Path, span: tuple[Any, ...], said: str
) -> None:
    with TimelineWriter(tmp_path, rank=0) as writer:
        writer.span("good", 0, 1)
        with pytest.raises(InputError) as caught:
            writer.span(*span[:3], **(span[3] if len(span) > 3 else {}))
        writer.span("good", 1, 1)
    assert said in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)
    assert read_timeline(tmp_path).column("start_ns").tolist() == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much"])
def test_bad_counter_is_refused_at_once(tmp_path: Path, value: Any) -> None:
    with (
        TimelineWriter(tmp_path, rank=0) as writer,
        pytest.raises(InputError, match=r"counter\.value"),
    ):
        writer.counter("memory", 0, value)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank -1"):
        TimelineWriter(tmp_path, rank=-1)
    with pytest.raises(InputError, match="source 'guess'"):
        TimelineWriter(tmp_path, rank=0, source="guess")


def test_spans_of_several_threads_are_all_there(tmp_path: Path) -> None:
    def record(lane: int) -> None:
        for i in range(2000):
            writer.span("op", i, 1, lane=f"thread {lane}", layer=i % 50)

    with TimelineWriter(tmp_path, rank=0, segment_spans=300) as writer:
        threads = [threading.Thread(target=record, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    timeline = read_timeline(tmp_path)
    lanes = timeline.string_column("lane")
    for code in range(4):
        mine = lanes.codes == code
        assert timeline.column("start_ns")[mine].tolist() == list(range(2000))
        assert timeline.column("layer")[mine].tolist() == [i % 50 for i in range(2000)]


def test_run_that_fails_leaves_a_closed_file(tmp_path: Path) -> None:
    def run() -> None:
        with TimelineWriter(tmp_path, rank=0) as writer:
            writer.span("last words", 0, 1)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        run()
    assert read_timeline(tmp_path).num_spans == 1


def test_resumed_run_adds_to_its_record(tmp_path: Path) -> None:
    for start in (0, 10):
        with TimelineWriter(tmp_path, rank=0, metadata={"run": "r"}) as writer:
            writer.span("step", start, 5)
            writer.counter("power", start, 300, unit="W")
    timeline = read_timeline(tmp_path)
    assert timeline.column("start_ns").tolist() == [0, 10]
    assert timeline.counters.num_rows == 2


def test_record_that_was_closed_without_a_span_is_continued(tmp_path: Path) -> None:
    TimelineWriter(tmp_path, rank=0).close()
    with TimelineWriter(tmp_path, rank=0) as writer:
        writer.span("step", 0, 5)
    assert read_timeline(tmp_path).num_spans == 1


def test_metadata_of_a_resumed_run_is_added_to(tmp_path: Path) -> None:
    for metadata in ({"run": "1"}, {"run": "1", "host": "a"}, None, {"gpus": "8"}):
        with TimelineWriter(tmp_path, rank=0, metadata=metadata) as writer:
            writer.span("step", 0, 5)
            writer.counter("power", 0, 300)
    assert read_timeline(tmp_path).metadata == {"run": "1", "host": "a", "gpus": "8"}


def test_added_metadata_is_there_before_closing(tmp_path: Path) -> None:
    TimelineWriter(tmp_path, rank=0, metadata={"run": "1"}).close()
    with TimelineWriter(tmp_path, rank=0, metadata={"host": "a"}) as writer:
        writer.span("step", 0, 5)
        writer.flush()
        with pytest.raises(DamagedFile) as caught:
            read_timeline(tmp_path)
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.metadata == {"run": "1", "host": "a"}


def test_metadata_and_source_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0, metadata={"run": "1", "host": "a"}) as writer:
        writer.span("step", 0, 5)
    with pytest.raises(InputError) as caught:
        TimelineWriter(tmp_path, rank=0, source="simulated", metadata={"run": "2", "host": "b"})
    assert [problem.what for problem in caught.value.problems] == [
        "is '1' in the file, not '2'",
        "is 'a' in the file, not 'b'",
        "holds a measured run, not a simulated one",
    ]
    assert all(problem.fix for problem in caught.value.problems)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.parquet"]


def test_closed_writer_takes_nothing_more(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path, rank=0)
    writer.span("in time", 0, 1)
    writer.close()
    writer.close()
    columns = {"start_ns": [1], "duration_ns": 1, "kind": "host", "name": "late"}
    late: list[Callable[[], None]] = [
        lambda: writer.span("late", 0, 1),
        lambda: writer.counter("late", 0, 1),
        lambda: writer.extend(columns),
        writer.flush,
    ]
    for record in late:
        with pytest.raises(InputError, match="was closed already") as caught:
            record()
        assert caught.value.problems[0].fix
    assert read_timeline(tmp_path).num_spans == 1


def test_folders_above_are_made(tmp_path: Path) -> None:
    TimelineWriter(tmp_path / "new" / "timeline", rank=0).close()
    assert (tmp_path / "new" / "timeline").is_dir()


def test_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file, not a folder"):
        TimelineWriter(tmp_path / "file", rank=0)


def test_folder_with_the_name_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.parquet.partial").mkdir()
    with pytest.raises(InputError, match="Is a directory"):
        TimelineWriter(tmp_path, rank=0)


FULL_DISK = """
import os, resource, sys
from meshwright.errors import InputError
from meshwright.timeline import TimelineWriter
writer = TimelineWriter(sys.argv[1], rank=0)
writer.extend({"start_ns": range(10), "duration_ns": 1, "kind": "host", "name": "op"})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
writer.span(os.urandom(20_000).hex(), 0, 1)
for attempt in range(2):
    try:
        writer.close()
    except InputError as error:
        print(error.problems[0].where, error.problems[0].fix)
"""


def test_full_disk_on_closing_is_named_and_keeps_what_was_flushed(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    path = tmp_path / "rank-00000.parquet.partial"
    assert ran.stdout.splitlines() == [f"{path} free some space there, or choose another place"]
    assert len(repair_timeline(tmp_path).repaired) == 1
    assert read_timeline(tmp_path).num_spans == 10


def test_second_writer_of_a_rank_is_refused(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0) as writer:
        writer.span("mine", 0, 1)
        writer.flush()
        with pytest.raises(InputError, match="is being written by another process"):
            TimelineWriter(tmp_path, rank=0)
        with pytest.raises(InputError, match="is being written by another process"):
            repair_timeline(tmp_path)
        writer.span("still mine", 1, 1)
    assert read_timeline(tmp_path).num_spans == 2


VICTIM = """
import sys
from meshwright.timeline import TimelineWriter
writer = TimelineWriter(sys.argv[1], rank=3, segment_spans=500, metadata={"run": "killed"})
i = 0
while True:
    writer.span("op", i, 1, layer=i % 8)
    writer.counter("memory", i, i, unit="bytes")
    i += 1
    if i % 300 == 0:
        writer.flush()
        print(i, flush=True)
"""


def test_a_writer_that_is_open_has_loaded_all_that_it_needs(tmp_path: Path) -> None:
    # Loading takes a second or more, which a process that has to end may not have.
    program = """
import sys
from meshwright.timeline import TimelineWriter
writer = TimelineWriter(sys.argv[1], rank=0)
loaded = set(sys.modules)
writer.span("op", 1, 1)
writer.counter("memory", 1, 1)
writer.close()
print(*sorted(set(sys.modules) - loaded))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert not subprocess.check_output(command, text=True).strip()


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, int]:
    """A folder whose writer was killed in the middle, and the spans it had flushed by then."""
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        flushed = 0
        while flushed < 3000:
            flushed = int(victim.stdout.readline())
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    return tmp_path, flushed


def test_killed_writer_loses_only_what_it_had_not_flushed(killed: tuple[Path, int]) -> None:
    folder, flushed = killed
    with pytest.raises(DamagedFile, match="was not closed") as caught:
        read_timeline(folder)
    kept = caught.value.readable
    assert isinstance(kept, Timeline)
    assert kept.num_spans >= flushed
    assert kept.column("start_ns").tolist() == list(range(kept.num_spans))
    assert kept.metadata == {"run": "killed"}
    assert {Path(problem.where).name for problem in caught.value.problems} == {
        "rank-00003.parquet.partial",
        "counters-00003.parquet.partial",
    }


def test_repair_makes_the_record_of_a_killed_writer_readable_by_anyone(
    killed: tuple[Path, int],
) -> None:
    folder, flushed = killed
    assert len(repair_timeline(folder).repaired) == 2
    assert read_timeline(folder).num_spans >= flushed
    assert pq.read_table(folder / "rank-00003.parquet").num_rows >= flushed


def test_restarted_writer_continues_the_record_of_a_killed_one(killed: tuple[Path, int]) -> None:
    folder, flushed = killed
    with TimelineWriter(folder, rank=3) as writer:
        writer.span("after restart", -1, 1)
    timeline = read_timeline(folder)
    assert timeline.num_spans > flushed
    assert timeline.spans.column("name").to_pylist()[-2:] == ["op", "after restart"]
    assert timeline.counters.num_rows >= flushed
