"""Whether the steps of a running job have become slower, decided again after every few steps.

The newest times are held against those before them by rank alone, which asks nothing of how they
are spread. Were they all alike, any order of them would be as likely as any other: the chance that
the `newest` are all among the `newest + r` longest of the window is C(newest + r, newest) over
C(window, newest). That, per test, is the rate of false alarms; a least rise makes it rarer still.
"""

import math
from typing import NamedTuple

import numpy as np

from meshwright.observe.statistics.change_points import Floats, find_change_point

NUM_NEWEST_TIMES = 8
MIN_BASELINE_TIMES, MAX_BASELINE_TIMES = 24, 40
OUTLIER_PERIOD = 12
"""Of the times before, one in so many may be longer than the newest: steps that save or log."""
BLOCK_S = 0.1
"""Steps shorter than this are judged in blocks, by their mean: a hiccup is no change."""


class DetectedSlowdown(NamedTuple):
    """A rise of the step time."""

    first_slow_index: int
    """Of the first slow one among the times given."""
    before_s: float
    after_s: float

    @property
    def relative_increase(self) -> float:
        """By how much, as a part of what was usual."""
        return self.after_s / self.before_s - 1


def compute_false_alarm_rate(before: int) -> float:
    """Return the chance of a false alarm in one test, with so many times before the newest."""
    spare = before // OUTLIER_PERIOD
    return math.comb(NUM_NEWEST_TIMES + spare, NUM_NEWEST_TIMES) / math.comb(
        NUM_NEWEST_TIMES + before, NUM_NEWEST_TIMES
    )


def average_blocks(times: Floats) -> tuple[Floats, int]:
    """Join consecutive times to means of blocks of `BLOCK_S` or more; also how many each has.

    Whole blocks are counted from the end, so that the newest time belongs to one.
    """
    middle = float(np.median(times)) if times.size else 0.0
    size = max(1, math.ceil(BLOCK_S / middle)) if middle > 0 else 1
    whole = times[times.size % size :]
    return whole.reshape(-1, size).mean(axis=1), size


def detect_slowdown(times: Floats, least: float) -> DetectedSlowdown | None:
    """Tell whether the newest times are longer, by `least` of the usual one or more."""
    before, newest = (
        times[-NUM_NEWEST_TIMES - MAX_BASELINE_TIMES : -NUM_NEWEST_TIMES],
        times[-NUM_NEWEST_TIMES:],
    )
    if before.size < MIN_BASELINE_TIMES:
        return None
    usual, now = float(np.median(before)), float(np.median(newest))
    if now < (1 + least) * usual:
        return None
    spare = before.size // OUTLIER_PERIOD
    if float(newest.min()) <= float(np.sort(before)[-1 - spare]):
        return None
    window = times[-NUM_NEWEST_TIMES - before.size :]
    found = find_change_point(window)
    place = found[0] if found is not None else before.size
    return DetectedSlowdown(times.size - window.size + place, usual, now)


def has_recovered(times: Floats, before_s: float, least: float) -> bool:
    """Tell whether the newest times are back at what was usual before a slowdown."""
    newest = times[-NUM_NEWEST_TIMES:]
    return newest.size == NUM_NEWEST_TIMES and float(np.median(newest)) < (1 + least / 2) * before_s
