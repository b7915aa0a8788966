"""The JSON file says what the timeline says, by the rules of Perfetto's importer."""

import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import (
    DictionaryColumn,
    SpanKind,
    Timeline,
    count_spans,
    write_perfetto,
    write_timeline,
)

EPOCH = 1_763_000_000_123_456_789


def trace(timeline: Timeline | Path, folder: Path) -> dict[str, Any]:
    path = folder / "trace.json"
    write_perfetto(timeline, path)
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def events(timeline: Timeline | Path, folder: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace(timeline, folder)["traceEvents"] if event["ph"] == phase]


def made(counters: dict[str, Any] | None = None, **columns: Any) -> Timeline:
    spans = {"rank": 0, "duration_ns": 5, "kind": "compute", "name": "op"} | columns
    return Timeline.from_columns(spans, counters, source="simulated", metadata={"run": "r"})


class Drawn(NamedTuple):
    """What Perfetto makes of a trace."""

    slices: list[dict[str, Any]]
    arrows: set[tuple[Any, Any]]
    complaints: list[str]


def drawn(loaded: dict[str, Any]) -> Drawn:
    """Read a trace by the rules of Perfetto's JSON importer.

    Events are taken in the order of time; at one moment longer slices come first and flow events
    last. A slice is pushed on its thread's stack after those that have ended; one that crosses
    the end of another is refused. A flow event binds to the slice on top of its thread's stack.
    """

    def when(event: dict[str, Any]) -> tuple[int, float]:
        return ns(event["ts"]), -event["dur"] if event["ph"] == "X" else 1.0

    def ns(microseconds: float) -> int:
        return round(microseconds * 1000)

    stacks: dict[int, list[dict[str, Any]]] = {}
    begun: dict[tuple[str, int], dict[str, Any]] = {}
    found = Drawn([], set(), [])
    timed = [event for event in loaded["traceEvents"] if event["ph"] in "Xsf"]
    for event in sorted(timed, key=when):
        stack = stacks.setdefault(event["tid"], [])
        if event["ph"] == "X":
            start, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            while stack and ns(stack[-1]["ts"]) + ns(stack[-1]["dur"]) <= start:
                if stack[-1]["dur"] == 0 == event["dur"] and ns(stack[-1]["ts"]) == start:
                    break
                stack.pop()
            if stack and start < ns(stack[-1]["ts"]) + ns(stack[-1]["dur"]) < end:
                found.complaints.append(f"{event} crosses {stack[-1]}")
            stack.append(event)
            found.slices.append(event)
            continue
        key = (event["name"], event["id"])
        if event["ph"] == "s":
            if key in begun:
                found.complaints.append(f"two starts of {key}")
            begun[key] = stack[-1]
        elif key not in begun or event["bp"] != "e":
            found.complaints.append(f"end without start: {event}")
        else:
            found.arrows.add((begun[key]["args"]["layer"], stack[-1]["args"]["layer"]))
    return found


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans whose layer is their row number; no two of a lane start together."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.integers(0, 1),
                st.integers(0, 60),
                st.integers(0, 20),
                st.integers(-1, 4),
                st.integers(-1, 4),
            ),
            min_size=1,
            max_size=25,
            unique_by=lambda row: row[:3],
        )
    )
    rank, lane, start, duration, out, into = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    return made(
        rank=rank,
        lane=DictionaryColumn(lane, ["a", "b"]),
        start_ns=start + EPOCH,
        duration_ns=duration,
        flow_out=out,
        flow_in=into,
        layer=np.arange(len(rows)),
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_perfetto_draws_every_span_and_every_flow(tmp_path: Path, timeline: Timeline) -> None:
    loaded = trace(timeline, tmp_path)
    found = drawn(loaded)
    assert found.complaints == []
    base = loaded["baseTimeNanoseconds"]
    times = {
        slice_["args"]["layer"]: (round(slice_["ts"] * 1000) + base, round(slice_["dur"] * 1000))
        for slice_ in found.slices
    }
    start, duration = timeline.column("start_ns").tolist(), timeline.column("duration_ns").tolist()
    assert times == dict(enumerate(zip(start, duration, strict=True)))
    assert {frozenset(arrow) for arrow in found.arrows} == {
        frozenset(arrow) for arrow in expected_arrows(timeline)
    }


def expected_arrows(timeline: Timeline) -> set[tuple[int, int]]:
    """Pairs of rows: each target with the earliest source of its flow, of its own rank if any."""
    out, into = timeline.column("flow_out").tolist(), timeline.column("flow_in").tolist()
    rank, start = timeline.column("rank").tolist(), timeline.column("start_ns").tolist()
    lane = timeline.string_column("lane").codes.tolist()
    first_lane = {
        r: next(code for code, of in zip(lane, rank, strict=True) if of == r) for r in rank
    }

    def drawn_at(row: int) -> tuple[int, int, bool]:
        return start[row], rank[row], lane[row] != first_lane[rank[row]]

    source, own = {}, {}
    for row in sorted(range(len(out)), key=drawn_at, reverse=True):
        source[out[row]] = own[rank[row], out[row]] = row
    ends = [(row, flow) for row, flow in enumerate(into) if flow >= 0 and flow in source]
    return {(own.get((rank[row], flow), source[flow]), row) for row, flow in ends}


def test_what_a_column_tells_stands_once_among_the_arguments(tmp_path: Path) -> None:
    extra = '{"dtype":"BFloat16","grid":1}'
    timeline = made(rank=0, start_ns=[0, 10], dtype=["bf16", None], extra=[extra, extra])
    write_perfetto(timeline, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert [text.count(name) for name in ('"bf16"', '"BFloat16"', '"grid"')] == [1, 1, 2]


def test_ranks_are_processes_and_lanes_threads(tmp_path: Path) -> None:
    timeline = made(rank=[3, 0, 3], lane=["stream 7", "host", "stream 20"], start_ns=[0, 1, 2])
    names = [
        (event["name"], event["pid"], event.get("tid"), next(iter(event["args"].values())))
        for event in events(timeline, tmp_path, "M")
    ]
    assert names == [
        ("process_name", 0, None, "rank 0"),
        ("process_sort_index", 0, None, 0),
        ("thread_name", 0, 4, "host"),
        ("thread_sort_index", 0, 4, 0),
        ("process_name", 3, None, "rank 3"),
        ("process_sort_index", 3, None, 3),
        ("thread_name", 3, 5, "stream 7"),
        ("thread_sort_index", 3, 5, 0),
        ("thread_name", 3, 6, "stream 20"),
        ("thread_sort_index", 3, 6, 1),
    ]


def test_no_thread_has_the_id_of_a_process(tmp_path: Path) -> None:
    timeline = made(
        rank=np.arange(20) % 10, lane=DictionaryColumn(np.arange(20) // 10, ["a", "b"]), start_ns=0
    )
    named = events(timeline, tmp_path, "M")
    threads = [event["tid"] for event in named if event["name"] == "thread_name"]
    assert len(set(threads)) == len(threads) == 20
    assert not set(threads) & {event["pid"] for event in named}


def test_processes_of_a_rank_show_in_its_threads_names(tmp_path: Path) -> None:
    timeline = made(process=["gpu 0", "host"], lane=["stream 7", "main"], start_ns=[0, 1])
    names = [
        e["args"]["name"] for e in events(timeline, tmp_path, "M") if e["name"] == "thread_name"
    ]
    assert names == ["gpu 0: stream 7", "host: main"]


def test_overlapping_spans_of_a_lane_get_a_thread_of_their_own(tmp_path: Path) -> None:
    timeline = made(lane="stream 7", start_ns=[0, 3, 20])
    names = [
        e["args"]["name"] for e in events(timeline, tmp_path, "M") if e["name"] == "thread_name"
    ]
    assert names == ["stream 7", "stream 7 (overlap 1)"]


def test_every_nanosecond_is_kept(tmp_path: Path) -> None:
    start = [EPOCH, EPOCH + 1, EPOCH + 86_400_000_000_001]
    loaded = trace(made(start_ns=start, duration_ns=[0, 1, 999_999_999_999]), tmp_path)
    spans = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    assert loaded["baseTimeNanoseconds"] == EPOCH
    assert [span["ts"] for span in spans] == [0, 0.001, 86_400_000_000.001]
    assert [span["dur"] for span in spans] == [0, 0.001, 999_999_999.999]


def test_attributes_are_arguments(tmp_path: Path) -> None:
    timeline = made(
        start_ns=[0, 10, 20, 30],
        kind=SpanKind.COMMUNICATION,
        bytes=[64, -1, -1, 0],
        collective=["all_gather", None, None, None],
        stage=[-1, 1, -1, 0],
        extra=['{"peer": [1, 2]}', None, None, '{"bytes": 5}'],
    )
    spans = events(timeline, tmp_path, "X")
    assert [span["args"] for span in spans] == [
        {"collective": "all_gather", "peer": [1, 2], "bytes": 64},
        {"stage": 1},
        {},
        {"stage": 0, "bytes": 0},
    ]
    assert {span["cat"] for span in spans} == {"communication"}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_escaped(tmp_path: Path, names: list[str]) -> None:
    timeline = made(name=names, lane=names, group=names, start_ns=np.arange(len(names)) * 10)
    spans = sorted(events(timeline, tmp_path, "X"), key=lambda span: float(span["ts"]))
    assert [span["name"] for span in spans] == names
    assert [span["args"]["group"] for span in spans] == names


def test_counters_are_tracks_with_their_unit(tmp_path: Path) -> None:
    counters = {
        "rank": [0, 0, 2],
        "name": ["memory", "memory", "power"],
        "unit": ["bytes", "bytes", ""],
        "time_ns": [EPOCH, EPOCH + 1500, EPOCH + 7],
        "value": [8e10, 1e300, -0.125],
    }
    found = events(made(counters, start_ns=[EPOCH]), tmp_path, "C")
    assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in found] == [
        ("memory", 0, 0, {"bytes": 8e10}),
        ("memory", 0, 1.5, {"bytes": 1e300}),
        ("power", 2, 0.007, {"value": -0.125}),
    ]


def test_source_and_metadata_are_kept(tmp_path: Path) -> None:
    about = trace(made(start_ns=[0]), tmp_path)["metadata"]
    assert about == {"run": "r", "source": "simulated", "writer": "meshwright", "schema_version": 1}


def test_display_unit_is_not_set_because_viewers_disagree_on_it(tmp_path: Path) -> None:
    assert "displayTimeUnit" not in trace(made(start_ns=[0]), tmp_path)


def test_empty_timeline_is_a_valid_trace(tmp_path: Path) -> None:
    assert trace(Timeline.empty(), tmp_path)["traceEvents"] == []


def test_folder_is_drawn_like_the_timeline_in_it(tmp_path: Path) -> None:
    timeline = made(rank=[0, 1, 1], start_ns=[5, 3, 9], flow_out=[-1, 7, -1], flow_in=[7, -1, 7])
    write_timeline(timeline, tmp_path / "timeline")
    assert trace(tmp_path / "timeline", tmp_path) == trace(timeline, tmp_path)


def test_name_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    timeline = made(start_ns=[1, 2, 30])
    write_perfetto(timeline, tmp_path / "trace.json.gz")
    packed = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert packed == trace(timeline, tmp_path)


def test_many_chunks_are_one_trace(tmp_path: Path) -> None:
    rows = 200_000
    number = np.arange(rows)
    timeline = made(start_ns=number * 10, layer=number % 64, flow_out=number, flow_in=number - 1)
    loaded = trace(timeline, tmp_path)
    phases = np.array([event["ph"] for event in loaded["traceEvents"]])
    assert [(phases == phase).sum() for phase in "Xsf"] == [rows, rows - 1, rows - 1]


def test_damaged_folder_is_drawn_as_far_as_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    write_timeline(made(rank=[0, 1], start_ns=[0, 1]), folder)
    cut = folder / "rank-00000.parquet"
    cut.write_bytes(cut.read_bytes()[:100])
    with pytest.raises(DamagedFile, match=re.escape(str(cut))):
        write_perfetto(folder, tmp_path / "trace.json")
    loaded = json.loads((tmp_path / "trace.json").read_text())
    assert [event["pid"] for event in loaded["traceEvents"] if event["ph"] == "X"] == [1]


def test_progress_adds_up_to_the_spans_of_the_folder(tmp_path: Path) -> None:
    number = np.arange(200_000)
    write_timeline(made(rank=number // 150_000, start_ns=number * 10), tmp_path / "timeline")
    told: list[int] = []
    write_perfetto(tmp_path / "timeline", tmp_path / "trace.json", progress=told.append)
    assert len(told) > 3
    assert min(told) > 0
    assert sum(told) == count_spans(tmp_path / "timeline") == 200_000


def test_folders_above_the_file_are_made(tmp_path: Path) -> None:
    write_perfetto(made(start_ns=[0]), tmp_path / "new" / "one" / "trace.json")
    assert (tmp_path / "new" / "one" / "trace.json").is_file()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_full_disk_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    (tmp_path / name).write_text("before")
    number = np.arange(30_000)
    with pytest.raises(InputError, match="No space left on device") as caught:
        write_perfetto(made(start_ns=number * 7919 % 1_000_003, layer=number), tmp_path / name)
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == (
        str(tmp_path / name),
        "free some space there, or choose another place",
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "before"


@pytest.mark.parametrize("path", ["/proc/trace.json", "/proc/nope/trace.json"])
def test_place_that_takes_no_file_is_named(path: str) -> None:
    with pytest.raises(InputError) as caught:
        write_perfetto(made(start_ns=[0]), path)
    assert path.startswith(caught.value.problems[0].where)
    assert caught.value.problems[0].fix


def test_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        write_perfetto(made(start_ns=[0]), tmp_path)


def test_file_in_the_place_of_its_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="which is a file, not a folder"):
        write_perfetto(made(start_ns=[0]), tmp_path / "file" / "trace.json")


def test_timeline_that_is_not_there_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        write_perfetto(tmp_path / "nowhere", tmp_path / "trace.json.gz")
    assert list(tmp_path.iterdir()) == []
