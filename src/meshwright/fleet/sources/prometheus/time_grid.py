"""Series laid on one grid of times: a row for each GPU or node, a column for each moment.

A place without a sample is NaN, and stays so: nothing is carried over from the moment before.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.fleet.sources.prometheus.response import TimeSeries

Floats = npt.NDArray[np.float64]


class TimeGrid(NamedTuple):
    """Moments that are a step apart, the first and last included.

    All are multiples of the step, so that whoever asks again asks for the same moments.
    """

    start_s: float
    step_s: float
    num_points: int

    @property
    def end_s(self) -> float:
        """The last moment."""
        return self.start_s + (self.num_points - 1) * self.step_s

    def times(self) -> Floats:
        """All moments."""
        return self.start_s + self.step_s * np.arange(self.num_points, dtype=np.float64)

    def locate_samples(self, series: TimeSeries) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return where on the grid the samples of a series lie, and their values."""
        at = np.rint((series.time_s - self.start_s) / self.step_s).astype(np.int64)
        inside = (at >= 0) & (at < self.num_points)
        return at[inside], series.values[inside]


def split_grids(since_s: float, until_s: float, step_s: float, most: int) -> Iterable[TimeGrid]:
    """Cut the time after `since_s` and up to `until_s` into grids of at most so many moments."""
    first, last = int(np.floor(since_s / step_s)) + 1, int(np.floor(until_s / step_s))
    for begin in range(first, last + 1, most):
        yield TimeGrid(begin * step_s, step_s, min(most, last + 1 - begin))


def format_promql_range(step_s: float) -> str:
    """Return the stretch before a moment as PromQL writes it.

    A millisecond is left out: before version 3 a sample on the edge counted on either side of it.
    """
    return f"{max(1, round(1000 * step_s) - 1)}ms"


def average_rows(grid: TimeGrid, rows: int, found: Iterable[tuple[int, TimeSeries]]) -> Floats:
    """Lay series on rows of a grid; where several say something of a place, their mean is taken."""
    total = np.zeros((rows, grid.num_points))
    count = np.zeros((rows, grid.num_points), dtype=np.int32)
    for row, series in found:
        at, values = grid.locate_samples(series)
        known = ~np.isnan(values)
        total[row, at[known]] += values[known]
        count[row, at[known]] += 1
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def find_runs(times: Floats, gap_s: float) -> Sequence[tuple[float, float]]:
    """Return first and last of each run of times that are no further apart than a gap."""
    if not len(times):
        return []
    ordered = np.unique(times)
    cuts = np.flatnonzero(np.diff(ordered) > gap_s)
    firsts = ordered[np.concatenate(([0], cuts + 1))]
    lasts = ordered[np.concatenate((cuts, [len(ordered) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def pad_rows(values: Floats, rows: int) -> Floats:
    """Return values with as many rows as are wanted, the added ones unknown."""
    lacking = rows - len(values)
    return np.pad(values, ((0, lacking), (0, 0)), constant_values=np.nan) if lacking else values
