"""Settings of rewards for answers to prompts of files; whoever reads them needs no torch.

    [[task.rewards]]
    kind = "format"
    pattern = "<think>.*</think>.*"
    weight = 0.1

Rewards are added up by their weights.
"""

import re
from typing import Literal

import msgspec

from meshwright.errors import Problem
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.spec.field_checks import FieldChecker

_NAMED = re.compile(r"[a-z][a-z0-9_]*")


class ExactReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                  tag="exact", tag_field="kind"):  # fmt: skip
    """1 for a right answer, 0 for others, as the evaluation judges them by what a record holds."""

    name: str = "exact"
    """What its figures are called."""
    weight: float = 1.0
    """What it is multiplied by in the sum of all rewards."""
    pattern: str = ""
    """Where in a text the answer is: its last match, or the match's first group."""
    normalization: Literal["strip", "words"] = "strip"
    """What does not count: spaces around, or also case and punctuation."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        _check(bounds, self)
        bounds.problems += find_regex_problems(self.pattern)
        bounds.one_of("normalization", self.normalization, ("strip", "words"))
        bounds.raise_problems()


class NumberReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                   tag="number", tag_field="kind"):  # fmt: skip
    """1 where an answer comes to the number that the record's does; choices and tests as above."""

    name: str = "number"
    """What its figures are called."""
    weight: float = 1.0
    """What it is multiplied by in the sum of all rewards."""
    require_marker: bool = False
    r"""Whether a number counts only behind `####` or within `\boxed{}`; else the last one does."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        _check(bounds, self)
        bounds.raise_problems()


class FormatReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                   tag="format", tag_field="kind"):  # fmt: skip
    """1 where a regular expression matches the whole answer, thoughts included; otherwise 0."""

    pattern: str
    """Dots match ends of lines too; spaces around an answer do not count."""
    name: str = "format"
    """What its figures are called."""
    weight: float = 1.0
    """What it is multiplied by in the sum of all rewards."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        _check(bounds, self)
        bounds.not_empty(pattern=self.pattern)
        bounds.problems += find_regex_problems(self.pattern)
        bounds.raise_problems()


class ModelReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                  tag="model", tag_field="kind"):  # fmt: skip
    """The score of a reward model, any number, read from the tokens as they were drawn."""

    model: str
    """A folder that `mw convert` wrote of a run of `mw train --recipe reward`."""
    adapter: str = ""
    """Of a run with an adapter: its `adapter` folder, `model` being what that run began with."""
    name: str = "model"
    """What its figures are called."""
    weight: float = 1.0
    """What it is multiplied by in the sum of all rewards."""
    clip: float | None = None
    """Scores beyond this, above or below 0, count as this."""
    device: str = ""
    """Where it lies; that of the trainer unless said."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        _check(bounds, self)
        bounds.not_empty(model=self.model)
        bounds.positive(clip=self.clip)
        bounds.raise_problems()

    def resolve_paths(self) -> "ModelReward":
        """Return the same with paths that are found from any folder."""
        model, adapter = make_absolute_path(self.model), make_absolute_path(self.adapter)
        return msgspec.structs.replace(self, model=model, adapter=adapter)


RewardConfig = ExactReward | NumberReward | FormatReward | ModelReward


class FieldMapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What records call what, where they call it otherwise; `a.b` is the field b within a."""

    prompt: str = "prompt"
    answer: str = "answer"
    choices: str = "choices"
    right: str = "right"
    tests: str = "tests"
    prefix: str = "prefix"

    @property
    def map_fields(self) -> dict[str, str]:
        """What is called otherwise: our names, and those of records."""
        found: dict[str, str] = msgspec.structs.asdict(self)
        return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def find_regex_problems(pattern: str) -> list[Problem]:
    """Say what is wrong with a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError) as error:
        what = f"{pattern!r} is no regular expression: {error}"
        return [Problem("pattern", what, r"use such as '#### (\S+)'")]
    return []


def _check(bounds: FieldChecker, reward: "RewardConfig") -> None:
    if not _NAMED.fullmatch(reward.name):
        what = f"{reward.name!r} is no name of a figure"
        bounds.add("name", what, "use small letters, digits and _, such as right")
    weight = reward.weight
    if not abs(weight) <= 1e30 or not weight:
        bounds.add("weight", f"{weight!r} is no finite number other than 0", "use such as 0.5")
