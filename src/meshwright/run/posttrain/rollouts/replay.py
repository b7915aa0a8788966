"""`Recording` and `Replay`: draws that are written down, and the same draws without an engine.

Both, and `Generator`, give the groups of a step. So a loop that trains takes any of them: one to
draw only, one to train only on what was drawn before, bit by bit the same.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollouts.generate import Generator, Group, grouped
from meshwright.run.posttrain.rollouts.log import Recorded, RolloutLog
from meshwright.run.posttrain.rollouts.record import Key, Rollout


class Draws(Protocol):
    """Whatever gives the groups of a step."""

    def groups(self, step: int, prompts: Iterable[int], version: int, /) -> list[Group]:
        """Return a group for each prompt, drawn by weights of a version."""


class Recording:
    """Draws what a log does not have, and writes it there."""

    def __init__(
        self,
        generator: Generator,
        log: RolloutLog,
        heard: Callable[[Rollout], object] = lambda _: None,
    ) -> None:
        """Draw with a generator whose origin is the log's; `heard` gets each rollout as it ends."""
        self._generator, self._log, self._heard = generator, log, heard

    def groups(self, step: int, prompts: Iterable[int], version: int, /) -> list[Group]:
        """Return a group for each prompt; those that a killed run left are not drawn again."""
        keys = self._generator.keys(step, prompts)
        there = [recorded(self._log, key, version) for key in keys if key in self._log.keys]
        drawn = []
        for rollout in self._log.missing(self._generator, keys, version):
            self._heard(rollout)
            drawn.append(rollout)
        return grouped(keys, [*there, *drawn], self._generator.drawing.samples)


def recorded(log: RolloutLog, key: Key, version: int) -> Rollout:
    """Return a rollout that a log has, drawn by weights of a version."""
    rollout = log.read(key)
    if set(rollout.versions) - {version}:
        what = f"has {key.written} by weights {rollout.versions[0]}, asked for {version}"
        fix = "go on from the checkpoint of that step, or use another file"
        raise InputError([Problem(str(log.path), what, fix)])
    return rollout


class Replay:
    """Gives what was recorded."""

    def __init__(self, recorded: Recorded) -> None:
        """Play a file again, as `read_rollouts` gives it."""
        self._samples = recorded.origin.drawing.samples
        self.model = recorded.origin.model
        self._found: dict[Key, Rollout] = {each.key: each for each in recorded.rollouts}

    @property
    def steps(self) -> dict[int, list[int]]:
        """The prompts of each step, in the order of their numbers."""
        found: dict[int, set[int]] = {}
        for key in sorted(self._found):
            found.setdefault(key.step, set()).add(key.prompt)
        return {step: sorted(prompts) for step, prompts in found.items()}

    def groups(self, step: int, prompts: Iterable[int], version: int = 0, /) -> list[Group]:
        """Return a group for each prompt; turns say which weights drew them, `version` does not."""
        del version
        keys = [Key(step, prompt, n) for prompt in prompts for n in range(self._samples)]
        missing = [key for key in keys if key not in self._found]
        if missing:
            what = (
                f"lacks {len(missing)} of {len(keys)} rollouts, the first is {missing[0].written}"
            )
            fix = "let the run that recorded it go on to the end of this step"
            raise InputError([Problem("replay", what, fix)])
        return grouped(keys, (self._found[key] for key in keys), self._samples)
