"""Chosen steps as a timeline."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.run.train.loop import train
from meshwright.run.train.profiling.step_profiler import ProfiledSteps
from meshwright.timeline import read_timeline
from tests.run.train.tiny import tiny_job


@pytest.mark.parametrize(
    ("text", "steps"), [("10", (10, 10)), ("10-12", (10, 12)), (" 3-3 ", (3, 3))]
)
def test_steps_are_spelled_so(text: str, steps: tuple[int, int]) -> None:
    assert ProfiledSteps.parse(text) == steps


@pytest.mark.parametrize(
    ("text", "fix"), [("ten", "like 10-12"), ("12-10", "use 10-12"), ("0", "1-1"), ("1-2-3", "")]
)
def test_other_spellings_are_refused(text: str, fix: str) -> None:
    with pytest.raises(InputError, match="--profile-steps") as refused:
        ProfiledSteps.parse(text)
    assert fix in refused.value.problems[0].fix


def test_the_chosen_steps_and_no_others_are_recorded(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=5, profile_steps=ProfiledSteps(2, 3))
    timeline = read_timeline(tmp_path / "timeline")
    names = timeline.string_column("name")
    found = {str(names.values[code]) for code in names.codes}
    assert {name for name in found if name.startswith("step ")} == {"step 2", "step 3"}
    assert {"forward", "backward", "optimizer", "aten::mm"} <= found
    first, last = timeline.extent_ns
    assert 0 < last - first < 60e9


def test_a_later_session_adds_its_steps(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path, stop_at_step=2, profile_steps=ProfiledSteps(2, 2))
    before = read_timeline(tmp_path / "timeline").num_spans
    train(tiny_job(tokens), tmp_path, stop_at_step=3, profile_steps=ProfiledSteps(3, 9))
    assert read_timeline(tmp_path / "timeline").num_spans > before
