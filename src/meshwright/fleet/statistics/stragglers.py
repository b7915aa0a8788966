"""Who is slower than those that do the same work, and since when.

Workers of a synchronous job wait for the slowest. A worker's time is held against the median of all
workers in the same window of time, so that a step that is long for all counts against none.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.fleet.columns import Floats, Ints
from meshwright.fleet.statistics.robust import group_medians


class RelativePace(NamedTuple):
    """How workers compare, window by window."""

    workers: Ints
    start_s: Floats
    end_s: Floats
    ratio: Floats
    """Windows × workers: median time over the median of all workers' medians; NaN: no sample."""

    @property
    def median_pace(self) -> Floats:
        """How each worker compares most of the time: its median over windows."""
        return np.nanmedian(self.ratio, axis=0)


class SlowWindow(NamedTuple):
    """A window in which a worker was slow."""

    worker: int
    window_index: int
    start_s: float
    end_s: float
    ratio_to_peers: float
    """Against its peers."""
    ratio_to_own_median: float
    """Against its own usual pace among them; 1.0: it is always so."""


def compare_pace(
    worker: npt.ArrayLike, time_s: npt.ArrayLike, duration: npt.ArrayLike, windows: int = 20
) -> RelativePace:
    """Compare workers in equal windows of time."""
    at, took = np.asarray(time_s, dtype=np.float64), np.asarray(duration, dtype=np.float64)
    known = ~np.isnan(took)
    at, took = at[known], took[known]
    names, column = np.unique(np.asarray(worker, dtype=np.int64)[known], return_inverse=True)
    if not len(at):
        nothing = np.zeros(0)
        return RelativePace(names, nothing, nothing, np.zeros((0, 0)))
    edges = np.linspace(at.min(), at.max(), windows + 1)
    row = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, windows - 1)
    medians = group_medians(took, row * len(names) + column, windows * len(names))
    medians = medians.reshape(windows, len(names))
    with np.errstate(invalid="ignore", divide="ignore"):
        peers = np.array([np.nanmedian(line) if (~np.isnan(line)).any() else np.nan
                          for line in medians])  # fmt: skip
        ratio = medians / peers[:, None]
    return RelativePace(names, edges[:-1], edges[1:], ratio)


def find_stragglers(
    found: RelativePace, *, slower: float = 1.1, changed: float = 1.1
) -> tuple[SlowWindow, ...]:
    """Find windows in which a worker is slower than its peers and than it usually is.

    A worker that is always slower by the same factor has other work or another GPU; one that
    becomes slower has a fault. With `changed=0` both are found.
    """
    if not found.ratio.size:
        return ()
    change = found.ratio / found.median_pace
    rows, columns = np.nonzero((found.ratio >= slower) & (change >= changed))
    return tuple(
        SlowWindow(
            int(found.workers[column]),
            int(row),
            float(found.start_s[row]),
            float(found.end_s[row]),
            float(found.ratio[row, column]),
            float(change[row, column]),
        )
        for row, column in zip(rows, columns, strict=True)
    )
