"""The scripts for a GPU work, with sizes that a processor does."""

import pytest

pytest.importorskip("torch", reason="trains a model")

from benchmarks import posttrain_async, posttrain_curve

pytestmark = pytest.mark.slow


def test_asynchrony_is_compared_by_whole_runs() -> None:
    found = list(posttrain_async.compare(tiny=True, steps=4, seeds=[0]))
    assert [each.get("max_staleness", 0) for each in found] == [0, 1, 2, 4]
    assert all(each["staleness_mean"] <= each.get("max_staleness", 0) for each in found)
    named = {str(each["name"]): each["value"] for each in posttrain_async.figures_of(found)}
    best = max(found[1:], key=lambda each: float(each["tokens_per_s"]))
    ratio = best["tokens_per_s"] / found[0]["tokens_per_s"]
    assert named["best asynchronous over synchronous"] == pytest.approx(ratio, rel=1e-3)


def test_a_curve_has_a_point_for_each_evaluation() -> None:
    found = posttrain_curve.curve(say=False, tiny=True, seed=0, steps=3)
    assert sorted(found["held_out"]) == [0, 1, 2, 3]
    assert len(found["rows"]) == 3
