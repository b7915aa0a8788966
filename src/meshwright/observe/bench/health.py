"""Is a device as fast as its kind, and does it say itself that something is wrong?

Rows are held against the times of sound devices, group by group: the middle of all rows of a group
counts, because single shapes are predicted less well than a whole family. Only slowness is a fault.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from meshwright.observe.bench.case import Row

if TYPE_CHECKING:
    from meshwright.observe.bench.nvml import Gpu

ALARMS = frozenset({"hardware_slowdown", "hardware_thermal", "power_brake"})
"""Reasons for a low clock that no sound device has under load; a power limit is none."""
SCATTER = 0.04
"""How far sound devices of a kind lie apart: two H200 did by 2 to 4 % in their products."""
SAME_CASE, HOST_CASE = 0.02, 0.1
"""How far one case may be off the same case on a sound device, beside what devices differ by, where
that is what it is held against: of the device's own work, and of what hosts, disks and links do."""
MOST = 0.5
"""However far the samples of a case lie apart."""
_LINK = {"host_to_device": "link to the device", "device_to_host": "link to the host"}


class Check(NamedTuple):
    """One group of rows, beside sound devices."""

    what: str
    speed: float
    """Over that of sound devices, in the middle of the rows."""
    rows: int
    allowed: float
    """How much below 1 it may be."""
    worst: str
    """The case that is the furthest below."""

    @property
    def sound(self) -> bool:
        """Whether it is fast enough."""
        return self.speed >= 1.0 - self.allowed

    def words(self, whose: str) -> str:
        """Say it in one line, such as `memory 18 % below H200's`."""
        off = round(100 * abs(1.0 - self.speed))
        return f"{self.what} {off} % {'below' if self.speed < 1.0 else 'above'} {whose}"


def check(
    rows: Sequence[Row],
    expected_s: Mapping[str, float],
    doubts: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Check, ...]:
    """Hold rows against expected times, in the order in which their groups were measured.

    `doubts` says by group how far one expected time may be off by itself.
    """
    groups = defaultdict[str, list[tuple[float, Row]]](list)
    for row in rows:
        seconds = expected_s.get(row.case.key)
        if seconds and row.seconds:
            groups[group_of(row)].append((seconds / row.seconds, row))
    return tuple(
        _checked(what, found, doubts.get(what) or _same_case(found[0][1]))
        for what, found in groups.items()
    )


def _checked(what: str, found: Sequence[tuple[float, Row]], doubt: float) -> Check:
    # Whatever does not repeat itself better than that says less.
    noise = min(MOST, median(row.spread for _, row in found))
    speeds = [(speed, row.case.key) for speed, row in found]
    # Part of a doubt is common to all rows of a group; the middle of many evens out the rest.
    allowed = max(noise, SCATTER + doubt * (1.0 + 2.0 / sqrt(len(found))))
    return Check(what, median(speed for speed, _ in speeds), len(found), allowed, min(speeds)[1])


def _same_case(row: Row) -> float:
    inside = row.case.family == "copies" and row.case.name in ("copy", "fill")
    computed = row.case.family in ("products", "attention", "elementwise")
    return SAME_CASE if inside or computed else HOST_CASE


def group_of(row: Row) -> str:
    """Return what a row says something of."""
    case = row.case
    match case.family:
        case "products":
            return f"products {case.sizes.get('precision', 'grouped')}"
        case "copies":
            return _LINK.get(case.name, "memory" if case.name == "copy" else case.name)
        case "elementwise":
            return f"elementwise {case.sizes.get('kernel', case.name)}"
    return f"{case.family} {case.name}"


def usual(benches: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Return the median time of each case over benches of other devices, or of other days."""
    found = defaultdict[str, list[float]](list)
    for rows in benches:
        for row in rows:
            found[row.case.key].append(row.seconds)
    return {key: median(times) for key, times in found.items()}


def alarms(rows: Sequence[Row], gpu: "Gpu | None" = None) -> tuple[str, ...]:
    """Return what a device said of itself that no sound one says."""
    found = list[str]()
    for reason in sorted(ALARMS):
        seen = [row for row in rows if row.telemetry and reason in row.telemetry.throttle]
        if seen:
            cases = f"{len(seen)} of {len(rows)} cases"
            found.append(f"{reason} held the clock back during {cases}, first {seen[0].case.key}")
    if gpu is None:
        return tuple(found)
    errors, width = gpu.uncorrected_errors(), gpu.link_width()
    if errors:
        found.append(f"{errors:.0f} errors of the memory could not be corrected since it started")
    if width is not None and width[0] < width[1]:
        found.append(f"the link to the host has {width[0]:.0f} of {width[1]:.0f} lanes")
    return tuple(found)
