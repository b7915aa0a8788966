"""A timeline that is written and read is the same, and damage costs only what is damaged."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline import (
    DictionaryColumn,
    SpanKind,
    Timeline,
    TimelineWriter,
    count_spans,
    read_ranks,
    read_timeline,
    write_timeline,
)
from meshwright.timeline.store import timeline_folder

counts = st.integers(0, 2**31 - 1)
big_counts = st.integers(0, 2**63 - 1)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    rows = draw(st.integers(0, 12))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    spans: dict[str, Any] = {
        "rank": column(st.integers(0, 3)),
        "process": column(labels),
        "lane": column(labels),
        "start_ns": column(st.integers(-(2**62), 2**62)),
        "duration_ns": column(st.integers(0, 2**61)),
        "kind": column(st.sampled_from(SpanKind)),
        "name": column(labels),
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "flow_out": big_counts,
        "flow_in": big_counts,
        "bytes": big_counts,
        "collective": labels,
        "group": labels,
        "dtype": labels,
        "stage": counts,
        "microbatch": counts,
        "layer": counts,
        "extra": st.sampled_from(["{}", '{"a": 1}']),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        spans[name] = column(st.none() | optional[name])
    times = draw(st.lists(st.integers(-(2**62), 2**62), max_size=5))
    counters = {
        "rank": [draw(st.integers(0, 4)) for _ in times],
        "name": [draw(labels) for _ in times],
        "unit": [draw(labels) for _ in times],
        "time_ns": times,
        "value": [draw(st.floats(allow_nan=False, allow_infinity=False)) for _ in times],
    }
    metadata = draw(st.dictionaries(labels, labels, max_size=2))
    source = draw(st.sampled_from(["simulated", "measured"]))
    return Timeline.from_columns(spans, counters, source=source, metadata=metadata)


def steps(ranks: int = 3, rows: int = 100) -> Timeline:
    """Rank after rank, spans of 5 ns every 10 ns."""
    number = np.arange(ranks * rows)
    return Timeline.from_columns(
        {
            "rank": number // rows,
            "lane": DictionaryColumn(number % 2, ["stream 0", "stream 1"]),
            "start_ns": number % rows * 10,
            "duration_ns": 5,
            "kind": DictionaryColumn(
                number % 3, [SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.WAIT]
            ),
            "name": DictionaryColumn(number % 4, ["gemm", "all_reduce", "wait", "norm"]),
            "bytes": np.where(number % 3 == 1, number, -1),
        },
        {
            "rank": [0, 1],
            "name": "power",
            "unit": "W",
            "time_ns": [0, 500],
            "value": [300.0, 310.5],
        },
        source="measured",
        metadata={"run": "r1"},
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_what_is_written_is_read(tmp_path: Path, timeline: Timeline) -> None:
    folder = tmp_path / "timeline"
    shutil.rmtree(folder, ignore_errors=True)
    write_timeline(timeline, folder)
    if not timeline.ranks:
        assert list(folder.iterdir()) == []
        return
    assert read_timeline(folder).equals(Timeline.concat(timeline.split_by_rank()))


def test_one_file_per_rank_and_one_for_counters_where_there_are_any(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "counters-00000.parquet",
        "counters-00001.parquet",
        "rank-00000.parquet",
        "rank-00001.parquet",
        "rank-00002.parquet",
    ]


def test_footer_says_version_source_and_metadata(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    pairs = pq.read_metadata(tmp_path / "rank-00000.parquet").metadata
    assert pairs[b"meshwright.version"] == b"1"
    assert pairs[b"meshwright.source"] == b"measured"
    assert pairs[b"meshwright.metadata"] == b'{"run":"r1"}'


def test_many_segments_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 7)
    write_timeline(steps(), tmp_path)
    assert pq.read_metadata(tmp_path / "rank-00000.parquet").num_row_groups == 15
    assert read_timeline(tmp_path).equals(steps())


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    timeline = read_timeline(tmp_path, columns=["start_ns"])
    assert timeline.spans.column_names == ["rank", "start_ns"]
    with pytest.raises(InputError, match="add 'name' to the columns"):
        timeline.string_column("name")


def test_timeline_with_fewer_columns_is_not_written(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path / "a")
    with pytest.raises(InputError, match="was read without"):
        write_timeline(
            read_timeline(tmp_path / "a", columns=["start_ns", "duration_ns"]), tmp_path / "b"
        )


def test_columns_without_any_value_are_not_loaded(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    timeline = read_timeline(tmp_path)
    assert "layer" not in timeline.spans.column_names
    assert set(timeline.column("layer").tolist()) == {-1}


def test_filters_on_reading_equal_selecting_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 16)
    write_timeline(steps(), tmp_path)
    wanted: dict[str, Any] = {"ranks": [0, 2], "kinds": ["wait"], "window_ns": (333, 612)}
    assert read_timeline(tmp_path, **wanted).equals(read_timeline(tmp_path).select(**wanted))


def test_row_groups_outside_the_window_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 10)
    write_timeline(steps(ranks=1), tmp_path)
    path = tmp_path / "rank-00000.parquet"
    data = bytearray(path.read_bytes())
    first_page = pq.read_metadata(path).row_group(0).column(3).data_page_offset
    data[first_page : first_page + 8] = b"\xff" * 8
    path.write_bytes(data)
    # The first row group is corrupt, which only shows where it is read.
    assert read_timeline(tmp_path, window_ns=(500, 510)).num_spans == 1
    with pytest.raises(DamagedFile):
        read_timeline(tmp_path, window_ns=(0, 10))


def test_one_file_can_be_read_alone(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    assert read_timeline(tmp_path / "rank-00001.parquet").ranks == (1,)


def test_ranks_come_one_at_a_time(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    assert [part.ranks for part in read_ranks(tmp_path)] == [(0,), (1,), (2,)]


def test_rank_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    with pytest.raises(InputError, match=r"has no rank 7 \(fix: there are 0, 1, 2\)"):
        read_timeline(tmp_path, ranks=[0, 7])


def test_place_without_timeline_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no timeline"):
        read_timeline(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_timeline(tmp_path / "nowhere")


def test_unknown_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    with pytest.raises(InputError, match="did you mean duration_ns"):
        read_timeline(tmp_path, columns=["duration"])


def test_writing_replaces_a_timeline_of_the_same_ranks(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    again = steps().select(window_ns=(600, 700))
    write_timeline(again, tmp_path)
    assert read_timeline(tmp_path).equals(again)


def test_writing_refuses_to_mix_with_other_ranks(tmp_path: Path) -> None:
    write_timeline(steps(ranks=3), tmp_path)
    with pytest.raises(InputError, match="other ranks: 2"):
        write_timeline(steps(ranks=2), tmp_path)


def test_cut_file_is_named_and_the_other_ranks_are_kept(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    path = tmp_path / "rank-00001.parquet"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DamagedFile) as caught:
        read_timeline(tmp_path)
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert "cut short" in problem.what
    assert isinstance(caught.value.readable, Timeline)
    rank = caught.value.readable.column("rank")
    assert np.unique(rank, return_counts=True)[1].tolist() == [100, 100]
    assert set(rank.tolist()) == {0, 2}
    assert caught.value.readable.counters.equals(steps().counters)


def test_cut_file_keeps_its_whole_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 10)
    write_timeline(steps(ranks=1), tmp_path)
    path = tmp_path / "rank-00000.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedFile, match=r"kept \d+ rows of \d+ whole segments") as caught:
        read_timeline(tmp_path)
    kept = caught.value.readable
    assert isinstance(kept, Timeline)
    assert 0 < kept.num_spans < 100
    assert kept.column("start_ns").tolist() == [10 * i for i in range(kept.num_spans)]


def test_corrupt_row_group_is_named_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 50)
    write_timeline(steps(ranks=1), tmp_path)
    path = tmp_path / "rank-00000.parquet"
    chunk = pq.read_metadata(path).row_group(1).column(3)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match="row group 1 is corrupt, its 50 rows are lost") as caught:
        read_timeline(tmp_path)
    kept = caught.value.readable
    assert isinstance(kept, Timeline)
    assert kept.column("start_ns").tolist() == [10 * i for i in range(50)]


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_flipped_byte_never_passes_for_data(tmp_path: Path, where: float, flip: int) -> None:
    folder = tmp_path / "timeline"
    shutil.rmtree(folder, ignore_errors=True)
    timeline = steps(ranks=1, rows=40).select(ranks=[0])
    write_timeline(timeline, folder)
    path = folder / "rank-00000.parquet"
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= flip
    path.write_bytes(data)
    faults: tuple[Problem, ...] = ()
    try:
        assert read_timeline(folder).equals(timeline)
    except DamagedFile as damage:
        faults = damage.problems
    assert all(problem.fix for problem in faults)


def test_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    path = tmp_path / "rank-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"meshwright.version": "2"}), path)
    with pytest.raises(InputError, match="schema version 2"):
        read_timeline(tmp_path)


def test_file_that_another_tool_rewrote_is_read(tmp_path: Path) -> None:
    write_timeline(steps(ranks=1), tmp_path)
    path = tmp_path / "rank-00000.parquet"
    plain = pq.read_table(path)
    strings = [
        column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        for column in plain.columns
    ]
    pq.write_table(pa.table(strings, names=plain.column_names), path)
    timeline = read_timeline(path)
    assert timeline.source == "unknown"
    assert timeline.string_column("name").values == ("gemm", "all_reduce", "wait", "norm")


def test_parquet_file_with_other_columns_is_no_timeline(tmp_path: Path) -> None:
    pq.write_table(pa.table({"rank": [0], "start_ns": [1]}), tmp_path / "rank-00000.parquet")
    with pytest.raises(DamagedFile, match="is not a timeline: it has no column process, lane"):
        read_timeline(tmp_path)


def test_parquet_file_with_other_types_is_no_timeline(tmp_path: Path) -> None:
    write_timeline(steps(ranks=1).select(ranks=[0]), tmp_path)
    path = tmp_path / "rank-00000.parquet"
    table = pq.read_table(path)
    at = table.column_names.index("start_ns")
    pq.write_table(table.set_column(at, "start_ns", pa.array(["soon"] * 100)), path)
    with pytest.raises(DamagedFile, match="is not a timeline"):
        read_timeline(tmp_path)


def test_writing_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    (tmp_path / "rank-00002.parquet.partial").mkdir()
    with pytest.raises(InputError, match="directory"):
        write_timeline(steps().select(window_ns=(0, 10)), tmp_path)
    assert read_timeline(tmp_path).equals(steps())
    assert [path.name for path in tmp_path.glob("*.partial")] == ["rank-00002.parquet.partial"]


@pytest.mark.parametrize("is_done", [False, True])
def test_interrupt_while_files_take_their_names_waits_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    write_timeline(steps(), tmp_path)
    again = steps().select(window_ns=(600, 700))
    rename = Path.replace
    calls = 0

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 2 and not is_done:
            raise KeyboardInterrupt
        moved = rename(path, target)
        if calls == 2:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_timeline(again, tmp_path)
    assert read_timeline(tmp_path).equals(again)
    assert list(tmp_path.glob("*.partial")) == []


def test_interrupt_before_that_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_timeline(steps(), tmp_path)
    sync = os.fsync
    calls = 0

    def interrupted(file: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        sync(file)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_timeline(steps().select(window_ns=(600, 700)), tmp_path)
    assert read_timeline(tmp_path).equals(steps())
    assert list(tmp_path.glob("*.partial")) == []


def test_many_ranks_need_few_open_files(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit[1]))
    try:
        write_timeline(steps(ranks=150, rows=1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert count_spans(tmp_path) == 150


def test_writing_over_a_live_writer_is_refused(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, rank=0) as writer:
        writer.span("mine", 0, 1)
        writer.flush()
        with pytest.raises(InputError, match="is being written by another process"):
            write_timeline(steps(ranks=1), tmp_path)
    assert read_timeline(tmp_path).num_spans == 1


def refused(work: Callable[[], object]) -> Problem:
    """The one problem that the work is refused with."""
    with pytest.raises(InputError) as caught:
        work()
    (problem,) = caught.value.problems
    assert problem.fix
    return problem


def test_folders_above_are_made(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path / "new" / "one" / "timeline")
    assert (tmp_path / "new" / "one" / "timeline").is_dir()


def test_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in refused(lambda: write_timeline(steps(), tmp_path / "file")).what
    assert "is a file" in refused(lambda: write_timeline(steps(), tmp_path / "file" / "t")).what
    deep = tmp_path / "file" / "t" / "t"
    assert "is a file" in refused(lambda: write_timeline(steps(), deep)).what


def test_place_that_takes_no_folder_is_named() -> None:
    assert refused(lambda: write_timeline(steps(), "/proc/timeline")).where == "/proc/timeline"


def test_folder_with_the_name_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.parquet").mkdir()
    assert "is a folder" in refused(lambda: write_timeline(steps(), tmp_path)).what
    assert "Is a directory" in refused(lambda: read_timeline(tmp_path)).what


def test_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    assert refused(lambda: read_timeline(tmp_path / ("x" * 300))).fix == "choose a shorter name"
    assert (
        refused(lambda: write_timeline(steps(), tmp_path / ("x" * 300))).fix
        == "choose a shorter name"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read everything")
def test_file_that_may_not_be_read_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    (tmp_path / "rank-00001.parquet").chmod(0)
    with pytest.raises(DamagedFile, match="Permission denied") as caught:
        read_timeline(tmp_path)
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.num_spans == 200


def test_metadata_that_is_no_text_is_refused(tmp_path: Path) -> None:
    bad: Any = {"run": 1}
    problem = refused(
        lambda: write_timeline(msgspec.structs.replace(steps(), metadata=bad), tmp_path)
    )
    assert (problem.where, problem.fix) == ("metadata.run", "give '1'")


def test_spans_are_counted_without_reading_them(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    assert count_spans(tmp_path) == 300
    assert count_spans(tmp_path / "rank-00001.parquet") == 100


def test_damaged_files_are_counted_as_far_as_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_folder, "SEGMENT_ROWS", 10)
    write_timeline(steps(), tmp_path)
    for rank, size in ((1, 40), (2, 20_000)):
        path = tmp_path / f"rank-{rank:05d}.parquet"
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedFile) as caught:
        read_timeline(tmp_path)
    assert isinstance(caught.value.readable, Timeline)
    assert 100 < count_spans(tmp_path) == caught.value.readable.num_spans < 200


def test_reading_tells_its_progress(tmp_path: Path) -> None:
    write_timeline(steps(), tmp_path)
    told: list[int] = []
    read_timeline(tmp_path, progress=told.append)
    assert told == [100, 100, 100]


def test_duckdb_reads_the_files_without_us(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    write_timeline(steps(), tmp_path)
    found = duckdb.execute(
        f"""
        select kind, count(*), sum(duration_ns), sum(bytes)
        from '{tmp_path}/rank-*.parquet' where start_ns >= 500 group by kind order by kind
        """
    ).fetchall()
    chosen = steps().select(window_ns=(500, 10**9))
    kinds = chosen.string_column("kind")
    of_kind = np.array(kinds.values)[kinds.codes]
    bytes_ = chosen.column("bytes")
    assert found == [
        (
            kind,
            int((of_kind == kind).sum()),
            5 * int((of_kind == kind).sum()),
            int(bytes_[of_kind == kind].sum()) if kind == "communication" else None,
        )
        for kind in ("communication", "compute", "wait")
    ]


def test_polars_reads_the_files_without_us(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    write_timeline(steps(), tmp_path)
    frame = pl.read_parquet(tmp_path / "rank-*.parquet")
    assert frame["start_ns"].to_list() == steps().column("start_ns").tolist()
    assert frame["name"].cast(pl.String).to_list() == steps().spans.column("name").to_pylist()


def test_pandas_reads_the_files_without_us(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    write_timeline(steps(ranks=1), tmp_path)
    frame = pd.read_parquet(tmp_path / "rank-00000.parquet")
    assert frame["name"].astype(str).tolist() == steps(ranks=1).spans.column("name").to_pylist()
    assert pd.read_parquet(tmp_path / "counters-00000.parquet")["value"].tolist() == [300.0]
