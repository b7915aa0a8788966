"""Where, within one job, the level of a series changed for good.

The sum of what a series is above its mean rises to the moment of a change and falls after it (or
the other way round): the place where it is farthest from nought is the change, and how far it is,
measured in what noise would make of it, says whether to believe it (CUSUM, Page 1954).
"""

import numpy as np

from meshwright.fleet.patterns.data.group_math import Floats, Ints, mean_where, slice_sums

CHANGE_COLUMNS = ("just_before", "just_after", "before", "after", "changed_s", "change_score")


def find_change_point(
    values: Floats, time: Floats, owner: Ints, *, low: Ints, high: Ints, step: float
) -> dict[str, Floats]:
    """Of each slice: means before and after its greatest change, when it was, how certain it is.

    `just_before` and `just_after` are those of half an hour on each side: what falls slowly, as a
    server does towards the night, falls little there.
    """
    if not low.size:
        return {name: np.zeros(0) for name in CHANGE_COLUMNS}
    known = (owner >= 0) & ~np.isnan(values)
    mean = mean_where(values, None, low, high)
    away = np.where(known, values - mean[np.maximum(owner, 0)], 0.0)
    run = np.cumsum(away)
    base = np.where(low > 0, run[np.maximum(low - 1, 0)], 0.0)
    far = np.where(known, np.abs(run - base[np.maximum(owner, 0)]), -1.0)
    most = np.full(low.size, -1.0)
    np.maximum.at(most, owner[known], far[known])
    # The first sample that is as far as the farthest of its slice.
    there = np.flatnonzero(known & (far >= most[np.maximum(owner, 0)]))
    place = np.full(low.size, 0, dtype=np.int64)
    place[owner[there][::-1]] = there[::-1]
    split = np.clip(place + 1, low, high)
    apart = np.abs(np.diff(values, prepend=np.nan))
    apart[np.append(True, owner[1:] != owner[:-1])] = np.nan
    # Of normal noise the mean distance of neighbours is 2/√π standard deviations.
    noise = mean_where(apart, None, low, high) * np.sqrt(np.pi) / 2
    count = slice_sums(known, low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = most / (np.maximum(noise, 1e-4) * np.sqrt(count))
    near = max(1, round(1800 / step))
    return {
        "just_before": mean_where(values, None, np.maximum(split - near, low), split),
        "just_after": mean_where(values, None, split, np.minimum(split + near, high)),
        "before": mean_where(values, None, low, split),
        "after": mean_where(values, None, split, high),
        "changed_s": time[np.minimum(split, time.size - 1)],
        "change_score": score,
    }
