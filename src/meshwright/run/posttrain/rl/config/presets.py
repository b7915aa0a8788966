"""Settings that were found to learn, for demonstrations and tests."""

from typing import Any

from meshwright.run.posttrain.rl.config.rl_config import (
    ObjectiveConfig,
    RLConfig,
    RLEvaluationConfig,
    WarmupConfig,
)
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig


def get_sorting_digits_preset(seed: int = 0, **given: Any) -> RLConfig:
    """Return a run that learns to sort four digits from rewards of 0 and 1, on one core.

    A short warm-up on right answers comes first: from random weights no answer is ever right, and
    groups of equal rewards teach nothing. `given` replaces fields.
    """
    chosen: dict[str, Any] = {
        "seed": seed,
        "steps": 140,
        "prompts_per_step": 64,
        "group_size": 8,
        "threads": 1,
        "warm_up": WarmupConfig(steps=30, answers=64, lr=1e-3),
        "objective": ObjectiveConfig(minibatches=4),
        "optimizer": OptimizerConfig(
            lr=4e-4, schedule="linear", warmup_steps=0, weight_decay=0.01, betas=(0.9, 0.999)
        ),
        "evaluate": RLEvaluationConfig(num_prompts=1000),
    }
    return RLConfig(**chosen | given)
