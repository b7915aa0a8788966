"""Whole numbers for time and GPUs, so that sums are exact whatever their order.

Time counts in milliseconds, GPUs in 840ths: halves, thirds, quarters, sevenths (the slices of MIG)
and eighths of a GPU are whole numbers of these. 64 bits hold 340,000 GPUs for a year.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshwright.errors import InputError, Problem

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PARTS: Final = 840
"""Parts of a GPU."""
MS: Final = 1000
HOUR: Final = PARTS * MS * 3600
"""A GPU-hour."""
NEVER: Final = np.int64(-(2**62))
"""A moment nobody tells."""
_FIRST_S, _LAST_S = -1e11, 1e11
_MOST_GPUS = 1e7


class Window(NamedTuple):
    """A stretch of time, its end not in it."""

    since: int
    """Milliseconds since 1970."""
    until: int

    @property
    def span(self) -> int:
        """How long it is, in ms."""
        return self.until - self.since


def window(since_s: float, until_s: float) -> Window:
    """Make a window of seconds since 1970, or say why not."""
    if not (_FIRST_S < since_s < until_s < _LAST_S):
        what = f"{since_s:.0f} to {until_s:.0f} is no stretch of time"
        raise InputError([Problem("window", what, "let it begin before it ends")])
    return Window(round(since_s * MS), round(until_s * MS))


def moments(column: pa.ChunkedArray) -> Longs:
    """Return seconds as milliseconds; null, NaN and what no clock shows as NEVER."""
    values = np.asarray(column.to_numpy(), np.float64)
    known = np.isfinite(values) & (values > _FIRST_S) & (values < _LAST_S)
    found: Longs = np.where(known, np.rint(np.where(known, values, 0.0) * MS), NEVER).astype(
        np.int64
    )
    return found


def gpu_parts(values: Floats) -> Longs:
    """Return GPUs as parts; what is null, negative or beyond all clusters as 0."""
    known = np.isfinite(values) & (values > 0) & (values < _MOST_GPUS)
    found: Longs = np.rint(np.where(known, values, 0.0) * PARTS).astype(np.int64)
    return found


def numbers(column: pa.ChunkedArray) -> Floats:
    """Return a column of numbers with NaN for null."""
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)


class Names(NamedTuple):
    """A column of text as numbers."""

    codes: Longs
    """-1 where it is null."""
    values: tuple[str, ...]


def names(column: pa.ChunkedArray) -> Names:
    """Number the texts of a column in the order they come."""
    encoded: Any = column.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # an empty one keeps its chunks
        encoded = pa.concat_arrays(encoded.chunks) if encoded.num_chunks else pa.array([], "string")
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return Names(codes, tuple(encoded.dictionary.to_pylist()))


def joined(first: Longs, second: Longs, second_size: int) -> Longs:
    """Return one number for two; -1 in the second counts as a value of its own."""
    return first * (second_size + 1) + second + 1


def spread(total: int, weights: npt.NDArray[np.floating[Any]]) -> list[int]:
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


def floored(amounts: Floats, most: Longs) -> Longs:
    """Return amounts as whole numbers of at most so much each."""
    return np.clip(np.floor(amounts + 1e-6).astype(np.int64), 0, most)
