"""Times of a trace, in microseconds with digits behind the point, as exact nanoseconds.

Kineto counts from the last quarter of a year, so that a float holds every nanosecond; older and
other writers count from 1970, and a float of that many microseconds does not.
"""

import re
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
MAX_TIMESTAMP_NS = 2**61
"""Times beyond it, 73 years from the trace's own zero, are no times."""
_EXACT_US = float(2**43)
"""Below, a float of microseconds tells apart thousandths: one unit in its last place is 2^-10."""
_LARGEST_US = MAX_TIMESTAMP_NS // 1000
_POINT, _COMMA = 0x2E, 0x2C


def microseconds_to_ns(values: list[Any]) -> Ints | None:
    """Numbers of microseconds as nanoseconds; None where a float has lost some."""
    try:
        whole = np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        numbers = np.fromiter(values, np.float64, len(values))
        if numbers.size and not np.abs(numbers).max() < _EXACT_US:
            return None
        # A product with 1000 would round a second time: the parts before and behind the point
        # are exact each.
        whole_us = np.floor(numbers)
        numbers -= whole_us
        numbers *= 1000
        return whole_us.astype(np.int64) * 1000 + np.rint(numbers, out=numbers).astype(np.int64)
    if whole.size and max(-int(whole.min()), int(whole.max())) > _LARGEST_US:
        return None
    return whole * 1000


def texts_to_ns(texts: list[Any]) -> Ints | None:
    """Texts of microseconds as nanoseconds; None where one is no plain number."""
    if not texts:
        return np.empty(0, dtype=np.int64)
    joined = b",".join(texts)
    letters = np.frombuffer(joined, np.uint8)
    points = np.flatnonzero(letters == _POINT)
    ends = np.append(np.flatnonzero(letters == _COMMA), len(joined))
    if joined.translate(None, b"0123456789.,-"):
        return _one_by_one(texts)
    if not points.size:
        scale = 1000
    elif len(points) == len(ends) and (ends - points == 4).all():
        joined, scale = joined.replace(b".", b""), 1
    else:
        return _one_by_one(texts)
    if int((ends - np.append(0, ends[:-1] + 1)).max()) > 19:
        return _one_by_one(texts)
    times: Ints = np.fromstring(joined.decode(), dtype=np.int64, sep=",")
    if np.abs(times).max() > MAX_TIMESTAMP_NS // scale:
        return None
    return times * scale


def _one_by_one(texts: list[Any]) -> Ints | None:
    times = [parse_ns(bytes(text)) for text in texts]
    if any(time is None or abs(time) > MAX_TIMESTAMP_NS for time in times):
        return None
    return np.array(times, dtype=np.int64)


def to_integer_array(values: list[Any], least: int = -1) -> Ints:
    """Integers as an array; -1 where one does not fit."""
    try:
        return np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        return np.array([v if least <= v < 2**63 else -1 for v in values], dtype=np.int64)


_PLAIN = re.compile(rb'"?(-?)(\d+)(?:\.(\d{1,3}))?"?')


def parse_ns(text: bytes) -> int | None:
    """Read microseconds, with digits behind the point or as a string, as whole nanoseconds."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None and len(plain[2]) < 20:
        value = int(plain[2]) * 1000 + int((plain[3] or b"0").ljust(3, b"0"))
        return -value if plain[1] else value
    from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation

    try:
        exact = Decimal(text.strip(b' "').decode(errors="replace"))
        if not exact.is_finite() or exact.adjusted() > 18:
            return None
        return int((exact * 1000).to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, ValueError):
        return None
