"""A verifier that fails costs its own verdicts; one that always fails ends the run, by name."""

import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import TaskConfig, WarmupConfig
from meshwright.run.posttrain.rl.driver import RLStallError
from meshwright.run.posttrain.rl.generation.rollout_backend import VerifierFailureError
from meshwright.run.posttrain.rollout import Rollout
from meshwright.run.posttrain.rollout.generator import RolloutStream
from meshwright.run.posttrain.rollout.verifiers import VerifierLimits
from tests.run.posttrain.rl.small import EVALUATED, settings

QUICK = VerifierLimits(deadline_s=0.2)
HERE = "tests.run.posttrain.rl.environments:judged"


def task(verifier: str, bad: int, **job: str) -> TaskConfig:
    return TaskConfig(name=HERE, options={"verifier": verifier, "bad": bad, **job})


@pytest.mark.parametrize("placement", ["disaggregated", "async"])
def test_a_hung_verifier_is_named_and_ends_the_run(placement: str) -> None:
    said: list[str] = []
    given = settings(
        task=task("hangs", bad=1000),
        warm_up=WarmupConfig(),
        verifier=QUICK,
        max_pending_rewards=1,
        placement=placement,
    )
    late = r"judges:hangs gave no answer within its deadline of 0\.2 s; process \d+ was killed"
    with pytest.raises(VerifierFailureError, match=late):
        run_rl(given, say=said.append)
    assert sum("timeout" in line for line in said) == 2


def test_answers_that_nobody_judged_are_left_out() -> None:
    outcome = run_rl(
        settings(task=task("hangs", bad=1), warm_up=WarmupConfig(), verifier=QUICK, steps=1)
    )
    (row,) = outcome.step_metrics
    assert (row["unscored"], row["verifier_timeouts"], row["groups"]) == (4, 4, 3)
    assert any("4 × timeout" in line for line in outcome.notes)


def test_a_score_beyond_all_rewards_costs_its_own_answer() -> None:
    outcome = run_rl(settings(task=task("huge", bad=1), warm_up=WarmupConfig(), steps=2))
    assert [row["unscored"] for row in outcome.step_metrics] == [4, 0]
    assert any("its score is 1e+39" in line for line in outcome.notes)


def test_a_verifier_that_dies_is_replaced(tmp_path: Path) -> None:
    given = task("dies_once", bad=2, mark=str(tmp_path / "died"))
    limits = VerifierLimits(writable_paths=(str(tmp_path),))
    outcome = run_rl(settings(task=given, warm_up=WarmupConfig(), steps=2, verifier=limits))
    assert (tmp_path / "died").exists()
    assert any(note.startswith("verifiers are isolated by ") for note in outcome.notes)
    assert [row["unscored"] for row in outcome.step_metrics] == [0, 0]


@pytest.mark.filterwarnings("ignore:the engine's thread has not ended")
def test_a_run_in_which_nothing_happens_says_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: RolloutStream) -> list[Rollout]:
        time.sleep(0.6)
        return []

    monkeypatch.setattr(RolloutStream, "run_step", slow)
    with pytest.raises(
        RLStallError, match=r"0\.2 s; the trainer waits: groups, for groups 0, 1, 2, 3"
    ):
        run_rl(settings(placement="async", max_staleness=0, stall_timeout_s=0.2))


@pytest.mark.parametrize(("bad", "told"), [(1, ""), (16, "none of 16 held-out answers")])
def test_held_out_answers_that_nobody_judged_are_no_zeros(bad: int, told: str) -> None:
    said: list[str] = []
    given = settings(
        task=task("raises", bad=bad), warm_up=WarmupConfig(), evaluate=EVALUATED, steps=1
    )
    if told:
        with pytest.raises(InputError, match=told):
            run_rl(given, say=said.append)
    else:
        found = run_rl(given, say=said.append).held_out_metrics[0]["eval_reward"]
        # The good verifier gives 0, 2 or 4, and fifteen of the sixteen prompts are its own.
        assert found > 0
        assert found * 15 / 2 == pytest.approx(round(found * 15 / 2), abs=1e-9)
    assert sum("held out, " in line and "error" in line for line in said) >= bad


def test_a_verifier_that_fails_held_out_answers_ends_the_run() -> None:
    given = settings(
        task=task("raises", bad=1000),
        warm_up=WarmupConfig(),
        evaluate=EVALUATED,
        max_pending_rewards=2,
    )
    with pytest.raises(VerifierFailureError, match="3 verdicts of one step failed, 2 may"):
        run_rl(given)
