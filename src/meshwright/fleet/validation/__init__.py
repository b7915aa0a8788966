"""Published statistics of clusters beside ours, computed from the traces of the same clusters."""

from meshwright.fleet.validation.comparison import (
    StatisticComparison,
    compare_statistics,
    compute_statistics,
)

__all__ = ["StatisticComparison", "compare_statistics", "compute_statistics"]
