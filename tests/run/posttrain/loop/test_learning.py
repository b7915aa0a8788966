"""The task of the guide is learned from its reward alone, and from no other."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")

from meshwright.run.posttrain.loop import LoopSettings, run, sorting_digits
from meshwright.run.posttrain.loop.settings import (
    AdapterSettings,
    CriticSettings,
    EvaluateSettings,
    ObjectiveSettings,
    TaskSettings,
    WarmUpSettings,
)
from meshwright.run.train.optimizer.settings import OptimizerSettings

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


def adapted(seed: int, **given: Any) -> LoopSettings:
    """Return a run on lists of eight digits: as warm as four, its words are told further apart.

    Adapters leave the head as it is.
    """
    chosen: dict[str, Any] = {
        "steps": 50,
        "task": TaskSettings(digits=8),
        "warm_up": WarmUpSettings(steps=60, lr=4e-3),
        "adapter": AdapterSettings(rank=16),
        "optimizer": OptimizerSettings(
            lr=1e-3, schedule="linear", warmup_steps=0, decay=0.0, betas=(0.9, 0.999)
        ),
        "evaluate": EvaluateSettings(prompts=300),
    }
    return sorting_digits(seed, **chosen | given)


@pytest.mark.parametrize("seed", [0, 1])
def test_sorting_digits_is_learned_by_an_adapter(seed: int) -> None:
    outcome = run(adapted(seed))
    before, after = (outcome.held_out[step]["held_out_reward"] for step in (0, 50))
    assert before < 0.5
    assert after > 0.75
    # Rounding: the largest of tens of thousands of tokens lies about 1e-5, their mean at 5e-8.
    assert max(row["logp_gap_max"] for row in outcome.rows) <= 2e-5, "engine against trainer"
    assert max(row["logp_gap_mean"] for row in outcome.rows) <= 1e-6


def test_rewards_dealt_out_by_chance_teach_an_adapter_nothing() -> None:
    outcome = run(adapted(0, shuffle_rewards=True))
    assert outcome.held_out[50]["held_out_reward"] < outcome.held_out[0]["held_out_reward"]


def test_rewards_dealt_out_by_chance_teach_nothing() -> None:
    settings = sorting_digits(0, shuffle_rewards=True)
    outcome = run(settings)
    assert outcome.held_out[settings.steps]["held_out_reward"] < 0.1
