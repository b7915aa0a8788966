"""The environments that settings name, for training and held out."""

from collections.abc import Callable, Mapping
from importlib import import_module
from traceback import extract_tb
from typing import Any, Literal, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.loop.settings import DIGITS, LoopSettings, TaskSettings
from meshwright.run.posttrain.rollouts.drawing import Drawing
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.posttrain.rollouts.tasks.sorting import SortingDigits

_LONGEST = 256
"""Tokens of a turn, where neither the settings nor the task say so."""


_NEEDED = ("name", "verifiers", "waits", "reset")
"""What every environment has."""


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
            step_s=settings.environment_s,
        )


def tasks_of(settings: LoopSettings) -> Tasks:
    """Return the task that settings name."""
    task = settings.task
    _check_fields(task)
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
    own = [_made(make, task.name, part, task.options) for part in parts]
    return Tasks(
        own[0],
        own[1],
        settings.max_tokens or int(getattr(own[0], "max_tokens", _LONGEST)),
        tuple(getattr(own[0], "stop_tokens", ())),
        getattr(own[0], "vocab", None),
    )


def _check_fields(task: TaskSettings) -> None:
    """Refuse what the task that is named would pass over without a word."""
    own = ("digits", "longest", "reward")
    if task.name == DIGITS:
        fix = f"set {', '.join(f'task.{name}' for name in own)}, or name a task of your own"
        wrong = [(f"task.options.{name}", f"{DIGITS} takes no options", fix)
                 for name in task.options]  # fmt: skip
    else:
        usual, fix = TaskSettings(), "give it to your task in task.options"
        wrong = [(f"task.{name}", f"is read by {DIGITS} alone", fix)
                 for name in own if getattr(task, name) != getattr(usual, name)]  # fmt: skip
    if wrong:
        raise InputError([Problem(*each) for each in wrong])


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except Exception as error:
        fix = (
            "name it as module:function, at the top level of a module on the path; "
            "PYTHONPATH=. mw train … finds modules of this folder"
        )
        raise InputError(
            [Problem("task.name", f"cannot be loaded: {_told(error)}", fix)]
        ) from error
    return found


def _made(
    make: Callable[..., Any], name: str, part: str, options: Mapping[str, Any]
) -> Environment:
    """Call somebody's function; what goes wrong in it, or is missing, is told as theirs."""
    try:
        made: Environment = make(part=part, **options)
    except Exception as error:
        fix = "see to the function, or to task.options, which it is called with"
        raise InputError([Problem("task.name", f"{name} failed: {_told(error)}", fix)]) from error
    missing = [each for each in _NEEDED if not hasattr(made, each)]
    if missing:
        what = f"what {name} returns has no {', '.join(missing)}"
        fix = f"an environment has {', '.join(_NEEDED)}"
        raise InputError([Problem("task.name", what, fix)])
    return made


def _told(error: Exception) -> str:
    """Return an error in words, with the line of somebody's file that it comes from."""
    last = extract_tb(error.__traceback__)[-1]
    ours = last.filename == __file__ or last.filename.startswith("<")
    where = "" if ours else f" ({last.filename}:{last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
