"""Predictions order layouts as measurements do, and say how sure they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.training_run.training_framework import MEGATRON
from meshwright.predict.validation.training import ScoredRun, score_order, summarize_scores
from meshwright.predict.validation.training.order_score import spearman
from meshwright.spec import Layout

pytestmark = pytest.mark.xdist_group("published")
NAMED = ("AWS EFA MoE A/B", "BLOOM chronicles", "Zero Bubble PP", "vTrain ground truth")


def one(predicted: float, measured: float, key: str = "a", tp: int | None = None) -> ScoredRun:
    return ScoredRun(
        id="x", source="s", gpu="g", grade="A", moe=False, predicted_step_s=predicted,
        measured_step_s=measured, error=predicted / measured - 1,
        setup=(Layout(tp=tp or round(predicted)), MEGATRON),
        layout_key=("s", "g", (key, "", "", "8", ""), (8, 64, 1, "bf16"), "None", "t"),
    )  # fmt: skip


def test_ranks_are_compared_not_seconds() -> None:
    assert spearman([1, 2, 3, 4], [10, 200, 300, 4000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [3, 2, 1]) == 0


@given(st.lists(st.floats(0.1, 1e6), min_size=3, max_size=20, unique=True))
def test_a_list_is_ranked_like_itself(values: list[float]) -> None:
    assert spearman(values, values) == pytest.approx(1)


def test_a_group_names_where_the_measured_best_stands() -> None:
    (group,) = score_order([one(1, 5), one(2, 3), one(3, 9), one(9, 99, "alone")])
    assert (group.layouts, group.measured_best_rank) == (3, 2)
    assert group.spearman == pytest.approx(0.5)


def test_rows_of_one_layout_are_one() -> None:
    assert score_order([one(1, 5), one(1, 7), one(2, 9)]) == []


def test_layouts_of_the_named_sources_are_ordered_well(results: list[ScoredRun]) -> None:
    groups = [group for group in score_order(results) if group.source in NAMED]
    assert len(groups) > 20
    good = sum(group.spearman >= 0.8 for group in groups)
    assert good >= 0.8 * len(groups)
    assert sum(group.measured_best_rank <= 2 for group in groups) >= 0.85 * len(groups)


def test_intervals_hold_for_nine_rows_in_ten(results: list[ScoredRun]) -> None:
    found = summarize_scores(results)
    assert found["overall"]["inside_interval"] >= 0.9
    for result in results:
        if result.low_s is not None and result.high_s is not None:
            assert result.low_s < (result.predicted_step_s or 0) < result.high_s


def test_step_times_meet_what_was_measured(results: list[ScoredRun]) -> None:
    found = summarize_scores(results)
    assert found["by_grade"]["A"]["median_abs"] <= 0.05
    assert found["overall"]["median_abs"] <= 0.07
    assert found["by_kind"]["dense"]["median_abs"] <= 0.06


def test_the_worst_rows_have_a_reason(results: list[ScoredRun]) -> None:
    worst = summarize_scores(results)["worst"]
    assert len(worst) == 10
    assert sum(row["reason"] != "unexplained" for row in worst) >= 8
