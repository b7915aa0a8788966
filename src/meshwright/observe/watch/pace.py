"""Follows the step times of a job and tells when they rise, and when they fall again."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.findings.stepping import Floats
from meshwright.observe.watch.slowdown import MOST_BEFORE, NEWEST, blocks, recovered, slower
from meshwright.observe.watch.steps import StepReader

_FIRST_STEPS = 3
"""Left out: they compile, tune and fill caches."""
_MOST_BLOCK = 200
"""Steps to a block at most that are read."""
_FEWEST_WAITS = 4
_AHEAD = 1.5
"""So many times the middle step is the mean one where the host runs ahead of its device."""


class Rise(NamedTuple):
    """A slowdown that has begun."""

    step: int
    before_s: float
    after_s: float


class Pace:
    """What is usual now; after a slowdown, what is usual since."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._since = _FIRST_STEPS
        self._tested = 0
        self.open: Rise | None = None
        """The slowdown that has not ended."""

    def look(self, reader: StepReader) -> Rise | None:
        """Test the newest steps; return a slowdown that was not known."""
        newest = reader.head().num_steps
        if newest == self._tested:
            return None
        self._tested = newest
        times = reader.times((NEWEST + MOST_BEFORE) * _MOST_BLOCK, self._since)
        joined, size = blocks(times.step_s)
        found = slower(joined, self._least)
        if found is None:
            return None
        step = int(times.number[times.step_s.size % size + found.place * size])
        self._since = step
        before_s = self.open.before_s if self.open is not None else found.before_s
        self.open = Rise(step, before_s, found.after_s)
        return Rise(step, found.before_s, found.after_s)

    def recovered(self, reader: StepReader) -> int | None:
        """Return the step by which an open slowdown was over, if it is."""
        if self.open is None:
            return None
        times = reader.times(NEWEST * _MOST_BLOCK, self._since)
        joined, size = blocks(times.step_s)
        if not recovered(joined, self.open.before_s, self._least):
            return None
        self.open = None
        step = int(times.number[-1]) - NEWEST * size + 1
        self._since = step - 1
        return step


class Usual(NamedTuple):
    """Step times in three figures."""

    middle_s: float
    variation: float
    slowest_s: float


def evened(times: Floats) -> Floats:
    """Even out steps of a host that waits for its device only now and then.

    It sends off some steps in no time, and then waits for all of them at once: means are returned
    from one wait to the next. A few long ones alone save or evaluate, and are left.
    """
    if not times.size:
        return times
    long = int((times > times.mean()).sum())
    if long < _FEWEST_WAITS or times.mean() < _AHEAD * np.median(times):
        return times
    size = round(times.size / long)
    joined: Floats = times[times.size % size :].reshape(-1, size).mean(axis=1)
    return joined


def usual(times: Floats) -> Usual | None:
    """Sum up step times; None where there are none."""
    times = evened(times)
    if not times.size:
        return None
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return Usual(middle, (high - low) / 2 / middle if middle > 0 else 0.0, float(times.max()))
