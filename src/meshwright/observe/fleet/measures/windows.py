"""Stretches of time over which samples agree: GPUs that stood idle, links that stood still.

A window runs from its first sample to its last, so that what it claims was seen: one sample is a
window of no length. A sample without a value counts as one that was never taken; whether the window
goes on behind it is decided by the gap it leaves.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class Windows(NamedTuple):
    """Stretches of time, one for each place in the columns, ordered by series and time."""

    series: Whole
    """Which series each belongs to, as it was given."""
    start_s: Floats
    end_s: Floats
    samples: Whole

    @property
    def seconds(self) -> Floats:
        """How long each lasts."""
        return self.end_s - self.start_s

    @property
    def hours(self) -> float:
        """How long they last together."""
        return float(self.seconds.sum()) / 3600


def windows(
    series: npt.ArrayLike,
    time_s: npt.ArrayLike,
    holds: npt.ArrayLike,
    *,
    gap_s: float,
    length_s: float = 0.0,
) -> Windows:
    """Find where `holds` is true in every sample for at least `length_s`.

    `series` numbers what each sample was taken of (see `numbered`); samples come in any order. Two
    samples further apart than `gap_s` are not of one window.
    """
    of, at = np.asarray(series, dtype=np.int64), np.asarray(time_s, dtype=np.float64)
    kept = np.asarray(holds, dtype=bool)
    if not len(at):
        nothing = np.zeros(0)
        return Windows(nothing.astype(np.int64), nothing, nothing, nothing.astype(np.int64))
    if _unordered(of, at):
        order = np.lexsort((at, of))
        of, at, kept = of[order], at[order], kept[order]
    breaks = np.ones(len(at), dtype=bool)
    breaks[1:] = (of[1:] != of[:-1]) | (at[1:] - at[:-1] > gap_s) | (kept[1:] != kept[:-1])
    first = np.flatnonzero(breaks)
    last = np.append(first[1:], len(at)) - 1
    chosen = kept[first] & (at[last] - at[first] >= length_s)
    first, last = first[chosen], last[chosen]
    return Windows(of[first], at[first], at[last], last - first + 1)


def idle_windows(
    series: npt.ArrayLike,
    time_s: npt.ArrayLike,
    activity: npt.ArrayLike,
    *,
    at_most: float = 0.0,
    gap_s: float = 300.0,
    length_s: float = 1800.0,
) -> Windows:
    """Find where activity is never above `at_most` for at least `length_s`.

    The defaults are those under which idle GPUs of published traces are counted: half an hour of
    noughts, and no five minutes without a sample.
    """
    value = np.asarray(activity, dtype=np.float64)
    known = ~np.isnan(value)
    of, at = np.asarray(series, dtype=np.int64), np.asarray(time_s, dtype=np.float64)
    idle = value[known] <= at_most
    return windows(of[known], at[known], idle, gap_s=gap_s, length_s=length_s)


def numbered(*columns: Any) -> Whole:
    """Number the distinct combinations of some columns of pyarrow from nought.

    Order is that of first appearance in the first column, and so on within it; a null is a value
    like any other.
    """
    found: Whole | None = None
    for column in columns:
        whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        encoded = whole.dictionary_encode(null_encoding="encode")
        codes = np.asarray(encoded.indices, dtype=np.int64)
        if found is None:
            found = codes
        else:
            together = found * (len(encoded.dictionary) or 1) + codes
            found = np.unique(together, return_inverse=True)[1].astype(np.int64)
    return found if found is not None else np.zeros(0, dtype=np.int64)


def _unordered(series: Whole, time_s: Floats) -> bool:
    """Say whether a sort is needed: that of millions of samples takes longer than all the rest."""
    same = series[1:] == series[:-1]
    return bool(((series[1:] < series[:-1]) | (same & (time_s[1:] < time_s[:-1]))).any())
