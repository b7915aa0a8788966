"""Workloads of the engine and its simulator: which judge, and how they are compared."""

import json
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.serve_twin import (
    KNOWN,
    QUICK,
    SEEN,
    UNSEEN,
    WORKS,
    figures_of,
    measured_in,
    simulated,
)
from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT
from meshwright.spec import catalog


def test_workloads_that_judge_are_none_of_those_seen() -> None:
    others = [work for work in KNOWN if work not in UNSEEN]
    assert not {work.model for work in others} & {work.model for work in UNSEEN}
    assert len({str(work) for work in KNOWN}) == len(KNOWN)
    assert all(catalog.get_model(work.model) for work in KNOWN)
    assert set(QUICK) < set(WORKS)


def test_engines_of_one_kind_are_started_once() -> None:
    kinds = [kind for kind, _ in groupby(work.kind for work in WORKS)]
    assert len(kinds) == len(set(kinds))


def test_errors_are_told_for_all_and_for_those_not_seen(tmp_path: Path) -> None:
    seen, unseen = SEEN[-1], UNSEEN[-1]
    measured = {
        str(work): {"tokens_per_s": simulated(work)["tokens_per_s"] / (1 + off)}
        for work, off in ((seen, 0.02), (unseen, -0.1))
    }
    path = tmp_path / "kept.json"
    notes = f"nothing failed. measured: {json.dumps(measured)}"
    path.write_text(json.dumps({"measured": {"notes": notes}}), encoding="utf-8")
    found = {str(row["name"]): row["value"] for row in figures_of(measured_in(path))}
    assert found["throughput, median error"] == pytest.approx(6.0)
    assert found["throughput, largest error"] == pytest.approx(10.0)
    assert found["not seen before, median error"] == pytest.approx(10.0)
    assert found[f"{seen}: off"] == pytest.approx(2.0)


def test_another_profile_predicts_otherwise() -> None:
    slow = MESHWRIGHT.__class__(name="slow", step_s=0.1)
    assert simulated(SEEN[-1], slow)["tokens_per_s"] < simulated(SEEN[-1])["tokens_per_s"] / 5
