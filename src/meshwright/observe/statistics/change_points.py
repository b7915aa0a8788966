"""Outliers (median absolute deviation) and change points (Pettitt's test) in step times."""

import math

import numpy as np
import numpy.typing as npt

MIN_STEPS_FOR_OUTLIERS = 8

OUTLIER_DEVIATIONS = 8.0
"""Of 1.4826 MAD, which is the standard deviation where times are normal."""

SMALL_SAMPLE_CORRECTION = 6.0
"""The MAD of few steps is often small by chance: of n, the limit is wider by this part over n."""

MIN_OUTLIER_EXCESS = 0.10
"""And at least this part of the median step."""

MAX_OUTLIER_SHARE = 0.2
"""Where more steps than this part are longer, they are no outliers but another kind of step."""

CHANGE_SIGNIFICANCE = 0.005
"""Pettitt's chance that steps without a change look like this."""

Floats = npt.NDArray[np.float64]


def find_outliers(times: Floats) -> npt.NDArray[np.intp]:
    """Places of steps that are far longer than the usual one; none for fewer than eight."""
    if times.size < MIN_STEPS_FOR_OUTLIERS:
        return np.zeros(0, dtype=np.intp)
    usual = float(np.median(times))
    spread = 1.4826 * float(np.median(np.abs(times - usual)))
    spread *= 1 + SMALL_SAMPLE_CORRECTION / times.size
    limit = usual + max(OUTLIER_DEVIATIONS * spread, MIN_OUTLIER_EXCESS * usual)
    far = np.flatnonzero(times > limit)
    return far if far.size <= MAX_OUTLIER_SHARE * times.size else far[:0]


def find_change_point(times: Floats) -> tuple[int, float] | None:
    """Where step times change for good, and how sure: place of the first changed one, chance.

    Pettitt's statistic is the largest imbalance, over all splits, of how often a later step is
    longer than an earlier one; its chance is at most 2 exp(-6 K² / (n³ + n²)). For the first t
    steps the imbalance is t (n + 1) less twice the sum of their ranks, equal times sharing theirs.
    """
    n = times.size
    if n < 2:
        return None
    _, which, count = np.unique(times, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[which.reshape(-1)]
    balance = np.arange(1, n) * (n + 1) - 2 * np.cumsum(ranks)[:-1]
    place = int(np.argmax(np.abs(balance)))
    chance = 2 * math.exp(-6 * float(balance[place]) ** 2 / (n**3 + n**2))
    return (place + 1, min(1.0, chance)) if chance < CHANGE_SIGNIFICANCE else None
