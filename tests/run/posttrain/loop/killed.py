"""A run that kills itself at a phase: `killed.py FOLDER KIND PHASE`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from meshwright.run.posttrain.loop import running, trainer
from meshwright.run.posttrain.loop.evaluation import Evaluation
from meshwright.run.posttrain.loop.policy_step import PolicyStep
from meshwright.run.posttrain.loop.sampling import Sampling
from meshwright.run.posttrain.loop.settings import (
    AdapterSettings,
    LoopSettings,
    ObjectiveSettings,
)
from meshwright.run.posttrain.loop.spans import Spans
from meshwright.run.posttrain.rollouts.log import RolloutLog
from meshwright.run.posttrain.rollouts.record import Rollout
from meshwright.run.train.checkpoint.writing import Writing
from meshwright.run.train.outputs.jsonl import JsonLines
from tests.run.posttrain.loop.small import settings

STEPS = 4


KINDS: dict[str, dict[str, Any]] = {
    "disaggregated": {},
    "asynchronous": {"placement": "asynchronous"},
    "colocated": {"placement": "colocated"},
    "critic": {"objective": ObjectiveSettings(advantage="gae", minibatches=2)},
    "adapter": {
        "adapter": AdapterSettings(rank=4),
        "objective": ObjectiveSettings(minibatches=2, kl=0.04),
    },
    "adapter, asynchronous": {"adapter": AdapterSettings(dora=True), "placement": "asynchronous"},
    "spare": {"spare_prompts": 3},
    "asynchronous, spare": {"placement": "asynchronous", "spare_prompts": 3},
}


def settings_of(folder: str, kind: str) -> LoopSettings:
    return settings(folder=folder, steps=STEPS, checkpoint_steps=2, **KINDS[kind])


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, what: Callable[..., Any]) -> Callable[..., Any]:
    """Do a thing so many times, and die when it is called once more."""
    left = count

    def called(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            die()
        return what(*given, **named)

    return called


def half_a_line(log: RolloutLog, rollout: Rollout) -> None:
    """Write half of what was to be written, and die."""
    if len(log.keys) == 27:
        log._file.write(b'{"key":{"step":1,"pro')
        die()
    written(log, rollout)


written = RolloutLog.add
PHASES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "warm-up": (trainer, "warm_up", die),
    "evaluation": (Evaluation, "whole", die),
    "draw": (RolloutLog, "add", half_a_line),
    "train": (PolicyStep, "_backward", after(5, PolicyStep._backward)),
    "sync": (Sampling, "take", after(3, Sampling.take)),
    "row": (JsonLines, "write", after(3, JsonLines.write)),
    "checkpoint": (Writing, "end", after(1, Writing.end)),
    "saved": (Spans, "flush", after(1, Spans.flush)),
}

if __name__ == "__main__":
    where, name, instead = PHASES[sys.argv[3]]
    setattr(where, name, instead)
    running.run(settings_of(sys.argv[1], sys.argv[2]))
