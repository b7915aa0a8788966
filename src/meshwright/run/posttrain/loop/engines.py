"""What draws for a loop: an engine in this thread, or a file of what was drawn before.

`EngineThread` is the same beside the trainer. A driver gives orders and takes what is heard.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from meshwright.policy.rollout.actions import PhaseName
from meshwright.run.posttrain.loop.sampling import Sampling
from meshwright.run.posttrain.loop.spans import Spans
from meshwright.run.posttrain.rollouts.generate import Stream
from meshwright.run.posttrain.rollouts.record import Key, Rollout
from meshwright.run.posttrain.rollouts.replay import Replay


class Renewed(NamedTuple):
    """Who draws has a version of the weights."""

    version: int


class EngineFailed(NamedTuple):
    """Who draws ended with an error."""

    error: BaseException


Heard = Rollout | Renewed | EngineFailed


class Engines(Protocol):
    """Whatever takes orders, and gives rollouts as they are complete.

    Everything of one order is asked before the next turn is taken: so what is computed together,
    and with it every bit, does not hang on how threads take turns.
    """

    @property
    def turns(self) -> int:
        """Taken so far: who waits sees by it whether anything happens."""

    @property
    def generating_s(self) -> float:
        """Seconds in which anything was under way."""

    def begin(self, keys: Sequence[Key], version: int, known: Mapping[Key, Rollout]) -> None:
        """Begin rollouts, by the weights that are there; `known` ones keep their tokens."""

    def renew(self, version: int) -> None:
        """Take the trainer's weights, which stay as they are until that is heard."""

    def phase(self, name: PhaseName) -> None:
        """Give an engine's memory up, or take some of it again; nothing is under way."""

    def next(self, timeout_s: float) -> Heard | None:
        """Return what there is to hear; None where nothing comes in that time."""

    def close(self) -> None:
        """End, with what is under way."""


class EngineHere:
    """An engine that takes its turns while somebody waits for them."""

    def __init__(self, sampling: Sampling, spans: Spans) -> None:
        self._sampling, self._spans = sampling, spans
        self._stream = Stream(sampling.generator)
        self._heard: deque[Heard] = deque()
        self._since_ns = 0
        self.turns, self.generating_s = 0, 0.0

    def begin(self, keys: Sequence[Key], version: int, known: Mapping[Key, Rollout]) -> None:
        """Begin rollouts."""
        if keys and not self._stream.busy:
            self._since_ns = time.time_ns()
        self._stream.begin(keys, version, known)

    def renew(self, version: int) -> None:
        """Take the trainer's weights."""
        self._stream.renew(version, lambda: self._sampling.take(version))
        self._heard.append(Renewed(version))

    def phase(self, name: PhaseName) -> None:
        """Give weights and cache up, or take one of them again."""
        match name:
            case "sleep":
                self._sampling.sleep()
            case "wake weights":
                self._sampling.wake(["weights"])
            case "wake cache":
                self._sampling.wake(["cache"])
            case "load" | "offload":
                raise AssertionError(f"{name}: that is the trainer's memory")

    def next(self, timeout_s: float) -> Heard | None:
        """Take turns until there is something to hear, where any time is given for it."""
        while timeout_s and not self._heard and self._stream.busy:
            self._heard += self._stream.turn()
            self.turns += 1
            self._note_idle()
        return self._heard.popleft() if self._heard else None

    def close(self) -> None:
        """Leave the engine idle."""
        self._stream.close()

    def _note_idle(self) -> None:
        """Record the time of what was under way, once nothing is."""
        if not self._stream.busy:
            now_ns = time.time_ns()
            self._spans.add("engines", "generate", self._since_ns, now_ns)
            self.generating_s += (now_ns - self._since_ns) / 1e9


class Replayed:
    """What was drawn before, in place of an engine; its weights are what they were."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._heard: deque[Heard] = deque()
        self.turns, self.generating_s = 0, 0.0

    def begin(self, keys: Sequence[Key], version: int, known: Mapping[Key, Rollout]) -> None:
        """Give what the file has, which nobody judges again."""
        del known
        for step, prompt in dict.fromkeys((key.step, key.prompt) for key in keys):
            (group,) = self._replay.groups(step, [prompt], version)
            self._heard += group

    def renew(self, version: int) -> None:
        """Let versions go by."""
        self._heard.append(Renewed(version))

    def phase(self, name: PhaseName) -> None:
        """Do nothing: no memory is held."""

    def next(self, timeout_s: float) -> Heard | None:
        """Return what was asked for; nobody has to wait for it."""
        del timeout_s
        return self._heard.popleft() if self._heard else None

    def close(self) -> None:
        """End."""
