"""`RLTimelineRecorder`: what trainer and engines do and wait for, on the real clock.

Names are those that a simulated run has for the same.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from meshwright.policy.rollout.actions import IdleReason

if TYPE_CHECKING:
    from meshwright.timeline import TimelineWriter

RLSide = Literal["trainer", "engines"]


class RLTimelineRecorder:
    """Adds up seconds by name, and writes spans to a timeline where there is one."""

    def __init__(self, timeline: "TimelineWriter | None" = None) -> None:
        self._timeline = timeline
        self.durations_s: defaultdict[tuple[RLSide, str], float] = defaultdict(float)
        """Of everything that ended, by who and what; waits stand as `wait: name`."""
        self._waiting: dict[tuple[RLSide, str], int] = {}

    @contextmanager
    def record(self, who: RLSide, name: str) -> Iterator[None]:
        """Record what is done inside."""
        start_ns = time.time_ns()
        try:
            yield
        finally:
            self.add(who, name, start_ns, time.time_ns())

    @contextmanager
    def record_wait(self, who: RLSide, name: str) -> Iterator[None]:
        """Record that somebody waits meanwhile."""
        start_ns = time.time_ns()
        try:
            yield
        finally:
            self.add(who, name, start_ns, time.time_ns(), wait=True)

    def set_idle_reasons(self, waits: Sequence[IdleReason]) -> None:
        """Take who waits for what from now on, as the controller says."""
        now_ns = time.time_ns()
        named: set[tuple[RLSide, str]] = {(one.side, one.cause) for one in waits}
        for one in [each for each in self._waiting if each not in named]:
            self.add(*one, self._waiting.pop(one), now_ns, wait=True)
        for one in named:
            self._waiting.setdefault(one, now_ns)

    def add(
        self, who: RLSide, name: str, start_ns: int, end_ns: int, *, wait: bool = False
    ) -> None:
        """Record a span that is over."""
        self.durations_s[who, f"wait: {name}" if wait else name] += (end_ns - start_ns) / 1e9
        if self._timeline is not None:
            kind = "wait" if wait else "compute"
            self._timeline.span(name, start_ns, end_ns - start_ns, kind=kind, lane=who)

    def step(self, number: int, step_s: float) -> None:
        """Mark a step that ends now."""
        if self._timeline is not None:
            lasted_ns = round(step_s * 1e9)
            start_ns = time.time_ns() - lasted_ns
            self._timeline.span(f"step {number}", start_ns, lasted_ns, kind="host", lane="host")

    def flush(self) -> None:
        """Bring what was recorded to the file: a kill loses none of it."""
        if self._timeline is not None:
            self._timeline.flush()

    def close(self) -> None:
        """End all waits, and the file."""
        self.set_idle_reasons(())
        if self._timeline is not None:
            self._timeline.close()
