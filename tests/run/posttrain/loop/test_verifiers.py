"""A verifier that fails costs its own verdicts; one that always fails ends the run, by name."""

import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.driving import Stalled
from meshwright.run.posttrain.loop.sampling import VerifierFailing
from meshwright.run.posttrain.loop.settings import TaskSettings, WarmUpSettings
from meshwright.run.posttrain.rollouts import Rollout
from meshwright.run.posttrain.rollouts.generate import Stream
from meshwright.run.posttrain.rollouts.verifiers import VerifierLimits
from tests.run.posttrain.loop.small import EVALUATED, settings

QUICK = VerifierLimits(deadline_s=0.2)
HERE = "tests.run.posttrain.loop.environments:judged"


def task(verifier: str, bad: int, **job: str) -> TaskSettings:
    return TaskSettings(name=HERE, options={"verifier": verifier, "bad": bad, **job})


@pytest.mark.parametrize("placement", ["disaggregated", "asynchronous"])
def test_a_hung_verifier_is_named_and_ends_the_run(placement: str) -> None:
    said: list[str] = []
    given = settings(
        task=task("hangs", bad=1000),
        warm_up=WarmUpSettings(),
        verifier=QUICK,
        most_unjudged=1,
        placement=placement,
    )
    late = r"judges:hangs gave no answer within its deadline of 0\.2 s; process \d+ was killed"
    with pytest.raises(VerifierFailing, match=late):
        run(given, say=said.append)
    assert sum("time-out" in line for line in said) == 2


def test_answers_that_nobody_judged_are_left_out() -> None:
    outcome = run(
        settings(task=task("hangs", bad=1), warm_up=WarmUpSettings(), verifier=QUICK, steps=1)
    )
    (row,) = outcome.rows
    assert (row["unjudged"], row["verifier_timeouts"], row["groups"]) == (4, 4, 3)
    assert any("4 × time-out" in line for line in outcome.notes)


def test_a_score_beyond_all_rewards_costs_its_own_answer() -> None:
    outcome = run(settings(task=task("huge", bad=1), warm_up=WarmUpSettings(), steps=2))
    assert [row["unjudged"] for row in outcome.rows] == [4, 0]
    assert any("its score is 1e+39" in line for line in outcome.notes)


def test_a_verifier_that_dies_is_replaced(tmp_path: Path) -> None:
    given = task("dies_once", bad=2, mark=str(tmp_path / "died"))
    outcome = run(settings(task=given, warm_up=WarmUpSettings(), steps=2))
    assert (tmp_path / "died").exists()
    assert [row["unjudged"] for row in outcome.rows] == [0, 0]


@pytest.mark.filterwarnings("ignore:the engine's thread has not ended")
def test_a_run_in_which_nothing_happens_says_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: Stream) -> list[Rollout]:
        time.sleep(0.6)
        return []

    monkeypatch.setattr(Stream, "turn", slow)
    with pytest.raises(Stalled, match=r"0\.2 s; the trainer waits: groups, for groups 0, 1, 2, 3"):
        run(settings(placement="asynchronous", max_staleness=0, stall_s=0.2))


@pytest.mark.parametrize(("bad", "told"), [(1, ""), (16, "none of 16 held-out answers")])
def test_held_out_answers_that_nobody_judged_are_no_zeros(bad: int, told: str) -> None:
    said: list[str] = []
    given = settings(
        task=task("raises", bad=bad), warm_up=WarmUpSettings(), evaluate=EVALUATED, steps=1
    )
    if told:
        with pytest.raises(InputError, match=told):
            run(given, say=said.append)
    else:
        found = run(given, say=said.append).held_out[0]["held_out_reward"]
        # The good verifier gives 0, 2 or 4, and fifteen of the sixteen prompts are its own.
        assert found > 0
        assert found * 15 / 2 == pytest.approx(round(found * 15 / 2), abs=1e-9)
    assert sum("held out, " in line and "error" in line for line in said) >= bad


def test_a_verifier_that_fails_held_out_answers_ends_the_run() -> None:
    given = settings(
        task=task("raises", bad=1000),
        warm_up=WarmUpSettings(),
        evaluate=EVALUATED,
        most_unjudged=2,
    )
    with pytest.raises(VerifierFailing, match="3 verdicts of one step failed, 2 may"):
        run(given)
