"""What a timeline value answers."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.timeline import DictionaryColumn, SpanKind, Timeline, TimelineSource


@pytest.fixture
def timeline() -> Timeline:
    return Timeline.from_columns(
        {
            "rank": [1, 0, 1, 0],
            "start_ns": [10, 0, 30, 20],
            "duration_ns": [10, 10, 0, 5],
            "kind": ["compute", "communication", "wait", "compute"],
            "name": ["a", "b", "c", "a"],
            "bytes": [-1, 64, -1, -1],
        },
        {
            "rank": [0, 2],
            "name": "memory",
            "unit": "bytes",
            "time_ns": [5, 25],
            "value": [1.0, 2.0],
        },
        source="measured",
        metadata={"run": "7"},
    )


def names(timeline: Timeline) -> list[str]:
    found: list[str] = timeline.spans.column("name").to_pylist()
    return found


def test_extent_is_from_first_start_to_last_end(timeline: Timeline) -> None:
    assert timeline.extent_ns == (0, 30)


def test_ranks_are_those_of_spans_and_counters(timeline: Timeline) -> None:
    assert timeline.ranks == (0, 1, 2)


def test_empty_timeline_answers(timeline: Timeline) -> None:
    empty = Timeline.empty(TimelineSource.SIMULATED)
    assert (empty.num_spans, empty.ranks, empty.extent_ns) == (0, (), (0, 0))
    assert empty.select(ranks=[1], window_ns=(0, 5), kinds=[SpanKind.HOST]).num_spans == 0


def test_select_by_rank_keeps_its_spans_and_counters(timeline: Timeline) -> None:
    chosen = timeline.select(ranks=[0])
    assert names(chosen) == ["b", "a"]
    assert chosen.counters.column("value").to_pylist() == [1.0]


def test_select_by_kind(timeline: Timeline) -> None:
    assert names(timeline.select(kinds=[SpanKind.COMPUTE])) == ["a", "a"]


def test_select_by_window_keeps_what_touches_it(timeline: Timeline) -> None:
    assert names(timeline.select(window_ns=(15, 21))) == ["a", "a"]


def test_window_is_open_at_its_end_and_spans_at_theirs(timeline: Timeline) -> None:
    assert names(timeline.select(window_ns=(10, 20))) == ["a"]


def test_instant_lies_in_the_window_that_starts_at_it(timeline: Timeline) -> None:
    assert names(timeline.select(window_ns=(30, 31))) == ["c"]
    assert names(timeline.select(window_ns=(29, 30))) == []


def test_unknown_kind_is_refused_with_the_nearest(timeline: Timeline) -> None:
    with pytest.raises(InputError, match="did you mean communication"):
        timeline.select(kinds=["comunication"])


def test_unknown_column_is_refused_with_the_nearest(timeline: Timeline) -> None:
    with pytest.raises(InputError, match="did you mean start_ns"):
        timeline.column("start")


def test_string_column_is_not_read_as_numbers_nor_numbers_as_strings(timeline: Timeline) -> None:
    with pytest.raises(InputError, match=r"use strings\('name'\)"):
        timeline.column("name")
    with pytest.raises(InputError, match=r"use column\('rank'\)"):
        timeline.string_column("rank")


def test_by_rank_parts_keep_order_and_make_the_whole(timeline: Timeline) -> None:
    parts = list(timeline.split_by_rank())
    assert [names(part) for part in parts] == [["b", "a"], ["a", "c"], []]
    assert Timeline.concat(parts).num_spans == 4


def test_concat_fills_columns_that_only_some_have(timeline: Timeline) -> None:
    other = Timeline.from_columns(
        {"rank": 5, "start_ns": [1], "duration_ns": [1], "kind": "host", "name": "z", "layer": 3},
        source="measured",
        metadata={"run": "7", "host": "n1"},
    )
    both = Timeline.concat([timeline, other])
    assert both.column("layer").tolist() == [-1, -1, -1, -1, 3]
    assert both.column("bytes").tolist() == [-1, 64, -1, -1, -1]
    assert both.metadata == {"run": "7"}


def test_concat_refuses_simulated_with_measured(timeline: Timeline) -> None:
    with pytest.raises(InputError, match="cannot join measured and simulated"):
        Timeline.concat([timeline, Timeline.empty(TimelineSource.SIMULATED)])


def test_equal_whatever_the_encoding() -> None:
    def made(name: object) -> Timeline:
        columns = {"rank": 0, "start_ns": [0, 1], "duration_ns": 1, "kind": "host", "name": name}
        return Timeline.from_columns(columns, source="simulated")

    plain = made(["x", "y"])
    assert plain.equals(made(DictionaryColumn(np.array([1, 0]), ["y", "x"])))
    assert not plain.equals(made(["x", "x"]))
