"""Local times as Slurm prints them, to seconds since 1970, whole columns at once.

`sacct` prints the time of the zone it ran in, without saying which. In the hour that comes twice
when clocks go back, what a job took tells which of the two was meant.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.sources.time_text import parse_times, parse_zone

_ISO: Final = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d$"
_EPOCH: Final = r"^\d{9,11}$"
_PLACEHOLDER: Final = r"^\s*(?:Unknown|None|N/A|NONE|\(null\))?\s*$"
Floats = npt.NDArray[np.float64]


def require_zone(zone: str) -> str:
    """Return the name of a time zone, or say that it is none."""
    parse_zone(zone)
    return zone


class LocalTimes:
    """A column of times, each with the two moments it may mean; NaN: not told."""

    def __init__(self, text: pa.ChunkedArray | pa.Array, zone: str) -> None:
        iso = pc.match_substring_regex(text, _ISO)
        nothing = pa.scalar(None, pa.string())
        local = _cast_days(pc.if_else(iso, text, nothing))
        self.earliest = _moments(local, zone, "earliest")
        self.latest = self.earliest if zone == "UTC" else _moments(local, zone, "latest")
        others = pc.filter(text, pc.invert(iso))
        known = pc.match_substring_regex(text, f"{_EPOCH}|{_PLACEHOLDER}")
        known = pc.or_(pc.fill_null(known, True), pc.is_valid(local))
        self.unread = np.array(pc.invert(known))
        """Which of them are text that is no time."""
        if pc.any(pc.match_substring_regex(others, _EPOCH)).as_py():  # SLURM_TIME_FORMAT=%s
            epoch = pc.match_substring_regex(text, _EPOCH)
            plain = _floats(pc.cast(pc.if_else(epoch, text, nothing), pa.float64()))
            self.earliest = np.where(np.isnan(self.earliest), plain, self.earliest)
            self.latest = np.where(np.isnan(self.latest), plain, self.latest)


def _cast_days(text: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return local times; null for days that no calendar has."""
    try:
        return pc.cast(text, pa.timestamp("s"))
    except pa.ArrowInvalid:
        seconds = parse_times(text.combine_chunks() if hasattr(text, "chunks") else text).moments_s
        known = pa.array(seconds, from_pandas=True)
        return pc.cast(pc.cast(known, pa.int64()), pa.timestamp("s"))


def resolve_dst(
    submit: LocalTimes, eligible: LocalTimes, start: LocalTimes, end: LocalTimes, elapsed_s: Floats,
) -> tuple[Floats, Floats, Floats, Floats]:  # fmt: skip
    """Decide for each job which moments were meant.

    Of start and end the pair counts whose distance is nearest to what Slurm says passed between
    them; submission and eligibility come before the start, and are the first moment otherwise.
    """
    began, ended = start.earliest.copy(), end.earliest.copy()
    miss = np.full(len(began), np.inf)
    for one in (start.earliest, start.latest):
        for other in (end.earliest, end.latest):
            with np.errstate(invalid="ignore"):
                off = np.abs(other - one - elapsed_s)
                off = np.where(np.isnan(off), np.where(other < one, 1e9, 0.0), off)
                better = off < miss
            began, ended = np.where(better, one, began), np.where(better, other, ended)
            miss = np.where(better, off, miss)
    return _before(submit, began), _before(eligible, began), began, ended


def _before(moments: LocalTimes, limit: Floats) -> Floats:
    """Return the first moment; it cannot lie after the limit where the other does not."""
    with np.errstate(invalid="ignore"):
        return np.where(
            moments.earliest > limit, np.minimum(moments.earliest, moments.latest), moments.earliest
        )


def _moments(local: pa.ChunkedArray, zone: str, which: str) -> Floats:
    there = pc.assume_timezone(local, zone, ambiguous=which, nonexistent="earliest")
    return _floats(pc.cast(pc.cast(there, pa.int64()), pa.float64()))


def _floats(column: pa.ChunkedArray | pa.Array) -> Floats:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    values: Floats = np.array(pc.fill_null(column, float("nan")), dtype=np.float64)
    return values
