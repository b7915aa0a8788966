"""Follows the step times of a job and tells when they rise, and when they fall again."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.statistics.change_points import Floats
from meshwright.observe.statistics.rank_test import (
    MAX_BASELINE_TIMES,
    NUM_NEWEST_TIMES,
    average_blocks,
    detect_slowdown,
    has_recovered,
)
from meshwright.observe.watch.step_page_reader import StepPageReader

_FIRST_STEPS = 3
"""Left out: they compile, tune and fill caches."""
_MOST_BLOCK = 200
"""Steps to a block at most that are read."""
_FEWEST_WAITS = 4
_AHEAD = 1.5
"""So many times the middle step is the mean one where the host runs ahead of its device."""


class StepTimeRise(NamedTuple):
    """A slowdown that has begun."""

    step: int
    before_s: float
    after_s: float


class StepPace:
    """What is usual now; after a slowdown, what is usual since."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._since = _FIRST_STEPS
        self._tested = 0
        self.open_slowdown: StepTimeRise | None = None
        """The slowdown that has not ended."""

    def check(self, reader: StepPageReader) -> StepTimeRise | None:
        """Test the newest steps; return a slowdown that was not known."""
        newest = reader.read_header().num_steps
        if newest == self._tested:
            return None
        self._tested = newest
        times = reader.read_step_durations(
            (NUM_NEWEST_TIMES + MAX_BASELINE_TIMES) * _MOST_BLOCK, self._since
        )
        joined, size = average_blocks(times.step_s)
        found = detect_slowdown(joined, self._least)
        if found is None:
            return None
        step = int(times.step_number[times.step_s.size % size + found.first_slow_index * size])
        self._since = step
        before_s = self.open_slowdown.before_s if self.open_slowdown is not None else found.before_s
        self.open_slowdown = StepTimeRise(step, before_s, found.after_s)
        return StepTimeRise(step, found.before_s, found.after_s)

    def find_recovery(self, reader: StepPageReader) -> int | None:
        """Return the step by which an open slowdown was over, if it is."""
        if self.open_slowdown is None:
            return None
        times = reader.read_step_durations(NUM_NEWEST_TIMES * _MOST_BLOCK, self._since)
        joined, size = average_blocks(times.step_s)
        if not has_recovered(joined, self.open_slowdown.before_s, self._least):
            return None
        self.open_slowdown = None
        step = int(times.step_number[-1]) - NUM_NEWEST_TIMES * size + 1
        self._since = step - 1
        return step


class StepTimeStats(NamedTuple):
    """Step times in three figures."""

    median_s: float
    variation: float
    slowest_s: float


def smooth_ahead_steps(times: Floats) -> Floats:
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


def summarize_step_times(times: Floats) -> StepTimeStats | None:
    """Sum up step times; None where there are none."""
    times = smooth_ahead_steps(times)
    if not times.size:
        return None
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return StepTimeStats(
        middle, (high - low) / 2 / middle if middle > 0 else 0.0, float(times.max())
    )
