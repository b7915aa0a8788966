"""What draws for a loop: an engine in this thread, or a file of what was drawn before.

`ThreadedRolloutEngine` is the same beside the trainer. A driver gives orders and takes what is
heard.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from meshwright.policy.rollout.actions import MemoryPhase
from meshwright.run.posttrain.rl.generation.rollout_backend import RolloutBackend
from meshwright.run.posttrain.rl.timeline_recorder import RLTimelineRecorder
from meshwright.run.posttrain.rollout.generator import RolloutStream
from meshwright.run.posttrain.rollout.replay import ReplaySource
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey


class WeightsUpdatedEvent(NamedTuple):
    """Who draws has a version of the weights."""

    version: int


class EngineFailedEvent(NamedTuple):
    """Who draws ended with an error."""

    error: BaseException


RolloutEvent = Rollout | WeightsUpdatedEvent | EngineFailedEvent


class RolloutEngine(Protocol):
    """Whatever takes orders, and gives rollouts as they are complete.

    Everything of one order is asked before the next turn is taken: so what is computed together,
    and with it every bit, does not hang on how threads take turns.
    """

    @property
    def step_count(self) -> int:
        """Taken so far: who waits sees by it whether anything happens."""

    @property
    def generating_s(self) -> float:
        """Seconds in which anything was under way."""

    def submit(
        self, keys: Sequence[RolloutKey], version: int, known: Mapping[RolloutKey, Rollout]
    ) -> None:
        """Begin rollouts, by the weights that are there; `known` ones keep their tokens."""

    def update_weights(self, version: int) -> None:
        """Take the trainer's weights, which stay as they are until that is heard."""

    def enter_memory_phase(self, name: MemoryPhase) -> None:
        """Give an engine's memory up, or take some of it again; nothing is under way."""

    def next_event(self, timeout_s: float) -> RolloutEvent | None:
        """Return what there is to hear; None where nothing comes in that time."""

    def close(self) -> None:
        """End, with what is under way."""


class InlineRolloutEngine:
    """An engine that takes its turns while somebody waits for them."""

    def __init__(self, sampling: RolloutBackend, spans: RLTimelineRecorder) -> None:
        self._sampling, self._spans = sampling, spans
        self._stream = RolloutStream(sampling.generator)
        self._heard: deque[RolloutEvent] = deque()
        self._since_ns = 0
        self.step_count, self.generating_s = 0, 0.0

    def submit(
        self, keys: Sequence[RolloutKey], version: int, known: Mapping[RolloutKey, Rollout]
    ) -> None:
        """Begin rollouts."""
        if keys and not self._stream.is_busy:
            self._since_ns = time.time_ns()
        self._stream.submit(keys, version, known)

    def update_weights(self, version: int) -> None:
        """Take the trainer's weights."""
        self._stream.update_weights(version, lambda: self._sampling.load_weights(version))
        self._heard.append(WeightsUpdatedEvent(version))

    def enter_memory_phase(self, name: MemoryPhase) -> None:
        """Give weights and cache up, or take one of them again."""
        match name:
            case "sleep":
                self._sampling.sleep()
            case "wake weights":
                self._sampling.wake_up(["weights"])
            case "wake cache":
                self._sampling.wake_up(["cache"])
            case "load" | "offload":
                raise AssertionError(f"{name}: that is the trainer's memory")

    def next_event(self, timeout_s: float) -> RolloutEvent | None:
        """Take turns until there is something to hear, where any time is given for it."""
        while timeout_s and not self._heard and self._stream.is_busy:
            self._heard += self._stream.run_step()
            self.step_count += 1
            self._note_idle()
        return self._heard.popleft() if self._heard else None

    def close(self) -> None:
        """Leave the engine idle."""
        self._stream.close()

    def _note_idle(self) -> None:
        """Record the time of what was under way, once nothing is."""
        if not self._stream.is_busy:
            now_ns = time.time_ns()
            self._spans.add("engines", "generate", self._since_ns, now_ns)
            self.generating_s += (now_ns - self._since_ns) / 1e9


class ReplayRolloutEngine:
    """What was drawn before, in place of an engine; its weights are what they were."""

    def __init__(self, replay: ReplaySource) -> None:
        self._replay = replay
        self._heard: deque[RolloutEvent] = deque()
        self.step_count, self.generating_s = 0, 0.0

    def submit(
        self, keys: Sequence[RolloutKey], version: int, known: Mapping[RolloutKey, Rollout]
    ) -> None:
        """Give what the file has, which nobody judges again."""
        del known
        for step, prompt in dict.fromkeys((key.step, key.prompt) for key in keys):
            (group,) = self._replay.get_groups(step, [prompt], version)
            self._heard += group

    def update_weights(self, version: int) -> None:
        """Let versions go by."""
        self._heard.append(WeightsUpdatedEvent(version))

    def enter_memory_phase(self, name: MemoryPhase) -> None:
        """Do nothing: no memory is held."""

    def next_event(self, timeout_s: float) -> RolloutEvent | None:
        """Return what was asked for; nobody has to wait for it."""
        del timeout_s
        return self._heard.popleft() if self._heard else None

    def close(self) -> None:
        """End."""
