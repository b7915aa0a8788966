"""The task of the guide is learned from its reward alone, and from no other."""

import pytest

pytest.importorskip("torch", reason="trains a model")

from meshwright.run.posttrain.loop import run, sorting_digits
from meshwright.run.posttrain.loop.settings import CriticSettings, ObjectiveSettings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sorting_digits_is_learned_from_rewards_of_0_and_1(seed: int) -> None:
    settings = sorting_digits(seed)
    outcome = run(settings)
    assert outcome.held_out[0]["held_out_reward"] < 0.1
    assert outcome.held_out[settings.steps]["held_out_reward"] > 0.9
    assert max(row["logp_gap_max"] for row in outcome.rows) <= 1e-5, "engine against trainer"


def test_sorting_digits_is_learned_with_a_critic() -> None:
    aim = ObjectiveSettings(advantage="gae", minibatches=4)
    settings = sorting_digits(0, objective=aim, critic=CriticSettings(lr=1e-3))
    outcome = run(settings)
    assert outcome.held_out[0]["held_out_reward"] < 0.1
    assert outcome.held_out[settings.steps]["held_out_reward"] > 0.9


def test_rewards_dealt_out_by_chance_teach_nothing() -> None:
    settings = sorting_digits(0, shuffle_rewards=True)
    outcome = run(settings)
    assert outcome.held_out[settings.steps]["held_out_reward"] < 0.1
