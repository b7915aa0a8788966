"""Quantiles, means and shares of samples, and of curves that others made from theirs."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.fleet.columns import Floats


class CdfCurve(NamedTuple):
    """A cumulative distribution: of a `share` (0 to 1) of samples the value is at most `value`."""

    value: Floats
    share: Floats

    def quantile(self, share: float) -> float:
        """Return the smallest value that at least such a share of samples does not exceed.

        A curve of a thousand points is a list of values at even shares; between two of them
        nothing was seen, so that none is made up.
        """
        place = int(np.searchsorted(self.share, share - 1e-9, side="left"))
        return float(self.value[min(place, len(self.value) - 1)])

    def interpolate_quantile(self, share: float) -> float:
        """Return the value at a share, on the straight line between two points."""
        return float(np.interp(share, self.share, self.value))

    def cdf(self, value: float) -> float:
        """Return the share of samples that do not exceed a value."""
        place = int(np.searchsorted(self.value, value, side="right")) - 1
        return float(self.share[place]) if place >= 0 else 0.0

    def mean(self) -> float:
        """Return the mean of samples, each taken to have the value that its share ends at."""
        steps = np.diff(self.share, prepend=0.0)
        return float((steps * self.value).sum() / steps.sum())


def make_cdf(value: npt.ArrayLike, share: npt.ArrayLike) -> CdfCurve:
    """Make a curve from points in any order.

    Curves that were read off a figure fall back by a hair here and there, and begin where their
    line does: what lies below has the lowest value.
    """
    values, shares = np.asarray(value, dtype=np.float64), np.asarray(share, dtype=np.float64)
    order = np.lexsort((shares, values))
    values, shares = values[order], np.maximum.accumulate(shares[order])
    if len(shares) and shares[0] > 0:
        values, shares = np.append(values[0], values), np.append(0.0, shares)
    return CdfCurve(values, shares)


def estimate_cdf(samples: npt.ArrayLike, points: int = 1000) -> CdfCurve:
    """Make a curve of samples at even shares, as published ones are made; NaN does not count."""
    values = np.asarray(samples, dtype=np.float64)
    shares = np.linspace(0, 1, points)
    return CdfCurve(np.quantile(values[~np.isnan(values)], shares), shares)


def share_by_group(groups: npt.ArrayLike, weight: npt.ArrayLike | None = None) -> dict[str, float]:
    """Return which share of rows, or of their weight, each group has; largest first."""
    names, place = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    much = np.ones(len(place)) if weight is None else np.asarray(weight, dtype=np.float64)
    sums = np.bincount(place, weights=np.nan_to_num(much), minlength=len(names))
    whole = sums.sum()
    ordered = np.argsort(-sums, kind="stable")
    return {str(names[i]): float(sums[i] / whole) if whole else 0.0 for i in ordered}
