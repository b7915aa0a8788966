"""Answers about a timeline are worked out once, shared, and forgotten with it."""

import gc
import weakref

import numpy as np
import pytest

from meshwright.timeline.memo import memoize
from meshwright.timeline.timeline import Timeline

COLUMNS = {"rank": [0, 0, 1], "start_ns": [1, 2, 3], "duration_ns": 1, "kind": "host", "name": "a"}


def some() -> Timeline:
    return Timeline.from_columns(COLUMNS, source="measured")


def test_an_answer_is_worked_out_once_for_each_question() -> None:
    asked = []

    @memoize
    def ends(timeline: Timeline, more: int = 0) -> int:
        asked.append(more)
        return timeline.num_spans + more

    first, second = some(), some()
    assert [ends(first), ends(first), ends(first, 2), ends(first, more=2), ends(second)] == [
        3, 3, 5, 5, 3,
    ]  # fmt: skip
    assert asked == [0, 2, 2, 0]


def test_shared_arrays_cannot_be_written_to() -> None:
    timeline = some()
    assert timeline.column("start_ns") is timeline.column("start_ns")
    with pytest.raises(ValueError, match="read-only"):
        timeline.column("start_ns")[0] = 7


def test_tuples_of_arrays_count_as_themselves() -> None:
    @memoize
    def total(timeline: Timeline, values: tuple[np.ndarray, ...]) -> int:
        return int(sum(value.sum() for value in values)) + timeline.num_spans

    timeline = some()
    assert [total(timeline, (np.arange(n),)) for n in (2, 3, 4)] == [4, 6, 9]


def test_answers_go_with_their_timeline() -> None:
    timeline = some()
    part = weakref.ref(next(timeline.split_by_rank()))
    assert part() is not None
    del timeline
    gc.collect()
    assert part() is None


def test_one_rank_alone_is_its_own_part() -> None:
    alone = some().select(ranks=[1])
    assert list(alone.split_by_rank()) == [alone]
