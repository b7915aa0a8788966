"""Sums, means and maxima of slices and groups of rows, without a loop."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def _reduced(ufunc: np.ufunc, values: npt.NDArray[Any], low: Ints, high: Ints, kind: Any) -> Floats:
    """Reduce `values[low:high]`; the answer for an empty slice means nothing."""
    if not low.size:
        return np.zeros(0)
    pairs = np.stack([low, np.maximum(high, low)], axis=1).ravel()
    # A slice may end where the array does, where no other may begin.
    padded = np.append(values, values[-1:] if values.size else np.zeros(1, values.dtype))
    found: Floats = ufunc.reduceat(padded, pairs, dtype=kind)[::2].astype(np.float64)
    return found


def slice_sums(values: npt.NDArray[Any], low: Ints, high: Ints) -> Floats:
    """Sums of `values[low:high]`, numbers or flags; no nan may be among them."""
    kind = np.int64 if values.dtype == np.bool_ else np.float64
    return np.where(high > low, _reduced(np.add, values, low, high, kind), 0.0)


def slice_max(values: Floats, low: Ints, high: Ints) -> Floats:
    """The largest of `values[low:high]`; nan where there is none."""
    return np.where(high > low, _reduced(np.fmax, values, low, high, None), np.nan)


def mean_where(values: Floats, which: Flags | None, low: Ints, high: Ints) -> Floats:
    """Means of `values[low:high]` over rows that are chosen and known; nan where there is none."""
    known = ~np.isnan(values)
    if which is not None:
        known &= which
    count = slice_sums(known, low, high)
    sums = slice_sums(np.where(known, values, 0.0), low, high)
    means: Floats = np.divide(sums, count, out=np.full(count.size, np.nan), where=count > 0)
    return means


def group_means(values: Floats, groups: Ints, number: int, weights: Floats | None = None) -> Floats:
    """Weighted means of groups over what is known; nan where nothing is."""
    weight = np.ones(values.size) if weights is None else weights
    known = ~np.isnan(values) & (groups >= 0)
    sums = np.bincount(groups[known], values[known] * weight[known], minlength=number)
    total = np.bincount(groups[known], weight[known], minlength=number)
    means: Floats = np.divide(sums, total, out=np.full(number, np.nan), where=total > 0)
    return means


def group_max(values: Floats, groups: Ints, number: int) -> Floats:
    """The largest of each group; nan where nothing is known."""
    most = np.full(number, -np.inf)
    known = ~np.isnan(values) & (groups >= 0)
    np.maximum.at(most, groups[known], values[known])
    return np.where(np.isfinite(most), most, np.nan)


def group_sums(values: Floats, groups: Ints, number: int) -> Floats:
    """The sum of each group over what is known."""
    known = ~np.isnan(values) & (groups >= 0)
    return np.bincount(groups[known], values[known], minlength=number).astype(np.float64)


def split_groups(codes: Ints, order: Ints, least: int) -> Iterator[Ints]:
    """Rows of each group of at least so many, in order of time."""
    rows = order[codes[order] >= 0]
    rows = rows[np.argsort(codes[rows], kind="stable")]
    starts = np.flatnonzero(np.append(True, codes[rows][1:] != codes[rows][:-1]))
    ends = np.append(starts[1:], rows.size)
    if rows.size:
        for at in np.flatnonzero(ends - starts >= least).tolist():
            yield rows[starts[at] : ends[at]]
