"""Groups without a signal give way to further prompts, each of which is asked once."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.settings import LoopSettings, ObjectiveSettings
from meshwright.run.posttrain.rollouts import read_rollouts
from tests.run.posttrain.loop.small import settings
from tests.run.posttrain.loop.test_run import Enough, figures, same


def sparse(**given: Any) -> LoopSettings:
    """Answers are rarely right, so that groups now and then tell nothing."""
    return settings(spare_prompts=3, **given)


def test_a_step_is_filled_with_groups_that_tell_something(tmp_path: Path) -> None:
    outcome = run(sparse(folder=str(tmp_path / "run")))
    for row in outcome.rows:
        assert row["groups"] == 4
        assert 0 < row["replaced_groups"] <= 3
        assert not row["silent_groups"] or row["replaced_groups"] == 3
    assert run(settings(steps=1)).rows[0]["silent_groups"] > outcome.rows[0]["silent_groups"]
    asked = 3 * 4 + int(sum(row["replaced_groups"] for row in outcome.rows))
    drawn = read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts
    assert sorted({each.key.prompt for each in drawn}) == list(range(asked))
    assert len(drawn) == 4 * asked
    replayed = run(sparse(replay=str(tmp_path / "run" / "rollouts.jsonl")))
    assert same(outcome.decoder, replayed.decoder)


def test_without_staleness_the_same_prompts_are_asked_bit_by_bit() -> None:
    plain = run(sparse())
    driven = run(sparse(placement="asynchronous", max_staleness=0))
    assert same(plain.decoder, driven.decoder)
    assert figures(plain.rows) == figures(driven.rows)


@pytest.mark.parametrize("placement", ["disaggregated", "asynchronous"])
def test_a_run_that_broke_off_asks_no_prompt_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    def row(self: Keeping, step: int, found: Any) -> None:
        written(self, step, found)
        if step == 3:
            raise Enough

    written = Keeping.row
    given = sparse(steps=4, folder=str(tmp_path / "run"), placement=placement, checkpoint_steps=2)
    monkeypatch.setattr(Keeping, "row", row)
    with pytest.raises(Enough):
        run(given)
    monkeypatch.undo()
    rest = run(given)
    assert [row["step"] for row in rest.rows] == [3, 4]
    drawn = [each.key for each in read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts]
    prompts = sorted({key.prompt for key in drawn})
    assert prompts == list(range(len(prompts)))
    assert len(drawn) == len(set(drawn)) == 4 * len(prompts)
    if placement == "disaggregated":
        assert same(rest.decoder, run(sparse(steps=4)).decoder)


def test_rewards_fall_near_the_longest_answer() -> None:
    longest = run(settings(steps=1))
    cut = run(settings(steps=1, objective=ObjectiveSettings(minibatches=2, overlong_margin=4)))
    (plain,), (row,) = longest.rows, cut.rows
    assert row["reward_mean"] == plain["reward_mean"], "that of the verifiers"
    assert -1 <= row["penalty_mean"] < 0
    assert "penalty_mean" not in plain
    assert not same(longest.decoder, cut.decoder)
    with pytest.raises(InputError, match="99 tokens are more than"):
        run(settings(objective=ObjectiveSettings(overlong_margin=99)))
