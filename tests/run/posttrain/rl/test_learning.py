"""The task of the guide is learned from its reward alone, and from no other."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")

from meshwright.run.posttrain.rl import RLConfig, get_sorting_digits_preset, run_rl
from meshwright.run.posttrain.rl.config.rl_config import (
    AdapterConfig,
    CriticConfig,
    ObjectiveConfig,
    RLEvaluationConfig,
    TaskConfig,
    WarmupConfig,
)
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sorting_digits_is_learned_from_rewards_of_0_and_1(seed: int) -> None:
    settings = get_sorting_digits_preset(seed)
    outcome = run_rl(settings)
    assert outcome.held_out_metrics[0]["eval_reward"] < 0.1
    assert outcome.held_out_metrics[settings.steps]["eval_reward"] > 0.9
    assert max(row["logprob_gap_max"] for row in outcome.step_metrics) <= 1e-5, (
        "engine against trainer"
    )


def test_sorting_digits_is_learned_with_a_critic() -> None:
    aim = ObjectiveConfig(adv_estimator="gae", minibatches=4)
    settings = get_sorting_digits_preset(0, objective=aim, critic=CriticConfig(lr=1e-3))
    outcome = run_rl(settings)
    assert outcome.held_out_metrics[0]["eval_reward"] < 0.1
    assert outcome.held_out_metrics[settings.steps]["eval_reward"] > 0.9


def adapted(seed: int, **given: Any) -> RLConfig:
    """Return a run on lists of eight digits: as warm as four, its words are told further apart.

    Adapters leave the head as it is.
    """
    chosen: dict[str, Any] = {
        "steps": 50,
        "task": TaskConfig(digits=8),
        "warm_up": WarmupConfig(steps=60, lr=4e-3),
        "adapter": AdapterConfig(rank=16),
        "optimizer": OptimizerConfig(
            lr=1e-3, schedule="linear", warmup_steps=0, weight_decay=0.0, betas=(0.9, 0.999)
        ),
        "evaluate": RLEvaluationConfig(num_prompts=300),
    }
    return get_sorting_digits_preset(seed, **chosen | given)


@pytest.mark.parametrize("seed", [0, 1])
def test_sorting_digits_is_learned_by_an_adapter(seed: int) -> None:
    outcome = run_rl(adapted(seed))
    before, after = (outcome.held_out_metrics[step]["eval_reward"] for step in (0, 50))
    assert before < 0.5
    assert after > 0.75
    # Rounding: the largest of tens of thousands of tokens lies about 1e-5, their mean at 5e-8.
    assert max(row["logprob_gap_max"] for row in outcome.step_metrics) <= 2e-5, (
        "engine against trainer"
    )
    assert max(row["logprob_gap_mean"] for row in outcome.step_metrics) <= 1e-6


def test_rewards_dealt_out_by_chance_teach_an_adapter_nothing() -> None:
    outcome = run_rl(adapted(0, shuffle_rewards=True))
    assert outcome.held_out_metrics[50]["eval_reward"] < outcome.held_out_metrics[0]["eval_reward"]


def test_rewards_dealt_out_by_chance_teach_nothing() -> None:
    settings = get_sorting_digits_preset(0, shuffle_rewards=True)
    outcome = run_rl(settings)
    assert outcome.held_out_metrics[settings.steps]["eval_reward"] < 0.1
