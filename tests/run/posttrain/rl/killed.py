"""A run that kills itself at a phase: `killed.py FOLDER KIND PHASE`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from meshwright.run.posttrain.rl import rl_run
from meshwright.run.posttrain.rl.config.rl_config import AdapterConfig, ObjectiveConfig, RLConfig
from meshwright.run.posttrain.rl.generation.held_out_evaluation import HeldOutEvaluation
from meshwright.run.posttrain.rl.generation.rollout_backend import RolloutBackend
from meshwright.run.posttrain.rl.timeline_recorder import RLTimelineRecorder
from meshwright.run.posttrain.rl.trainer import rl_trainer
from meshwright.run.posttrain.rl.trainer.policy_step import PolicyStep
from meshwright.run.posttrain.rollout.rollout import Rollout
from meshwright.run.posttrain.rollout.rollout_log import RolloutLog
from meshwright.run.train.checkpoint.async_save import AsyncSave
from meshwright.run.train.logging.jsonl import JsonlLogger
from tests.run.posttrain.rl.small import settings

STEPS = 4


KINDS: dict[str, dict[str, Any]] = {
    "disaggregated": {},
    "async": {"placement": "async"},
    "colocated": {"placement": "colocated"},
    "critic": {"objective": ObjectiveConfig(adv_estimator="gae", minibatches=2)},
    "adapter": {
        "adapter": AdapterConfig(rank=4),
        "objective": ObjectiveConfig(minibatches=2, kl_coef=0.04),
    },
    "adapter, asynchronous": {"adapter": AdapterConfig(dora=True), "placement": "async"},
    "spare": {"extra_prompts": 3},
    "asynchronous, spare": {"placement": "async", "extra_prompts": 3},
}


def settings_of(folder: str, kind: str) -> RLConfig:
    return settings(folder=folder, steps=STEPS, checkpoint_every_steps=2, **KINDS[kind])


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
    "warm-up": (rl_trainer, "run_warmup", die),
    "evaluation": (HeldOutEvaluation, "run_full", die),
    "draw": (RolloutLog, "add", half_a_line),
    "train": (PolicyStep, "_backward", after(5, PolicyStep._backward)),
    "sync": (RolloutBackend, "load_weights", after(3, RolloutBackend.load_weights)),
    "row": (JsonlLogger, "write", after(3, JsonlLogger.write)),
    "checkpoint": (AsyncSave, "finish", after(1, AsyncSave.finish)),
    "saved": (RLTimelineRecorder, "flush", after(1, RLTimelineRecorder.flush)),
}

if __name__ == "__main__":
    where, name, instead = PHASES[sys.argv[3]]
    setattr(where, name, instead)
    rl_run.run_rl(settings_of(sys.argv[1], sys.argv[2]))
