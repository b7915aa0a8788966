"""Stretches of time over which samples agree: GPUs that stood idle, links that stood still.

A window runs from its first sample to its last, so that what it claims was seen: one sample is a
window of no length. A sample without a value counts as one that was never taken; whether the window
goes on behind it is decided by the gap it leaves.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.fleet.columns import Floats, Ints


class SampleIntervals(NamedTuple):
    """Stretches of time, one for each place in the columns, ordered by series and time."""

    series: Ints
    """Which series each belongs to, as it was given."""
    start_s: Floats
    end_s: Floats
    num_samples: Ints

    @property
    def durations_s(self) -> Floats:
        """How long each lasts."""
        return self.end_s - self.start_s

    @property
    def total_hours(self) -> float:
        """How long they last together."""
        return float(self.durations_s.sum()) / 3600


def find_intervals(
    series: npt.ArrayLike,
    time_s: npt.ArrayLike,
    holds: npt.ArrayLike,
    *,
    gap_s: float,
    length_s: float = 0.0,
) -> SampleIntervals:
    """Find where `holds` is true in every sample for at least `length_s`.

    `series` numbers what each sample was taken of (see `columns.group_rows`); samples come in any
    order. Two samples further apart than `gap_s` are not of one window.
    """
    of, at = np.asarray(series, dtype=np.int64), np.asarray(time_s, dtype=np.float64)
    kept = np.asarray(holds, dtype=bool)
    if not len(at):
        nothing = np.zeros(0)
        return SampleIntervals(nothing.astype(np.int64), nothing, nothing, nothing.astype(np.int64))
    if _unordered(of, at):
        order = np.lexsort((at, of))
        of, at, kept = of[order], at[order], kept[order]
    breaks = np.ones(len(at), dtype=bool)
    breaks[1:] = (of[1:] != of[:-1]) | (at[1:] - at[:-1] > gap_s) | (kept[1:] != kept[:-1])
    first = np.flatnonzero(breaks)
    last = np.append(first[1:], len(at)) - 1
    chosen = kept[first] & (at[last] - at[first] >= length_s)
    first, last = first[chosen], last[chosen]
    return SampleIntervals(of[first], at[first], at[last], last - first + 1)


def find_idle_intervals(
    series: npt.ArrayLike,
    time_s: npt.ArrayLike,
    activity: npt.ArrayLike,
    *,
    at_most: float = 0.0,
    gap_s: float = 300.0,
    length_s: float = 1800.0,
) -> SampleIntervals:
    """Find where activity is never above `at_most` for at least `length_s`.

    The defaults are those under which idle GPUs of published traces are counted: half an hour of
    noughts, and no five minutes without a sample.
    """
    value = np.asarray(activity, dtype=np.float64)
    known = ~np.isnan(value)
    of, at = np.asarray(series, dtype=np.int64), np.asarray(time_s, dtype=np.float64)
    idle = value[known] <= at_most
    return find_intervals(of[known], at[known], idle, gap_s=gap_s, length_s=length_s)


def _unordered(series: Ints, time_s: Floats) -> bool:
    """Say whether a sort is needed: that of millions of samples takes longer than all the rest."""
    same = series[1:] == series[:-1]
    return bool(((series[1:] < series[:-1]) | (same & (time_s[1:] < time_s[:-1]))).any())
