"""A run of a few steps that takes a second."""

from typing import Any

from meshwright.run.posttrain.loop.settings import (
    EvaluateSettings,
    LoopSettings,
    NetworkSettings,
    ObjectiveSettings,
    TaskSettings,
    WarmUpSettings,
)
from meshwright.run.train.optimizer.settings import OptimizerSettings

DIGITS = 3


def settings(**given: Any) -> LoopSettings:
    chosen: dict[str, Any] = {
        "steps": 3,
        "prompts": 4,
        "samples": 4,
        "threads": 1,
        "task": TaskSettings(digits=DIGITS, reward="share"),
        "network": NetworkSettings(layers=1, hidden=16, heads=2, ffn=32),
        "warm_up": WarmUpSettings(steps=4, answers=16),
        "objective": ObjectiveSettings(minibatches=2),
        "optimizer": OptimizerSettings(lr=1e-2, schedule="linear", warmup_steps=0, decay=0.0),
    }
    return LoopSettings(**chosen | given)


EVALUATED = EvaluateSettings(prompts=16, transcripts=2)
