"""A tiny chat model with prompts in files, a reward model beside it, and runs of a second."""

import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from meshwright.run.posttrain.prompt_task.reward_config import ModelReward
from meshwright.run.posttrain.rl.config.rl_config import RLConfig, TaskConfig
from meshwright.run.posttrain.supervised.reward_model import save_reward_head
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from tests.run.posttrain.supervised.tiny import asked, letter_of, model_folder, write

MOST = 6
"""Tokens of an answer."""


def questions(count: int = 40) -> list[dict[str, Any]]:
    """Return chats with a number for an answer."""
    return [{"prompt": asked(letter_of(n), n), "answer": n % 10} for n in range(count)]


def prompts_in(folder: Path, count: int = 40) -> str:
    return str(write(folder / "train.jsonl", questions(count)))


@cache
def reward_folder(seed: int = 0) -> Path:
    """Return a folder as `mw convert` writes it of a reward model, with a head of drawn weights."""
    folder = Path(mkdtemp(prefix="mw-reward-")) / "model"
    shutil.copytree(model_folder(), folder)
    save_reward_head(torch.randn(1, 32, generator=torch.Generator().manual_seed(seed)), folder)
    return folder


def liked(**given: Any) -> ModelReward:
    return ModelReward(**{"model": str(reward_folder()), "name": "liked", **given})


def task(train: str, **given: Any) -> TaskConfig:
    chosen: dict[str, Any] = {"validation": 0.1, "reward": "exact"}
    return TaskConfig(name="questions", train=train, **chosen | given)


def settings(asked_for: TaskConfig, **given: Any) -> RLConfig:
    chosen: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_tokens": MOST,
        "threads": 1,
        "model": str(model_folder()),
        "task": asked_for,
        "optimizer": OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=0, weight_decay=0.0),
    }
    return RLConfig(**chosen | given)
