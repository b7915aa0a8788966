"""Times written as text, whole columns at once: ISO 8601 and what comes near it, or plain seconds.

Years come first: `01/11/2026` may be November or January, so that it is no time here. A time says
its zone itself (`+08:00`, `Z`, `PDT`), or is of the zone that the caller names.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.fleet.columns import Flags, Floats

_TZDATA = "install the system's tzdata, or the Python package of that name"
_ZONE_HOURS: Final = {
    "PDT": -7, "PST": -8, "MDT": -6, "MST": -7, "EDT": -4, "EST": -5, "UTC": 0, "GMT": 0, "Z": 0,
    "z": 0, "CET": 1, "CEST": 2, "JST": 9, "KST": 9,
}  # fmt: skip
"""Names of zones that mean one thing; CST, IST and BST mean several."""
_OFFSET = re.compile(r"^([+-])(\d\d):?(\d\d)?(?::?00)?$")
_MAX_OFFSET_S: Final = 15 * 3600.0
_BEGIN: Final = 19
"""Letters of `2023-03-01 00:18:22`, behind which fractions and zones follow."""
_PLAIN: Final = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_PADDED: Final = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
_LOOSE: Final = re.compile(
    r"^(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?:[ T]+(\d{1,2}):(\d\d)(?::(\d\d))?(?!\d)(.*))?$"
)
_COMPACT_DAY: Final = r"^(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$"


class ParsedTimes(NamedTuple):
    """A column of times."""

    moments_s: Floats
    """Seconds since 1970; NaN where there is none, or none that can be read."""
    without_zone: Flags
    """Which of them are dates that do not say their zone."""

    @property
    def is_known(self) -> Flags:
        """Which of them could be read."""
        return np.isfinite(self.moments_s)


def parse_zone(zone: str) -> ZoneInfo:
    """Return a time zone by its name, or say that it is none."""
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        if zone in ("UTC", "Asia/Shanghai", "America/Los_Angeles"):
            what = f"this machine does not know the time zone {zone}"
            raise MissingDependency(what, _TZDATA) from None
        what, fix = f"{zone!r} is no time zone", "write one such as Europe/Berlin, or UTC"
        raise InputError([Problem("zone", what, fix)]) from error


def parse_times(column: pa.Array, zone: str = "UTC", scale: float = 1.0) -> ParsedTimes:
    """Read a column of text; plain numbers are so many times `scale` seconds."""
    text = pc.utf8_trim_whitespace(column)
    plain = pc.match_substring_regex(text, _PLAIN)
    if not pc.any(pc.invert(plain)).as_py():
        return ParsedTimes(_drop_compact_days(text) * scale, np.zeros(len(text), dtype=np.bool_))
    seconds = _floats(pc.if_else(plain, text, pa.scalar(None, pa.string())).cast(pa.float64()))
    written = _normalize(pc.if_else(plain, pa.scalar(None, pa.string()), text))
    naive_s = _parse_clock(pc.utf8_slice_codeunits(written, 0, _BEGIN))
    fraction_s, offset_s, named = _parse_rests(pc.utf8_slice_codeunits(written, _BEGIN))
    without_zone = np.isfinite(naive_s) & ~named
    if without_zone.any():
        offset_s = np.where(without_zone, _find_offsets(naive_s, zone), offset_s)
    moments_s = naive_s + fraction_s - offset_s
    return ParsedTimes(np.where(np.isnan(seconds), moments_s, seconds * scale), without_zone)


def _drop_compact_days(text: pa.Array) -> Floats:
    """Return plain numbers; where all are days such as 20261101 they are no seconds."""
    seconds = _floats(text.cast(pa.float64()))
    days = pc.fill_null(pc.match_substring_regex(text, _COMPACT_DAY), True)
    if len(text) > 1 and not np.isnan(seconds).all() and pc.all(days).as_py():
        return np.full(len(seconds), np.nan)
    return seconds


def _normalize(text: pa.Array) -> pa.Array:
    """Write times as `2023-03-01 00:18:22`, with what follows."""
    text = pc.replace_substring_regex(
        text, r"^(\d{4})[-/](\d\d)[-/](\d\d)(?:[T ](.*))?$", r"\1-\2-\3 \4"
    )
    text = pc.replace_substring_regex(text, r"^(.{10}) (\d\d:\d\d)($|[^:\d])", r"\1 \2:00\3")
    text = pc.replace_substring_regex(text, r"^(\d{4}-\d\d-\d\d) $", r"\1 00:00:00")
    odd = pc.fill_null(pc.invert(pc.match_substring_regex(text, _PADDED)), False)
    if not pc.any(odd).as_py():
        return text
    unlike = pc.filter(text, odd).dictionary_encode()
    padded = pa.array([_pad(word) for word in unlike.dictionary.to_pylist()], pa.string())
    return pc.replace_with_mask(text, odd, padded.take(unlike.indices))


def _pad(word: str) -> str | None:
    """Return a time whose month, day or hour has one digit with two; None: it is no time."""
    found = _LOOSE.match(word)
    if found is None:
        return None
    year, month, day, hour, minute, second, rest = found.groups(default="")
    clock = f"{int(hour or 0):02}:{int(minute or 0):02}:{int(second or 0):02}"
    return f"{year}-{int(month):02}-{int(day):02} {clock}{rest}"


def _parse_clock(begin: pa.Array) -> Floats:
    """Read `2023-03-01 00:18:22` as if it were UTC; NaN for days that no calendar has."""
    try:
        return _floats(begin.cast(pa.timestamp("s")).cast(pa.int64()))
    except pa.ArrowInvalid:
        encoded = begin.dictionary_encode()
        moments = [_parse_one_clock(word) for word in encoded.dictionary.to_pylist()]
        return _floats(pa.array(moments, pa.float64()).take(encoded.indices))


def _parse_one_clock(word: str) -> float | None:
    try:
        return datetime.strptime(word, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _parse_rests(rests: pa.Array) -> tuple[Floats, Floats, Flags]:
    """Read what follows the clock: a fraction, an offset, and whether there is a zone at all."""
    encoded = rests.dictionary_encode()
    told = [_parse_rest(word) for word in encoded.dictionary.to_pylist()] or [(0.0, None)]
    place = _floats(encoded.indices)
    index = np.where(np.isnan(place), 0, place).astype(np.int64)
    fraction_s = np.array([one[0] for one in told])[index]
    named = np.array([one[1] is not None for one in told], dtype=np.bool_)[index]
    offset_s = np.array([one[1] or 0.0 for one in told])[index]
    return fraction_s, offset_s, named


def _parse_rest(word: str) -> tuple[float, float | None]:
    """Return the fraction of a second and the offset; NaN in place of what cannot be read."""
    digits = re.match(r"^[.,](\d+)", word)
    fraction_s = float(f"0.{digits[1]}") if digits else 0.0
    zone = word[digits.end() :].strip() if digits else word.strip()
    if not zone:
        return fraction_s, None
    if zone in _ZONE_HOURS:
        return fraction_s, _ZONE_HOURS[zone] * 3600.0
    found = _OFFSET.match(zone)
    if found is None:
        return float("nan"), 0.0
    ahead_s = int(found[2]) * 3600.0 + int(found[3] or 0) * 60.0
    if ahead_s > _MAX_OFFSET_S:
        return float("nan"), 0.0
    return fraction_s, ahead_s if found[1] == "+" else -ahead_s


def _find_offsets(naive_s: Floats, zone: str) -> Floats:
    """Return by how many seconds a zone is ahead of UTC at times that were read off its clocks."""
    if zone == "UTC":
        return np.zeros(len(naive_s))
    home = parse_zone(zone)
    hours, place = np.unique(np.floor_divide(np.nan_to_num(naive_s), 3600), return_inverse=True)
    shifts = [
        (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)).replace(tzinfo=home).utcoffset()
        or timedelta()
        for hour in hours.tolist()
    ]
    return np.array([shift.total_seconds() for shift in shifts])[place]


def _floats(column: pa.Array) -> Floats:
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
