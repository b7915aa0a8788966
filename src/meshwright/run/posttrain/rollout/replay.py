"""`RecordingSource` and `ReplaySource`: record samples, and replay them without an engine.

Both, and `RolloutGenerator`, give the groups of a step. So a loop that trains takes any of them:
one to draw only, one to train only on what was drawn before, bit by bit the same.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.generator import (
    RolloutGenerator,
    RolloutGroup,
    group_rollouts,
)
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey
from meshwright.run.posttrain.rollout.rollout_log import RecordedRollouts, RolloutLog


class GroupSource(Protocol):
    """Whatever gives the groups of a step."""

    def get_groups(self, step: int, prompts: Iterable[int], version: int, /) -> list[RolloutGroup]:
        """Return a group for each prompt, drawn by weights of a version."""


class RecordingSource:
    """Draws what a log does not have, and writes it there."""

    def __init__(
        self,
        generator: RolloutGenerator,
        log: RolloutLog,
        heard: Callable[[Rollout], object] = lambda _: None,
    ) -> None:
        """Draw with a generator whose origin is the log's; `heard` gets each rollout as it ends."""
        self._generator, self._log, self._heard = generator, log, heard

    def get_groups(self, step: int, prompts: Iterable[int], version: int, /) -> list[RolloutGroup]:
        """Return a group for each prompt; those that a killed run left are not drawn again."""
        keys = self._generator.build_keys(step, prompts)
        there = [
            find_recorded_rollout(self._log, key, version) for key in keys if key in self._log.keys
        ]
        drawn = []
        for rollout in self._log.generate_missing(self._generator, keys, version):
            self._heard(rollout)
            drawn.append(rollout)
        return group_rollouts(keys, [*there, *drawn], self._generator.config.group_size)


def find_recorded_rollout(log: RolloutLog, key: RolloutKey, version: int) -> Rollout:
    """Return a rollout that a log has, drawn by weights of a version."""
    rollout = log.read(key)
    if set(rollout.versions) - {version}:
        what = f"has {key.label} by weights {rollout.versions[0]}, asked for {version}"
        fix = "go on from the checkpoint of that step, or use another file"
        raise InputError([Problem(str(log.path), what, fix)])
    return rollout


class ReplaySource:
    """Gives what was recorded."""

    def __init__(self, recorded: RecordedRollouts) -> None:
        """Play a file again, as `read_rollouts` gives it."""
        self._samples = recorded.origin.rollout_config.group_size
        self.model = recorded.origin.model
        self._found: dict[RolloutKey, Rollout] = {each.key: each for each in recorded.rollouts}

    @property
    def prompts_by_step(self) -> dict[int, list[int]]:
        """The prompts of each step, in the order of their numbers."""
        found: dict[int, set[int]] = {}
        for key in sorted(self._found):
            found.setdefault(key.step, set()).add(key.prompt)
        return {step: sorted(prompts) for step, prompts in found.items()}

    def get_groups(
        self, step: int, prompts: Iterable[int], version: int = 0, /
    ) -> list[RolloutGroup]:
        """Return a group for each prompt; turns say which weights drew them, `version` does not."""
        del version
        keys = [RolloutKey(step, prompt, n) for prompt in prompts for n in range(self._samples)]
        missing = [key for key in keys if key not in self._found]
        if missing:
            what = f"lacks {len(missing)} of {len(keys)} rollouts, the first is {missing[0].label}"
            fix = "let the run that recorded it go on to the end of this step"
            raise InputError([Problem("replay", what, fix)])
        return group_rollouts(keys, (self._found[key] for key in keys), self._samples)
