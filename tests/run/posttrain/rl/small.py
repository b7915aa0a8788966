"""A run of a few steps that takes a second."""

from typing import Any

from meshwright.run.posttrain.rl.config.rl_config import (
    ObjectiveConfig,
    RLConfig,
    RLEvaluationConfig,
    TaskConfig,
    TinyModelConfig,
    WarmupConfig,
)
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig

DIGITS = 3


def settings(**given: Any) -> RLConfig:
    chosen: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 4,
        "group_size": 4,
        "threads": 1,
        "task": TaskConfig(digits=DIGITS, reward="share"),
        "network": TinyModelConfig(layers=1, hidden=16, heads=2, ffn=32),
        "warm_up": WarmupConfig(steps=4, answers=16),
        "objective": ObjectiveConfig(minibatches=2),
        "optimizer": OptimizerConfig(lr=1e-2, schedule="linear", warmup_steps=0, weight_decay=0.0),
    }
    return RLConfig(**chosen | given)


EVALUATED = RLEvaluationConfig(num_prompts=16, transcripts=2)
