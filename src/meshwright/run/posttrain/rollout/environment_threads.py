"""`EnvironmentThreadPool`: steps of environments in threads of their own, each with a deadline.

A thread that hangs cannot be ended. So the threads are daemons, which keep no process from its end,
and whoever waits is told which episode of which environment is late.
"""

import queue
import threading
import time
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.run.posttrain.rollout.environment import EnvironmentStep, Episode
from meshwright.run.posttrain.rollout.rollout import RolloutKey, RolloutTurn


class EnvironmentFailureError(MeshwrightError):
    """An environment failed, or did not answer within its deadline."""


class _Wanted(NamedTuple):
    key: RolloutKey
    episode: Episode
    turn: RolloutTurn


class StepResult(NamedTuple):
    """What an environment said."""

    key: RolloutKey
    turn: RolloutTurn
    reply: EnvironmentStep


class EnvironmentThreadPool:
    """Lets episodes hear their turns; used by one thread."""

    def __init__(self, name: str, *, threads: int, step_s: float) -> None:
        """Step episodes of an environment of that name; without threads, where they are given."""
        self._name, self._count, self._step_s = name, threads, step_s
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[_Wanted, EnvironmentStep | Exception]] = (
            queue.SimpleQueue()
        )
        self._began_s: dict[RolloutKey, float] = {}
        """When a thread took a step up; written by the threads."""
        self._open: dict[RolloutKey, RolloutTurn] = {}
        for number in range(threads):
            threading.Thread(target=self._work, name=f"environment {number}", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether any reply is still to come."""
        return bool(self._open)

    def submit(self, key: RolloutKey, episode: Episode, turn: RolloutTurn) -> None:
        """Let an episode hear a turn."""
        self._open[key] = turn
        wanted = _Wanted(key, episode, turn)
        if self._count:
            self._wanted.put(wanted)
        else:
            self._step(wanted)

    def next_result(self, *, wait: bool) -> StepResult | None:
        """Return a reply; None where none is there and nobody is to wait."""
        while self._open:
            try:
                timeout_s = self._patience_s() if wait else 0.0
                wanted, reply = self._heard.get(wait, timeout_s)
            except queue.Empty:
                self._blame_the_late()
                if not wait:
                    return None
                continue
            del self._open[wanted.key]
            self._began_s.pop(wanted.key, None)
            if isinstance(reply, Exception):
                what = f"environment {self._name} failed at {wanted.key}"
                raise EnvironmentFailureError(f"{what}: {type(reply).__name__}: {reply}") from reply
            return StepResult(wanted.key, wanted.turn, reply)
        return None

    def close(self) -> None:
        """Let the threads end that can."""
        for _ in range(self._count):
            self._wanted.put(None)

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            # The clock runs from here: the wait for a thread is no fault of this episode.
            self._began_s[wanted.key] = time.monotonic()
            self._step(wanted)

    def _step(self, wanted: _Wanted) -> None:
        reply: EnvironmentStep | Exception
        try:
            reply = wanted.episode.step(wanted.turn)
        except Exception as error:  # noqa: BLE001  raised where somebody waits for it
            reply = error
        self._heard.put((wanted, reply))

    def _patience_s(self) -> float:
        began_s = list(self._began_s.copy().values())
        now = time.monotonic()
        return max(0.001, min(began_s, default=now) + self._step_s - now)

    def _blame_the_late(self) -> None:
        now = time.monotonic()
        late = [key for key, s in self._began_s.copy().items() if now - s > self._step_s]
        if late:
            what = f"environment {self._name} gave no answer within its deadline"
            who = "; ".join(map(str, late[:4]))
            raise EnvironmentFailureError(f"{what} of {self._step_s:g} s: {who}")
