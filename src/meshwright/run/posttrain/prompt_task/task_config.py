"""`TaskConfig`: what a run of reinforcement learning asks, and what it rewards."""

import math
from typing import Any, Literal

import msgspec

from meshwright.errors import Problem
from meshwright.run.posttrain.prompt_task.reward_config import (
    ExactReward,
    FieldMapping,
    ModelReward,
    NumberReward,
    RewardConfig,
)
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.spec.field_checks import FieldChecker, check_number
from meshwright.spec.name_suggestions import format_suggestion

LONGEST = 256
"""Tokens of a turn, where neither the settings nor the task say so."""
DIGITS = "sorting-digits"
QUESTIONS = "questions"
_TASKS = (DIGITS, QUESTIONS)
_REWARDS = ("exact", "share", "number")
_READ_BY = {
    DIGITS: ("digits", "longest", "reward"),
    QUESTIONS: (
        "reward", "rewards", "train", "held_out", "validation", "fields", "chat", "system",
        "max_prompt_tokens", "length_policy", "shuffle",
    ),
}  # fmt: skip
"""Which fields a task reads; one of your own reads its options alone."""
_OWN = "set task.digits, task.longest, task.reward, or name a task of your own"


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of the model, and what it is rewarded for."""

    name: str = DIGITS
    """`sorting-digits`, `questions` of files, or `module:function` that returns an `Environment`
    when it is called with `part="train"` or `part="held-out"` and the options."""
    digits: int = 4
    """Digits of a list that is to be sorted."""
    longest: int | None = None
    """Lists have up to so many digits: most are short, a few very long. None: all have `digits`."""
    reward: Literal["exact", "share", "number"] = "exact"
    """1 for an answer that is right and 0 for others; of digits, the `share` of places that are
    right; of questions, whether the `number` that an answer comes to is right."""
    rewards: tuple[RewardConfig, ...] = ()
    """Of questions, in place of `reward`: several, which are added up by their weights."""
    train: str = ""
    """Of questions: a file of prompts, or a folder of files."""
    held_out: str = ""
    """Prompts that are kept from training; none keeps a share of `train` back."""
    validation: float = 0.05
    """The share of `train` that is kept back where there is no `held_out`: every so many-th."""
    fields: FieldMapping = FieldMapping()
    """What records call their prompts and answers."""
    chat: bool = False
    """Whether a prompt that is a text is asked as a user's message; else it is continued."""
    system: str = ""
    """What chats begin with that have no such message of their own."""
    max_prompt_tokens: int | None = None
    """Of a prompt; None is what the model's context leaves beside an answer."""
    length_policy: Literal["error", "drop"] = "error"
    """What becomes of prompts that are longer."""
    shuffle: bool = True
    """Whether each pass through the prompts takes them in an order of its own, by the seed."""
    options: dict[str, Any] = {}
    """Given to a function of your own; of questions, names that the chat template may ask for."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(2, digits=self.digits, longest=self.longest)
        bounds.count(max_prompt_tokens=self.max_prompt_tokens)
        bounds.one_of("reward", self.reward, _REWARDS)
        bounds.one_of("length_policy", self.length_policy, ("error", "drop"))
        bounds.problems += check_number("validation", self.validation, 0.0, 0.5)
        if self.name not in _TASKS and ":" not in self.name:
            fix = format_suggestion(self.name, _TASKS)
            bounds.add("name", f"{self.name!r} is no task", f"{fix}, or module:function")
        names = [each.name for each in self.rewards]
        if twice := {each for each in names if names.count(each) > 1}:
            what = f"{', '.join(sorted(twice))} is the name of several"
            bounds.add("rewards", what, "give each a name of its own")
        bounds.raise_problems()

    @property
    def question_rewards(self) -> tuple[RewardConfig, ...]:
        """The rewards of an answer to a question."""
        if self.rewards:
            return self.rewards
        return (NumberReward(),) if self.reward == "number" else (ExactReward(),)

    @property
    def reward_models(self) -> tuple[ModelReward, ...]:
        """Those that reward models give."""
        return tuple(each for each in self.rewards if isinstance(each, ModelReward))

    @property
    def is_fractional_reward(self) -> bool:
        """Whether a mean reward may be told as a share of the most that an answer can get."""
        weights = [each.weight for each in self.question_rewards]
        return not self.reward_models and min(weights) > 0 and math.isclose(sum(weights), 1.0)

    def problems(self) -> list[Problem]:
        """Say what the task that is named would pass over without a word, or lacks."""
        usual, mine = TaskConfig(), _READ_BY.get(self.name, ())
        found = [
            Problem(f"task.options.{name}", f"{DIGITS} takes no options", _OWN)
            for name in (self.options if self.name == DIGITS else ())
        ]
        for field in self.__struct_fields__:
            if field in ("name", "options", *mine) or getattr(self, field) == getattr(usual, field):
                continue
            readers = [name for name, read in _READ_BY.items() if field in read]
            fix = f"set task.name={readers[0]}"
            if self.name not in _TASKS:
                fix = "give it to your task in task.options"
            what = f"is read by {' and '.join(readers)} alone"
            found.append(Problem(f"task.{field}", what, fix))
        if self.name == QUESTIONS:
            found += self._lacks()
        elif self.name == DIGITS and self.reward == "number":
            what = "number is nothing that sorted digits come to"
            found.append(Problem("task.reward", what, "use exact or share"))
        return found

    def _lacks(self) -> list[Problem]:
        found = []
        if not self.train:
            fix = "give a file: task.train=prompts.jsonl"
            found.append(Problem("task.train", "nothing says what is asked", fix))
        if self.reward == "share":
            what = "share is of places in sorted digits"
            found.append(Problem("task.reward", what, "use exact or number"))
        elif self.rewards and self.reward != "exact":
            what = f"{self.reward} stands beside task.rewards, which take its place"
            found.append(Problem("task.reward", what, f'add {{kind = "{self.reward}"}} to them'))
        return found

    def resolve_paths(self) -> "TaskConfig":
        """Return the same with paths that are found from any folder."""
        train, held_out = make_absolute_path(self.train), make_absolute_path(self.held_out)
        rewards = tuple(each.resolve_paths() if isinstance(each, ModelReward) else each
                        for each in self.rewards)  # fmt: skip
        return msgspec.structs.replace(self, rewards=rewards, train=train, held_out=held_out)
