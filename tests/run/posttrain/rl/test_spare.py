"""Groups without a signal give way to further prompts, each of which is asked once."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import ObjectiveConfig, RLConfig
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rollout import read_rollouts
from tests.run.posttrain.rl.small import settings
from tests.run.posttrain.rl.test_run import Enough, figures, same


def sparse(**given: Any) -> RLConfig:
    """Answers are rarely right, so that groups now and then tell nothing."""
    return settings(extra_prompts=3, **given)


def test_a_step_is_filled_with_groups_that_tell_something(tmp_path: Path) -> None:
    outcome = run_rl(sparse(folder=str(tmp_path / "run")))
    for row in outcome.step_metrics:
        assert row["groups"] == 4
        assert 0 < row["replaced_groups"] <= 3
        assert not row["groups_without_signal"] or row["replaced_groups"] == 3
    assert (
        run_rl(settings(steps=1)).step_metrics[0]["groups_without_signal"]
        > outcome.step_metrics[0]["groups_without_signal"]
    )
    asked = 3 * 4 + int(sum(row["replaced_groups"] for row in outcome.step_metrics))
    drawn = read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts
    assert sorted({each.key.prompt for each in drawn}) == list(range(asked))
    assert len(drawn) == 4 * asked
    replayed = run_rl(sparse(replay=str(tmp_path / "run" / "rollouts.jsonl")))
    assert same(outcome.decoder, replayed.decoder)


def test_without_staleness_the_same_prompts_are_asked_bit_by_bit() -> None:
    plain = run_rl(sparse())
    driven = run_rl(sparse(placement="async", max_staleness=0))
    assert same(plain.decoder, driven.decoder)
    assert figures(plain.step_metrics) == figures(driven.step_metrics)


@pytest.mark.parametrize("placement", ["disaggregated", "async"])
def test_a_run_that_broke_off_asks_no_prompt_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    def row(self: RLRunState, step: int, found: Any) -> None:
        written(self, step, found)
        if step == 3:
            raise Enough

    written = RLRunState.write_metrics
    given = sparse(
        steps=4, folder=str(tmp_path / "run"), placement=placement, checkpoint_every_steps=2
    )
    monkeypatch.setattr(RLRunState, "write_metrics", row)
    with pytest.raises(Enough):
        run_rl(given)
    monkeypatch.undo()
    rest = run_rl(given)
    assert [row["step"] for row in rest.step_metrics] == [3, 4]
    drawn = [each.key for each in read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts]
    prompts = sorted({key.prompt for key in drawn})
    assert prompts == list(range(len(prompts)))
    assert len(drawn) == len(set(drawn)) == 4 * len(prompts)
    if placement == "disaggregated":
        assert same(rest.decoder, run_rl(sparse(steps=4)).decoder)


def test_rewards_fall_near_the_longest_answer() -> None:
    longest = run_rl(settings(steps=1))
    cut = run_rl(settings(steps=1, objective=ObjectiveConfig(minibatches=2, overlong_buffer=4)))
    (plain,), (row,) = longest.step_metrics, cut.step_metrics
    assert row["reward_mean"] == plain["reward_mean"], "that of the verifiers"
    assert -1 <= row["penalty_mean"] < 0
    assert "penalty_mean" not in plain
    assert not same(longest.decoder, cut.decoder)
    with pytest.raises(InputError, match="99 tokens are more than"):
        run_rl(settings(objective=ObjectiveConfig(overlong_buffer=99)))
