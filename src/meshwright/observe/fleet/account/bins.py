"""Sums of rates over equal stretches of time, without a loop over what is summed."""

import numpy as np

from meshwright.observe.fleet.account.ticks import Floats, Longs

_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_MOST_BINS = 3000


def width_ms(span_ms: int, rows: int) -> int:
    """Choose how long a bin is, for so many rows of bins."""
    most = min(_MOST_BINS, max(24, 600_000 // max(1, rows)))
    for step in _STEPS_S:
        if span_ms <= most * step * 1000:
            return step * 1000
    return -(-span_ms // most)


def binned(
    start: Longs, end: Longs, rate: Floats, width: int, bins: int, *, row: Longs | None = None,
    rows: int = 1,
) -> Floats:  # fmt: skip
    """Return rate times time in each bin, for each row of bins.

    With R(t) the sum of rates that began by t, the integral up to an edge is the sum over those
    that began of rate · (edge − start), less the same of those that ended.
    """
    row = np.zeros(len(start), np.int64) if row is None else row
    stride = bins + 2
    sums = np.zeros(rows * stride)
    moments = np.zeros(rows * stride)
    for times, sign in ((start, 1.0), (end, -1.0)):
        place = row * stride + np.clip(-(-times // width), 0, bins + 1)
        signed = sign * rate
        sums += np.bincount(place, signed, rows * stride)
        moments += np.bincount(place, signed * times, rows * stride)
    edges = np.arange(stride) * float(width)
    begun = np.cumsum(sums.reshape(rows, stride), axis=1)
    reached = begun * edges - np.cumsum(moments.reshape(rows, stride), axis=1)
    found: Floats = np.diff(reached[:, : bins + 1], axis=1)
    return np.clip(found, 0.0, None)
