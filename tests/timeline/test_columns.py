"""What may enter a timeline, and how each mistake is named."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError, Problem
from meshwright.timeline import DictionaryColumn, SpanKind, Timeline


def spans(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "rank": [0, 0, 1],
        "start_ns": [0, 5, 9],
        "duration_ns": [4, 4, 0],
        "kind": "compute",
        "name": ["a", "b", "a"],
    }
    return {key: value for key, value in (good | changes).items() if value is not ...}


def made(**changes: Any) -> Timeline:
    return Timeline.from_columns(spans(**changes), source="simulated")


def fault(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        made(**changes)
    assert all(problem.fix for problem in caught.value.problems)
    return str(caught.value)


def test_lists_make_a_timeline() -> None:
    assert made().column("start_ns").tolist() == [0, 5, 9]


def test_numpy_arrays_of_any_integer_type_are_taken() -> None:
    timeline = made(rank=np.array([0, 0, 1], np.uint8), start_ns=np.array([0, 5, 9], np.int16))
    assert timeline.column("start_ns").dtype == np.int64


def test_arrow_arrays_are_taken() -> None:
    chunked = pa.chunked_array([["a"], ["b", "a"]])
    assert made(name=chunked).string_column("name").values == ("a", "b")


def test_one_value_stands_for_all_rows() -> None:
    timeline = made(rank=3, lane="stream 7")
    assert timeline.ranks == (3,)
    assert timeline.string_column("lane").values == ("stream 7",)


def test_coded_strings_are_taken_as_they_are() -> None:
    name = DictionaryColumn(np.array([1, 0, 1]), ["x", "y"])
    assert made(name=name).spans.column("name").to_pylist() == ["y", "x", "y"]


def test_minus_one_is_no_value_in_optional_columns() -> None:
    timeline = made(bytes=[5, -1, 7])
    assert timeline.spans.column("bytes").to_pylist() == [5, None, 7]
    assert timeline.column("bytes").tolist() == [5, -1, 7]


def test_none_is_no_value_in_optional_columns() -> None:
    timeline = made(layer=[None, 2, None], group=["tp", None, None])
    assert timeline.column("layer").tolist() == [-1, 2, -1]
    assert timeline.string_column("group").codes.tolist() == [0, -1, -1]


def test_whole_floats_are_taken_exactly() -> None:
    assert made(start_ns=np.array([0.0, 5.0, 2.0**52])).column("start_ns")[2] == 2**52


def test_optional_columns_that_were_not_given_read_as_no_value() -> None:
    assert made().column("bytes").tolist() == [-1, -1, -1]
    assert made().string_column("dtype").codes.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"duration_ns": [4, -4, 0]}, "1 rows are below 0, first -4 at row 1"),
        ({"rank": [0, -1, 1]}, "spans.rank: 1 rows are below 0"),
        ({"bytes": [1, -2, 3]}, "spans.bytes: 1 rows are below 0, first -2"),
        ({"start_ns": [0.0, float("nan"), 1.0]}, "NaN or infinite, first at row 1"),
        ({"start_ns": [0.5, 1.0, 2.0]}, "does not fit int64"),
        ({"rank": [0, 2**31, 1]}, "spans.rank: does not fit int32"),
        ({"start_ns": ["a", "b", "c"]}, "not numbers"),
        ({"start_ns": [0, "b", 1]}, "not a number"),
        ({"start_ns": "123"}, "is the text '123'"),
        ({"start_ns": [0, None, 1]}, "1 rows have no value, first at row 1"),
        ({"start_ns": [2**63 - 1, 0, 0]}, "exceeds int64 ns"),
        ({"start_ns": [2**63, 0, 0]}, "spans.start_ns"),
        ({"name": ["a", None, "b"]}, "spans.name: 1 rows have no value"),
        ({"name": ["a", 5, "b"]}, "not text"),
        ({"name": ["a", "\ud800", "b"]}, "not text"),
        (
            {"name": DictionaryColumn(np.array([0, 2, 0]), ["x"])},
            "code 2 at row 1 is outside the 1 values",
        ),
        ({"name": DictionaryColumn(np.array([0.0, 0.0, 0.0]), ["x"])}, "give integer codes"),
        ({"kind": "computing"}, "did you mean compute"),
        ({"extra": ["{}", "[1]", None]}, "is not a JSON object"),
        ({"name": ["a", "b"]}, "unequal lengths: rank 3, start_ns 3, duration_ns 3, name 2"),
        ({"name": ...}, "spans.name: is missing"),
        ({"lanes": "x"}, "did you mean lane"),
        ({"name": object()}, "is a object"),
    ],
)
def test_mistake_is_named(changes: dict[str, Any], said: str) -> None:
    assert said in fault(**changes)


def test_all_mistakes_are_listed_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Timeline.from_columns(
            spans(duration_ns=[-1, 0, 0], kind="nap", extra="no"),
            {"rank": 0, "name": "memory", "time_ns": [1], "value": [float("inf")]},
            source="guessed",
        )
    where = [problem.where for problem in caught.value.problems]
    assert where == [
        "spans.duration_ns",
        "spans.kind",
        "spans.extra",
        "counters.value",
        "source",
    ]


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary()
)
anything = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(), scalars, max_size=2)


@given(
    st.dictionaries(
        st.sampled_from(["rank", "start_ns", "duration_ns", "kind", "name", "bytes", "extra"]),
        anything,
    )
)
def test_any_input_makes_a_timeline_or_is_refused(columns: dict[str, Any]) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        timeline = Timeline.from_columns({**spans(), **columns}, source="measured")
    except InputError as error:
        problems = error.problems
    assert all(problem.fix for problem in problems)
    if problems:
        return
    assert set(timeline.string_column("kind").values) <= set(SpanKind)
    assert (timeline.column("duration_ns") >= 0).all()
