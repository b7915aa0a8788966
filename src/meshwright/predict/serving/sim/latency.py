"""Latencies of served requests: their names, how they are spread, what they are held to.

Simulated and measured runs are told in these same terms.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}
"""By the names that flags and files use."""
MAX_LATE_TOKEN_SHARE = 0.01
"""Share of its own gaps that a request may have above the objective's `itl`."""
PERCENTILES = (50, 90, 95, 99)

LatencySLO = Mapping[str, float]
"""The longest each latency may be, in seconds, by the names of `LATENCIES`."""


class LatencyStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a latency is spread, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def compute_latency_stats(values: Sequence[float] | npt.NDArray[np.float64]) -> LatencyStats | None:
    """Return how values are spread; None where there are none."""
    if not len(values):
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return LatencyStats(
        mean_s=float(np.mean(values)),
        p50_s=p50,
        p90_s=p90,
        p95_s=p95,
        p99_s=p99,
        max_s=float(np.max(values)),
    )
