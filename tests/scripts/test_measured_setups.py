"""What is kept of published runs follows from them."""

from typing import Any

import pytest

from meshwright.predict.plan.answer.measured_setups import MeasuredSetups, load_measured_setups
from meshwright.predict.training_run.training_framework import MEGATRON
from meshwright.predict.validation.training import ScoredRun, read_runs, score_runs
from meshwright.spec import Layout
from scripts.measured_setups import EDGES, RUNS, TABLE, orders, setups, text


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return read_runs(RUNS)


def one(
    predicted: float, measured_s: float, tp: int, key: str = "a", source: str = "s"
) -> ScoredRun:
    return ScoredRun(
        id="x", source=source, gpu="g", grade="A", moe=False, predicted_step_s=predicted,
        measured_step_s=measured_s, setup=(Layout(tp=tp), MEGATRON), layout_key=(key,),
    )  # fmt: skip


def test_the_shipped_setups_are_those_of_the_rows(rows: list[Any]) -> None:
    assert load_measured_setups().setups == setups(rows), "run python -m scripts.measured_setups"


@pytest.mark.slow
def test_the_shipped_file_is_current(rows: list[Any]) -> None:
    wanted = text(MeasuredSetups(order=orders(score_runs(rows)), setups=setups(rows)))
    assert TABLE.read_text() == wanted, "run python -m scripts.measured_setups"


def test_rows_that_were_not_timed_measure_nothing(rows: list[Any]) -> None:
    row = {**rows[0], "derived": {}, "measured": {"mfu": 0.4}}
    assert len(setups([rows[0], rows[0]])) == 1
    assert setups([row]) == ()


def test_a_pair_counts_where_its_predicted_difference_lies() -> None:
    found = orders([one(1.0, 5.0, 1), one(1.03, 6.0, 2), one(1.3, 4.0, 4)])
    assert [(o.pairs, o.right) for o in found] == [(0, 0), (1, 1), (0, 0), (0, 0), (2, 0), (0, 0)]
    assert [o.up_to for o in found] == list(EDGES)


def test_rows_of_other_groups_and_equal_predictions_make_no_pairs() -> None:
    assert sum(o.pairs for o in orders([one(1, 5, 1), one(2, 6, 2, key="b")])) == 0
    assert sum(o.pairs for o in orders([one(1, 5, 1), one(1, 6, 2)])) == 0


def test_rows_of_one_layout_are_one() -> None:
    found = orders([one(1, 5, 1), one(1, 9, 1), one(1.01, 8, 2)])
    assert (found[0].pairs, found[0].right) == (1, 1)
