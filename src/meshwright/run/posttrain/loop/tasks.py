"""The environments that settings name, for training and held out."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.loop.settings import DIGITS, LoopSettings
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.posttrain.rollouts.generate import Drawing
from meshwright.run.posttrain.rollouts.tasks.sorting import SortingDigits

_LONGEST = 256
"""Tokens of a turn, where neither the settings nor the task say so."""


class Tasks(NamedTuple):
    """What is trained on, and what is kept from training."""

    train: Environment
    held_out: Environment
    max_tokens: int
    stop_tokens: tuple[int, ...]
    vocab: int | None
    """Words of the task; None where the model brings its own."""

    def drawing(self, settings: LoopSettings) -> Drawing:
        """Return how rollouts are drawn in training."""
        return Drawing(
            seed=settings.seed,
            samples=settings.samples,
            max_tokens=self.max_tokens,
            max_turns=settings.max_turns,
            stop_tokens=self.stop_tokens,
        )


def tasks_of(settings: LoopSettings) -> Tasks:
    """Return the task that settings name."""
    task = settings.task
    if task.name == DIGITS:
        # Each run has training prompts of its own; all are judged by the same held-out ones.
        asked: dict[str, Any] = {
            "digits": task.digits, "longest": task.longest, "reward": task.reward
        }  # fmt: skip
        train = SortingDigits(**asked, seed=settings.seed)
        held_out = SortingDigits(**asked, part="held-out")
        words = train.words
        longest = settings.max_tokens or train.max_tokens
        room = settings.network.max_positions
        needed = len(train.prompt_of((0,) * train.longest)) + longest
        if not settings.model and needed > room:
            what = f"{room}, but the longest list with its answer has {needed} tokens"
            raise InputError([Problem("network.max_positions", what, f"use {needed} or more")])
        return Tasks(train, held_out, longest, (words.end,), words.vocab)
    make = _function(task.name)
    parts: tuple[Literal["train", "held-out"], ...] = ("train", "held-out")
    own = [make(part=part, **task.options) for part in parts]
    return Tasks(
        own[0],
        own[1],
        settings.max_tokens or int(getattr(own[0], "max_tokens", _LONGEST)),
        tuple(getattr(own[0], "stop_tokens", ())),
        getattr(own[0], "vocab", None),
    )


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        fix = "name it as module:function, at the top level of a module on the path"
        raise InputError([Problem("task.name", f"cannot be loaded: {error}", fix)]) from error
    return found
