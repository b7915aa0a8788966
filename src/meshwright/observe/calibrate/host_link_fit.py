"""The link between a GPU and its host, from copies of pinned memory one way and both ways.

    t = start + bytes of one way × (1 + crossing where both run) / (share × wire speed)

Copies of pageable memory go through buffers of the driver's and say little of the link.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.calibrate.fit_score import FitScore, score_predictions
from meshwright.observe.calibrate.least_squares import fit_log_constants
from meshwright.predict.cost.curves import LinkCurve

Array = Any

BOTH = "both_ways"
_NAMES = ("host_to_device", "device_to_host", BOTH)
_START_S = (1e-5, 1e-7, 1e-3)
_SHARE = (0.8, 1e-3, 1.0)
_CROSSING = (0.2, 1e-3, 1.0)
_LEAST_ROWS = 3


class HostLinkFit(NamedTuple):
    """What was made of copies across the link."""

    curve: LinkCurve
    in_sample: FitScore
    """On the rows that were fitted."""


def fit_host_link(
    rows: Sequence[BenchRow], wire_bytes_per_s: float | None, source: str
) -> HostLinkFit | None:
    """Fit share and crossing; None without a wire speed, or without copies both ways."""
    mine = [
        row
        for row in rows
        if row.case.family == "memory_copies"
        and row.case.name in _NAMES
        and row.case.sizes.get("memory") == "pinned"
        and row.bytes
    ]
    both = np.array([row.case.name == BOTH for row in mine])
    if wire_bytes_per_s is None or len(mine) < _LEAST_ROWS or both.all() or not both.any():
        return None
    moved = np.array([row.bytes for row in mine], dtype=float) / np.where(both, 2.0, 1.0)

    def seconds(values: Array) -> Array:
        start_s, share, crossing = values
        return start_s + moved * (1.0 + crossing * both) / (share * wire_bytes_per_s)

    free = [_START_S, _SHARE, _CROSSING]
    found, _ = fit_log_constants(seconds, [row.median_s for row in mine], free)
    _, share, crossing = (float(f"{value:.4g}") for value in found)
    curve = LinkCurve(share=share, crossing=crossing, source=source)
    return HostLinkFit(curve, score_predictions(mine, seconds(found)))
