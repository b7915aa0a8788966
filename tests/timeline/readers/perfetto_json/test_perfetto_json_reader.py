"""What `write_perfetto` writes reads back: ranks, lanes, flows, attributes and counters."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import DamagedFile
from meshwright.observe.analyze.annotated_trace import annotate_timeline
from meshwright.observe.finding import Finding
from meshwright.timeline import Timeline, write_perfetto
from meshwright.timeline.readers.trace_folder import find_traces, read_trace

ROWS = {
    "rank": [0, 0, 0, 3, 3, 3],
    "process": ["host", "gpu 0", "gpu 0", "host", "gpu 0", "gpu 0"],
    "lane": ["thread 1", "stream 7", "stream 7", "thread 1", "stream 7", "stream 20"],
    "start_ns": [1_000_000_007, 1_000_000_900, 1_000_001_500, 1_000_000_100, 1_000_000_950, 0],
    "duration_ns": [123, 400, 50, 99, 1_234, 10**9],
    "kind": ["host", "compute", "memory_copy", "host", "compute", "communication"],
    "name": ["launch", "gemm", "Memcpy", "launch", "gemm", "ncclDevKernel_AllReduce"],
    "flow_out": [5, -1, -1, 9, -1, -1],
    "flow_in": [-1, 5, -1, -1, 9, -1],
    "bytes": [-1, -1, 4096, -1, -1, 1 << 40],
    "category": ["cuda_runtime", "kernel", "gpu_memcpy", "cuda_runtime", "kernel", "kernel"],
    "collective": [None, None, None, None, None, "all_reduce"],
    "group": [None, None, None, None, None, "default"],
    "extra": [None, '{"grid":[1,2,3]}', None, None, None, None],
}
COUNTERS = {
    "rank": [3, 3],
    "name": "memory",
    "unit": ["bytes", ""],
    "time_ns": [1_000_000_000, 1_000_000_001],
    "value": [1.5, 2.0],
}


@pytest.fixture
def timeline() -> Timeline:
    metadata = {"profiler": "kineto", "notes": "a guess"}
    return Timeline.from_columns(ROWS, COUNTERS, source="measured", metadata=metadata)


def rows(timeline: Timeline) -> list[tuple[object, ...]]:
    """Every span by its columns, whatever the order."""
    names = [name for name in ROWS if name in timeline.spans.column_names]
    columns = [timeline.spans.column(name).to_pylist() for name in names]
    return sorted(zip(*columns, strict=True), key=repr)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_spans_come_back_as_they_were(tmp_path: Path, timeline: Timeline, name: str) -> None:
    write_perfetto(timeline, tmp_path / name)
    (found,) = find_traces(tmp_path)
    assert found.format == "own trace"
    back = read_trace(tmp_path / name)
    assert back.ranks == (0, 3)
    assert rows(back) == rows(timeline)
    assert back.counters.to_pylist() == timeline.counters.to_pylist()
    assert (back.source, back.metadata) == (timeline.source, timeline.metadata)


def test_ranks_that_count_their_launches_alike_keep_them_apart(tmp_path: Path) -> None:
    alike = {**ROWS, "flow_out": [5, -1, -1, 5, -1, -1], "flow_in": [-1, 5, -1, -1, 5, -1]}
    write_perfetto(Timeline.from_columns(alike, source="measured"), tmp_path / "trace.json")
    back = read_trace(tmp_path / "trace.json")
    for part in back.split_by_rank():
        begun = part.column("flow_out")
        assert (begun >= 0).sum() == 1
        assert np.array_equal(
            part.column("flow_in")[part.column("flow_in") >= 0], begun[begun >= 0]
        )


def test_a_rank_with_one_process_keeps_its_name(tmp_path: Path, timeline: Timeline) -> None:
    alone = timeline.select(kinds=["compute"])
    write_perfetto(alone, tmp_path / "trace.json")
    back = read_trace(tmp_path / "trace.json")
    assert set(back.string_column("process").values) == {"gpu 0"}
    assert np.array_equal(np.sort(back.column("start_ns")), np.sort(alone.column("start_ns")))


def test_marks_of_findings_are_left_out(tmp_path: Path, timeline: Timeline) -> None:
    finding = Finding(
        name="x", title="X", family="gemm", evidence=(), ranks=(0,), cost_ms_per_step=None,
        gpu_share=None, cost_basis="", remedy="", spans=((0, 1_000_000_000, 1_000_000_100),),
    )  # fmt: skip
    write_perfetto(annotate_timeline(timeline, [finding]), tmp_path / "trace.json")
    back = read_trace(tmp_path / "trace.json")
    assert rows(back) == rows(timeline)
    assert "marks of mw analyze were left out" in back.metadata["notes"]


def test_a_file_that_breaks_off_keeps_what_came_before(tmp_path: Path, timeline: Timeline) -> None:
    write_perfetto(timeline, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json").write_bytes(text[: text.rindex(b'{"ph":"X"') + 20])
    with pytest.raises(DamagedFile, match="breaks off") as caught:
        read_trace(tmp_path / "trace.json")
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.num_spans == timeline.num_spans - 1
