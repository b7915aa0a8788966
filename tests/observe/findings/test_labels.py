"""Real traces that were labelled by hand: what is told is there, what is there is told."""

import tomllib
from pathlib import Path

import pytest

from meshwright.observe.findings import patterns
from tests.observe.findings.measuring import LABELS, labelled_trials, score

pytestmark = pytest.mark.real


def test_labels_are_found(shared: Path) -> None:
    trials = [trial for _, trial in labelled_trials(shared / "traces")]
    every = [score(pattern.name, trials) for pattern in patterns()]
    true, false, missed = (sum(column) for column in zip(*every, strict=True))
    assert true / (true + false) >= 0.9
    assert true / (true + missed) >= 0.9


def test_labels_name_known_patterns() -> None:
    known = {pattern.name for pattern in patterns()}
    for trace in tomllib.loads(LABELS.read_text())["trace"]:
        assert set(trace["present"]) | set(trace.get("open", ())) <= known
        assert trace["reason"]
