"""The scripts for a GPU work, with sizes that a processor does."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains a model")

from benchmarks import posttrain_async, posttrain_curve

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
KEPT = ("posttrain-curve.json", "posttrain-curve-placebo.json")


@pytest.mark.slow
def test_asynchrony_is_compared_by_whole_runs() -> None:
    found = list(posttrain_async.compare(tiny=True, steps=4, seeds=[0]))
    assert tuple(each["way"] for each in found) == posttrain_async.WAYS
    stale = [each["staleness_mean"] for each in found]
    assert stale[0] == 0
    assert all(0 < each <= posttrain_async.STALENESS for each in stale[1:])
    named = {str(each["name"]): each["value"] for each in posttrain_async.figures_of(found)}
    ratio = found[1]["tokens_per_s"] / found[0]["tokens_per_s"]
    assert named["asynchronous, pace over synchronous"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.slow
def test_a_curve_has_a_point_for_each_evaluation() -> None:
    found = posttrain_curve.curve(say=False, tiny=True, seed=0, steps=3)
    assert sorted(found["held_out"]) == [0, 1, 2, 3]
    assert len(found["rows"]) == 3


def test_the_picture_of_the_guide_is_that_of_the_kept_runs() -> None:
    runs = [json.loads((FIGURES / name).read_text()) for name in KEPT]
    assert posttrain_curve.drawn(*runs) == (FIGURES / "posttrain-curve.svg").read_text()
    assert [run["placebo"] for run in runs] == [False, True]
