"""Settings that were found to learn, for demonstrations and tests."""

from typing import Any

from meshwright.run.posttrain.loop.settings import (
    EvaluateSettings,
    LoopSettings,
    ObjectiveSettings,
    WarmUpSettings,
)
from meshwright.run.train.optimizer.settings import OptimizerSettings


def sorting_digits(seed: int = 0, **given: Any) -> LoopSettings:
    """Return a run that learns to sort four digits from rewards of 0 and 1, on one core.

    A short warm-up on right answers comes first: from random weights no answer is ever right, and
    groups of equal rewards teach nothing. `given` replaces fields.
    """
    chosen: dict[str, Any] = {
        "seed": seed,
        "steps": 140,
        "prompts": 64,
        "samples": 8,
        "threads": 1,
        "warm_up": WarmUpSettings(steps=30, answers=64, lr=1e-3),
        "objective": ObjectiveSettings(minibatches=4),
        "optimizer": OptimizerSettings(
            lr=4e-4, schedule="linear", warmup_steps=0, decay=0.01, betas=(0.9, 0.999)
        ),
        "evaluate": EvaluateSettings(prompts=1000),
    }
    return LoopSettings(**chosen | given)
