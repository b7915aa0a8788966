"""Exact integer times and GPU amounts; sums of rates per bin of time."""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.errors import InputError, Problem

Ints = npt.NDArray[np.int64]

Floats = npt.NDArray[np.float64]

Flags = npt.NDArray[np.bool_]

PARTS_PER_GPU: Final = 840
"""Parts of a GPU."""

MS_PER_S: Final = 1000

PART_MS_PER_GPU_HOUR: Final = PARTS_PER_GPU * MS_PER_S * 3600
"""A GPU-hour."""

UNKNOWN_TIME: Final = np.int64(-(2**62))
"""A time that no source gives."""

_FIRST_S, _LAST_S = -1e11, 1e11

_MOST_GPUS = 1e7


class TickWindow(NamedTuple):
    """A stretch of time, its end not in it."""

    since_ms: int
    """Milliseconds since 1970."""
    until_ms: int

    @property
    def duration_ms(self) -> int:
        """How long it is, in ms."""
        return self.until_ms - self.since_ms


def make_window(since_s: float, until_s: float) -> TickWindow:
    """Make a window of seconds since 1970, or say why not."""
    if not (_FIRST_S < since_s < until_s < _LAST_S):
        what = f"{since_s:.0f} to {until_s:.0f} is no stretch of time"
        raise InputError([Problem("window", what, "let it begin before it ends")])
    return TickWindow(round(since_s * MS_PER_S), round(until_s * MS_PER_S))


def to_ticks(column: pa.ChunkedArray) -> Ints:
    """Return seconds as milliseconds; null, NaN and what no clock shows as UNKNOWN_TIME."""
    values = np.asarray(column.to_numpy(), np.float64)
    known = np.isfinite(values) & (values > _FIRST_S) & (values < _LAST_S)
    found: Ints = np.where(
        known, np.rint(np.where(known, values, 0.0) * MS_PER_S), UNKNOWN_TIME
    ).astype(np.int64)
    return found


def to_gpu_parts(values: Floats) -> Ints:
    """Return GPUs as parts; what is null, negative or beyond all clusters as 0."""
    known = np.isfinite(values) & (values > 0) & (values < _MOST_GPUS)
    found: Ints = np.rint(np.where(known, values, 0.0) * PARTS_PER_GPU).astype(np.int64)
    return found


def split_amount(total: int, weights: npt.NDArray[np.floating[Any]]) -> list[int]:
    """Split a whole number by weights so that the parts make up the whole, none of them negative.

    Without weight at all the last one gets everything.
    """
    heavy = np.clip(np.nan_to_num(np.asarray(weights, np.float64)), 0.0, None)
    whole = float(heavy.sum())
    if whole <= 0:
        return [0] * (len(heavy) - 1) + [total]
    reached = [min(total, int(total * part)) for part in np.cumsum(heavy) / whole]
    reached[-1] = total
    return [now - before for now, before in zip(reached, [0, *reached[:-1]], strict=True)]


def round_down(amounts: Floats, most: Ints) -> Ints:
    """Return amounts as whole numbers of at most so much each."""
    return np.clip(np.floor(amounts + 1e-6).astype(np.int64), 0, most)


_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)

_MOST_BINS = 3000


def choose_bin_ms(span_ms: int, rows: int) -> int:
    """Choose how long a bin is, for so many rows of bins."""
    most = min(_MOST_BINS, max(24, 600_000 // max(1, rows)))
    for step in _STEPS_S:
        if span_ms <= most * step * 1000:
            return step * 1000
    return -(-span_ms // most)


def sum_rates_per_bin(
    start: Ints, end: Ints, rate: Floats, width: int, bins: int, *, row: Ints | None = None,
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
