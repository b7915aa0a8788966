"""Statistics that a few odd values do not move, and tests that say how odd a value is."""

import math
from typing import NamedTuple

import numpy as np

from meshwright.fleet.columns import Flags, Floats, Ints

_NORMAL = 1.4826
"""The median distance from the median of normal noise, times this, is its standard deviation."""


def group_medians(values: Floats, groups: Ints, number: int) -> Floats:
    """Medians of groups; nan where nothing is known. Group -1 is left out."""
    medians = np.full(number, np.nan)
    known = ~np.isnan(values) & (groups >= 0)
    value, group = values[known], groups[known]
    if not value.size:
        return medians
    order = np.lexsort((value, group))
    value, group = value[order], group[order]
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    count = np.diff(np.append(first, group.size))
    middle = (value[first + (count - 1) // 2] + value[first + count // 2]) / 2
    medians[group[first]] = middle
    return medians


def robust_z_scores(values: Floats, groups: Ints, least_spread: Floats | float) -> Floats:
    """How many robust standard deviations each value is above the median of its group.

    The spread is never taken to be below `least_spread`: among values that agree to the last digit
    any difference would be infinitely odd.
    """
    number = max(int(groups.max(initial=-1)) + 1, 1)
    median = group_medians(values, groups, number)
    away = values - median[groups]
    spread = _NORMAL * group_medians(np.abs(away), groups, number)
    floor = np.broadcast_to(np.asarray(least_spread, dtype=np.float64), values.shape)
    scores: Floats = away / np.fmax(spread[groups], floor)
    scores[groups < 0] = np.nan
    return scores


def poisson_tail(count: Floats, expected: Floats) -> Floats:
    """Probability of so many events or more where so many are expected."""
    return np.array(
        [_tail(float(seen), float(mean)) for seen, mean in zip(count, expected, strict=True)]
    )


class CountOutliers(NamedTuple):
    """Which of many counts are improbably high."""

    is_outlier: Flags
    usual: float
    """The mean count of the calmer 95 %."""


def find_count_outliers(
    counts: Floats, population: int, *, false_discovery: float = 0.01, least: int = 4
) -> CountOutliers:
    """Find counts that are improbable against those of all others.

    `counts` are those that are not 0, `population` is how many there are in all. Chances are of
    Poisson's distribution, with the mean of the calmer 95 % and their overdispersion. Of those
    believed, `false_discovery` are false. Counts below `least` are never outliers.
    """
    population = max(population, counts.size)
    others = np.sort(np.concatenate([np.zeros(population - counts.size), counts]))
    calm = others[: max(1, int(0.95 * others.size))]
    usual = max(float(calm.mean()), 1.0 / population)
    spread = max(1.0, float(calm.var()) / usual)
    chance = poisson_tail(np.ceil(counts / spread), np.full(counts.size, usual / spread))
    padded = np.concatenate([chance, np.ones(population - counts.size)])
    believed = control_false_discovery(padded, false_discovery)[: counts.size]
    return CountOutliers(believed & (counts >= least), usual)


def _tail(seen: float, mean: float) -> float:
    """1 - sum of the terms below, or the sum of those above where that would cancel."""
    if seen <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    first = math.ceil(seen)
    term = math.exp(-mean + first * math.log(mean) - math.lgamma(first + 1))
    total, at = term, first
    while term > total * 1e-12 and at < first + 10_000:
        at += 1
        term *= mean / at
        total += term
    return min(1.0, total)


def control_false_discovery(chances: Floats, rate: float) -> Flags:
    """Which of many tests to believe so that of those believed `rate` are false.

    The step-up rule of Benjamini and Hochberg (1995).
    """
    if not chances.size:
        return np.zeros(0, dtype=np.bool_)
    order = np.argsort(chances)
    below = chances[order] <= rate * np.arange(1, chances.size + 1) / chances.size
    last = int(np.flatnonzero(below).max(initial=-1))
    believed = np.zeros(chances.size, dtype=np.bool_)
    believed[order[: last + 1]] = True
    return believed
