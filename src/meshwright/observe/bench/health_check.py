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

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.hardware.hardware_sample import format_throttle_reason

if TYPE_CHECKING:
    from meshwright.observe.hardware.nvml import NvmlDevice

FAULT_THROTTLE_REASONS = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
"""Reasons for a low clock that no sound device has under load; a power limit is none."""
DEVICE_VARIATION = 0.04
"""How far sound devices of a kind lie apart: two H200 did by 2 to 4 % in their products."""
SAME_CASE_TOLERANCE, HOST_CASE_TOLERANCE = 0.02, 0.1
"""How far one case may be off the same case on a sound device, beside what devices differ by, where
that is what it is held against: of the device's own work, and of what hosts, disks and links do."""
MAX_TOLERANCE = 0.5
"""However far the samples of a case lie apart."""
_LINK = {"host_to_device": "link to the device", "device_to_host": "link to the host"}


class HealthCheck(NamedTuple):
    """One group of rows, beside sound devices."""

    row_group: str
    relative_speed: float
    """Over that of sound devices, in the middle of the rows."""
    num_rows: int
    tolerance: float
    """How much below 1 it may be."""
    worst_case: str
    """The case that is the furthest below."""

    @property
    def passed(self) -> bool:
        """Whether it is fast enough."""
        return self.relative_speed >= 1.0 - self.tolerance

    def format_message(self, whose: str) -> str:
        """Say it in one line, such as `memory 18 % below H200's`."""
        off = round(100 * abs(1.0 - self.relative_speed))
        return (
            f"{self.row_group} {off} % {'below' if self.relative_speed < 1.0 else 'above'} {whose}"
        )


def check_health(
    rows: Sequence[BenchRow],
    expected_s: Mapping[str, float],
    doubts: Mapping[str, float] = MappingProxyType({}),
) -> tuple[HealthCheck, ...]:
    """Hold rows against expected times, in the order in which their groups were measured.

    `doubts` says by group how far one expected time may be off by itself.
    """
    groups = defaultdict[str, list[tuple[float, BenchRow]]](list)
    for row in rows:
        seconds = expected_s.get(row.case.key)
        if seconds and row.median_s:
            groups[classify_row(row)].append((seconds / row.median_s, row))
    return tuple(
        _checked(what, found, doubts.get(what) or _same_case(found[0][1]))
        for what, found in groups.items()
    )


def _checked(what: str, found: Sequence[tuple[float, BenchRow]], doubt: float) -> HealthCheck:
    # Whatever does not repeat itself better than that says less.
    noise = min(MAX_TOLERANCE, median(row.relative_spread for _, row in found))
    speeds = [(speed, row.case.key) for speed, row in found]
    # Part of a doubt is common to all rows of a group; the middle of many evens out the rest.
    allowed = max(noise, DEVICE_VARIATION + doubt * (1.0 + 2.0 / sqrt(len(found))))
    return HealthCheck(
        what, median(speed for speed, _ in speeds), len(found), allowed, min(speeds)[1]
    )


def _same_case(row: BenchRow) -> float:
    inside = row.case.family == "memory_copies" and row.case.name in ("copy", "fill")
    computed = row.case.family in ("gemm", "attention", "memory_bound")
    return SAME_CASE_TOLERANCE if inside or computed else HOST_CASE_TOLERANCE


def classify_row(row: BenchRow) -> str:
    """Return what a row says something of."""
    case = row.case
    match case.family:
        case "gemm":
            return f"gemm {case.sizes.get('precision', 'grouped')}"
        case "memory_copies":
            return _LINK.get(case.name, "memory" if case.name == "copy" else case.name)
        case "memory_bound":
            return f"memory_bound {case.sizes.get('kernel', case.name)}"
    return f"{case.family} {case.name}"


def compute_median_times(benches: Sequence[Sequence[BenchRow]]) -> dict[str, float]:
    """Return the median time of each case over benches of other devices, or of other days."""
    found = defaultdict[str, list[float]](list)
    for rows in benches:
        for row in rows:
            found[row.case.key].append(row.median_s)
    return {key: median(times) for key, times in found.items()}


def find_device_faults(
    rows: Sequence[BenchRow], gpu: "NvmlDevice | None" = None
) -> tuple[str, ...]:
    """Return what a device said of itself that no sound one says."""
    found = list[str]()
    for reason in sorted(FAULT_THROTTLE_REASONS):
        seen = [row for row in rows if row.telemetry and reason in row.telemetry.throttle_reasons]
        if seen:
            name = format_throttle_reason(reason)
            cases = f"{len(seen)} of {len(rows)} cases"
            found.append(f"clocks throttled: {name} during {cases}, first {seen[0].case.key}")
    if gpu is None:
        return tuple(found)
    errors, width = gpu.uncorrected_ecc_errors(), gpu.pcie_link_width()
    if errors:
        found.append(f"{errors:.0f} errors of the memory could not be corrected since it started")
    if width is not None and width[0] < width[1]:
        found.append(f"the link to the host has {width[0]:.0f} of {width[1]:.0f} lanes")
    return tuple(found)
