"""How many there are at each moment: GPUs held, GPUs waited for, and both at once.

A level is a step function: each value holds from its time until the next one.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.fleet.columns import Floats


class StepFunction(NamedTuple):
    """A step function over time; nothing is known before its first time nor from its end on."""

    time_s: Floats
    value: Floats
    end_s: float

    @property
    def durations_s(self) -> Floats:
        """How long each value holds."""
        return np.diff(np.append(self.time_s, self.end_s))

    def mean(self) -> float:
        """Return the mean over time; NaN where there is no time."""
        return time_weighted_mean(self.value, self.durations_s)

    def evaluate(self, time_s: npt.ArrayLike) -> Floats:
        """Return the values at some moments; nought where nothing is known."""
        moments = np.asarray(time_s, dtype=np.float64)
        place = np.searchsorted(self.time_s, moments, side="right") - 1
        known = (place >= 0) & (moments < self.end_s)
        values = self.value[np.clip(place, 0, None)] if len(self.value) else np.zeros(len(moments))
        return np.where(known, values, 0.0)


def build_step_function(time_s: npt.ArrayLike, value: npt.ArrayLike) -> StepFunction:
    """Make a level of samples in order of time; the last holds as long as they usually do."""
    at = np.asarray(time_s, dtype=np.float64)
    steps = np.diff(at)
    last = float(np.median(steps)) if len(steps) else 0.0
    return StepFunction(
        at, np.asarray(value, dtype=np.float64), float(at[-1]) + last if len(at) else 0.0
    )


def count_concurrent(
    start_s: npt.ArrayLike, end_s: npt.ArrayLike, amount: npt.ArrayLike
) -> StepFunction:
    """Add up what is held from `start_s` to `end_s`: GPUs of jobs, or of those that wait."""
    start, end = np.asarray(start_s, dtype=np.float64), np.asarray(end_s, dtype=np.float64)
    much = np.broadcast_to(np.asarray(amount, dtype=np.float64), start.shape)
    known = (end > start) & ~np.isnan(much)
    start, end, much = start[known], end[known], much[known]
    if not len(start):
        return StepFunction(np.zeros(0), np.zeros(0), 0.0)
    moments, place = np.unique(np.concatenate((start, end)), return_inverse=True)
    change = np.bincount(place, weights=np.concatenate((much, -much)), minlength=len(moments))
    # Sums of parts of GPUs do not return to nought exactly.
    value = np.asarray(np.round(np.cumsum(change), 9), dtype=np.float64)
    return StepFunction(moments[:-1], value[:-1], float(moments[-1]))


def measure_pending_while_idle(pending: StepFunction, idle: StepFunction) -> float:
    """Return the share of the time in which something waits although something is idle.

    Time counts where both are known; NaN where that is nowhere.
    """
    begin = (
        max(pending.time_s[0], idle.time_s[0]) if len(pending.time_s) and len(idle.time_s) else 0
    )
    end = min(pending.end_s, idle.end_s)
    if end <= begin:
        return float("nan")
    moments = np.unique(np.concatenate((pending.time_s, idle.time_s, [begin])))
    moments = moments[(moments >= begin) & (moments < end)]
    both = (pending.evaluate(moments) > 0) & (idle.evaluate(moments) > 0)
    return time_weighted_mean(both, np.diff(np.append(moments, end)))


def time_weighted_mean(value: npt.ArrayLike, seconds: npt.ArrayLike) -> float:
    """Return the mean of values that each hold for so long; NaN where there is no time."""
    long = np.asarray(seconds, dtype=np.float64)
    whole = float(long.sum())
    return float((np.asarray(value, dtype=np.float64) * long).sum() / whole) if whole else np.nan
