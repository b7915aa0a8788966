"""Real traces that were labelled by hand: what is told is there, what is there is told."""

from pathlib import Path

import pytest

from meshwright.observe.findings import list_patterns
from validation.findings.scores import score
from validation.findings.trials import labelled_trials, labels

LEAST = 0.9


@pytest.mark.real
def test_labels_are_found(shared: Path) -> None:
    trials = [
        trial
        for which in ("seen", "blind")
        for trial in labelled_trials(shared / "traces", which)
    ]  # fmt: skip
    found = score(trials)
    assert (found.precision or 0.0) >= LEAST
    assert (found.recall or 0.0) >= LEAST


def test_labels_name_known_patterns_and_say_why() -> None:
    known = {pattern.name for pattern in list_patterns()}
    for trace in labels():
        assert set(trace["present"]) | set(trace.get("open", ())) <= known
        assert trace["reason"]
