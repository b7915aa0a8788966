"""A bench in a few lines: the best rate of each kind of work, and its share of the stated peak."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.communication import compute_bus_bandwidth
from meshwright.spec.cluster import Gpu
from meshwright.spec.units import format_bytes

Unit = Literal["flops", "bytes", "tokens", "reads", "files", "seconds"]
_TIMED = frozenset({"collectives", "p2p", "launch_overhead"})
"""Families whose shortest time says as much as their best rate."""


class BenchSummaryLine(NamedTuple):
    """One kind of work."""

    family: str
    operation: str
    unit: Unit
    best: float
    """Per second; the shortest time where the unit is seconds."""
    median: float
    """The median over all cases, in the same unit."""
    peak: float | None
    """What the catalog says at most."""
    shortest_s: float | None
    """Time of the quickest case, where that is of interest."""
    num_cases: int
    median_spread: float
    """The median spread of a case's samples."""

    @property
    def share(self) -> float | None:
        """The best rate over the peak."""
        return self.best / self.peak if self.peak else None


def summarize_rows(
    rows: Sequence[BenchRow], gpu: Gpu | None = None
) -> tuple[BenchSummaryLine, ...]:
    """Return one line for each kind of work, in the order in which it was measured."""
    groups = defaultdict[tuple[str, str], list[BenchRow]](list)
    for row in rows:
        if row.median_s > 0:
            groups[row.case.family, _what(row)].append(row)
    return tuple(_line(family, what, mine, gpu) for (family, what), mine in groups.items())


def _what(row: BenchRow) -> str:
    case = row.case
    sizes = case.sizes
    match case.family:
        case "gemm":
            return str(sizes.get("precision", "grouped, bf16"))
        case "memory_bound":
            return "all kernels"
        case "memory_copies":
            words = [case.name, str(sizes.get("memory", ""))]
        case "launch_overhead":
            words = [case.name, str(sizes.get("operation", ""))]
            words += [f"of {sizes['nodes']}"] if "nodes" in sizes else []
            words += [f"of {format_bytes(case.size('bytes'))}"] if "bytes" in sizes else []
        case "collectives" | "p2p":
            words = [case.name, f"{sizes['ranks']} ranks", str(sizes["backend"])]
        case "storage" if case.name == "random_read":
            block = format_bytes(case.size("block"))
            words = [case.name, block, f"{sizes['at_once']} at once"]
        case "data_loader" if case.name == "load":
            words = [case.name, str(sizes["packing"])]
        case _:
            words = [case.name]
    return ", ".join(word for word in words if word).replace("_", " ")


def _line(family: str, what: str, rows: Sequence[BenchRow], gpu: Gpu | None) -> BenchSummaryLine:
    unit = _unit(rows[0])
    if unit == "seconds":
        times = [row.median_s / (row.items or 1.0) for row in rows]
        best, middle = min(times), median(times)
    else:
        rates = [_rate(row, unit) for row in rows]
        best, middle = max(rates), median(rates)
    return BenchSummaryLine(
        family=family,
        operation=what,
        unit=unit,
        best=best,
        median=middle,
        peak=None if gpu is None or unit == "seconds" else _peak(rows[0], gpu),
        shortest_s=min(row.median_s for row in rows) if family in _TIMED else None,
        num_cases=len(rows),
        median_spread=median(row.relative_spread for row in rows),
    )


def _unit(row: BenchRow) -> Unit:
    name = row.case.name
    if row.case.family == "launch_overhead" or name == "fsync":
        return "seconds"
    if row.case.family == "data_loader" and row.items:
        return "tokens"
    if name == "random_read":
        return "reads"
    if row.items:
        return "files"
    return "flops" if row.flops else "bytes"


def _rate(row: BenchRow, unit: Unit) -> float:
    if unit == "flops":
        return row.flops_per_s or 0.0
    if unit == "bytes":
        if row.case.family == "collectives":
            return compute_bus_bandwidth(row)
        return row.bytes_per_s or 0.0
    return row.items_per_s or 0.0


def _peak(row: BenchRow, gpu: Gpu) -> float | None:
    """Return what the catalog states for a kind of work; what nobody states has none."""
    if gpu.kind != "gpu":
        return None
    case = row.case
    match case.family:
        case "gemm" | "attention":
            precision = str(case.sizes.get("precision", "bf16")).partition("-")[0]
            return {
                "fp32": gpu.fp32_flops,
                "tf32": gpu.tf32_flops,
                "bf16": gpu.bf16_flops,
                "fp16": gpu.fp16_flops,
                "fp8": gpu.fp8_flops,
            }.get(precision)
        case "memory_bound":
            return gpu.memory_bytes_per_s
        case "memory_copies":
            if case.name in ("copy", "fill"):
                return gpu.memory_bytes_per_s
            ways = 2 if case.name == "both_ways" else 1
            return ways * gpu.pcie_bytes_per_s if gpu.pcie_bytes_per_s else None
        case "collectives" | "p2p" if case.sizes["backend"] == "nccl":
            return gpu.nvlink_bytes_per_s
    return None


class FamilyTelemetry(NamedTuple):
    """What a device said of itself during a family."""

    family: str
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_reasons: tuple[str, ...]


def summarize_telemetry(rows: Sequence[BenchRow]) -> tuple[FamilyTelemetry, ...]:
    """Return it for each family that was watched."""
    found = list[FamilyTelemetry]()
    for family in dict.fromkeys(row.case.family for row in rows):
        seen = [row.telemetry for row in rows if row.case.family == family and row.telemetry]
        if not seen:
            continue
        clocks = [one.clock_mhz for one in seen if one.clock_mhz is not None]
        watts = [one.power_w for one in seen if one.power_w is not None]
        degrees = [one.temperature_c for one in seen if one.temperature_c is not None]
        reasons = dict.fromkeys(reason for one in seen for reason in one.throttle_reasons)
        found.append(
            FamilyTelemetry(
                family,
                median(clocks) if clocks else None,
                median(watts) if watts else None,
                max(degrees, default=None),
                tuple(reasons),
            )
        )
    return tuple(found)
