"""What was read once is not read again, unless it changed."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.timeline import Timeline
from meshwright.timeline.readers.trace_cache import (
    TraceCache,
    open_default_cache,
    read_through_cache,
)
from meshwright.timeline.readers.trace_folder import read_trace


class Reader:
    """Counts how often it is asked."""

    def __init__(self, spans: int = 3) -> None:
        self.asked = 0
        self.spans = spans

    def __call__(self) -> Timeline:
        self.asked += 1
        columns = {
            "rank": 4, "start_ns": list(range(self.spans)), "duration_ns": 1, "kind": "compute",
            "name": "gemm", "extra": '{"a": 1}',
        }  # fmt: skip
        counters = {"rank": [4], "name": ["power"], "time_ns": [1], "value": [2.5]}
        return Timeline.from_columns(columns, counters, source="measured", metadata={"a": "b"})


@pytest.fixture
def cache(tmp_path: Path) -> TraceCache:
    return TraceCache(tmp_path / "cache", min_file_bytes=1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text("text")
    return path


def entries(cache: TraceCache) -> list[Path]:
    return sorted(cache.folder.iterdir())


def test_a_second_read_comes_from_the_cache_and_says_the_same(
    cache: TraceCache, trace: Path
) -> None:
    reader = Reader()
    first, second = (read_through_cache(cache, trace, "v1", reader) for _ in range(2))
    assert reader.asked == 1
    assert second.equals(first)


def test_a_changed_trace_or_another_version_is_read_anew(cache: TraceCache, trace: Path) -> None:
    reader = Reader()
    read_through_cache(cache, trace, "v1", reader)
    read_through_cache(cache, trace, "v2", reader)
    os.utime(trace, ns=(1, 1))
    read_through_cache(cache, trace, "v1", reader)
    trace.write_text("more text")
    read_through_cache(cache, trace, "v1", reader)
    assert reader.asked == 4


def test_another_trace_of_the_same_size_and_time_is_read_anew(
    cache: TraceCache, trace: Path
) -> None:
    reader = Reader()
    read_through_cache(cache, trace, "v1", reader)
    written_ns = trace.stat().st_mtime_ns
    trace.write_text("TEXT")
    os.utime(trace, ns=(written_ns, written_ns))  # as cp -p and rsync -t do
    read_through_cache(cache, trace, "v1", reader)
    assert reader.asked == 2


def test_what_other_code_read_is_read_anew(
    cache: TraceCache, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader()
    read_through_cache(cache, trace, "v1", reader)
    monkeypatch.setattr("meshwright.timeline.readers.trace_cache._code", lambda: "changed")
    read_through_cache(cache, trace, "v1", reader)
    assert reader.asked == 2


@pytest.mark.parametrize("left", [0, 1, 100, 600])
def test_a_damaged_entry_is_dropped_and_read_anew(
    cache: TraceCache, trace: Path, left: int
) -> None:
    reader = Reader()
    first = read_through_cache(cache, trace, "v1", reader)
    (entry,) = entries(cache)
    entry.write_bytes(entry.read_bytes()[:left])
    assert read_through_cache(cache, trace, "v1", reader).equals(first)
    assert reader.asked == 2
    assert read_through_cache(cache, trace, "v1", reader).equals(first)
    assert reader.asked == 2


def test_the_least_recently_used_goes_first(cache: TraceCache, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text("text")
    reader = Reader()
    read_through_cache(cache, paths[0], "v1", reader)
    (entry,) = entries(cache)
    small = cache._replace(max_bytes=int(2.5 * entry.stat().st_size))
    read_through_cache(small, paths[1], "v1", reader)
    for age, item in enumerate(sorted(entries(cache), key=lambda item: item != entry)):
        os.utime(item, (1000 + age, 1000 + age))
    read_through_cache(small, paths[0], "v1", reader)  # Now the second is the older.
    read_through_cache(small, paths[2], "v1", reader)
    assert len(entries(cache)) == 2
    read_through_cache(small, paths[0], "v1", reader)
    assert reader.asked == 3


def test_many_may_write_at_once(cache: TraceCache, trace: Path) -> None:
    reader = Reader(spans=1000)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(read_through_cache, cache, trace, "v1", reader) for _ in range(16)]
    expected = reader()
    assert all(answer.result().equals(expected) for answer in answers)
    assert [item.name.endswith(".trace.arrow") for item in entries(cache)] == [True]


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "file").write_text("")
    reader = Reader()
    assert (
        read_through_cache(
            TraceCache(tmp_path / "file", min_file_bytes=1), trace, "v1", reader
        ).num_spans
        == 3
    )


def test_small_traces_are_not_kept(tmp_path: Path, trace: Path) -> None:
    read_through_cache(TraceCache(tmp_path / "cache"), trace, "v1", Reader())
    assert not (tmp_path / "cache").exists()


def test_the_user_chooses_where_or_whether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_default_cache() == TraceCache(tmp_path / "meshwright" / "traces")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "mine"))
    assert open_default_cache() == TraceCache(tmp_path / "mine")
    monkeypatch.setenv("MESHWRIGHT_CACHE", "off")
    assert open_default_cache() is None


def test_details_are_kept_apart(cache: TraceCache, trace: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"grid": 1}}
    trace.write_text(json.dumps({"traceEvents": [event]}))
    for _ in range(2):
        lean, standard = (read_trace(trace, detail=d, cache=cache) for d in ("lean", "standard"))
        assert "extra" not in lean.spans.column_names
        assert standard.spans.column("extra").to_pylist() == ['{"grid": 1}']
    assert len(entries(cache)) == 2
