"""Chosen steps as a timeline."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.run.train.loop import train
from meshwright.run.train.profile import ChosenSteps
from meshwright.timeline import read
from tests.run.train.tiny import tiny_job


@pytest.mark.parametrize(
    ("text", "steps"), [("10", (10, 10)), ("10-12", (10, 12)), (" 3-3 ", (3, 3))]
)
def test_steps_are_spelled_so(text: str, steps: tuple[int, int]) -> None:
    assert ChosenSteps.parse(text) == steps


@pytest.mark.parametrize(
    ("text", "fix"), [("ten", "like 10-12"), ("12-10", "use 10-12"), ("0", "1-1"), ("1-2-3", "")]
)
def test_other_spellings_are_refused(text: str, fix: str) -> None:
    with pytest.raises(InputError, match="--profile") as refused:
        ChosenSteps.parse(text)
    assert fix in refused.value.problems[0].fix


def test_the_chosen_steps_and_no_others_are_recorded(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path, until=5, profile=ChosenSteps(2, 3))
    timeline = read(tmp_path / "timeline")
    names = timeline.strings("name")
    found = {str(names.values[code]) for code in names.codes}
    assert {name for name in found if name.startswith("step ")} == {"step 2", "step 3"}
    assert {"forward", "backward", "optimizer", "aten::mm"} <= found
    first, last = timeline.extent_ns
    assert 0 < last - first < 60e9


def test_a_later_sitting_adds_its_steps(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path, until=2, profile=ChosenSteps(2, 2))
    before = read(tmp_path / "timeline").num_spans
    train(tiny_job(tokens), tmp_path, until=3, profile=ChosenSteps(3, 9))
    assert read(tmp_path / "timeline").num_spans > before
