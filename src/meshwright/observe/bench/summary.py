"""A bench in a few lines: the best rate of each kind of work, and its share of the stated peak."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from meshwright.observe.bench.case import Row
from meshwright.observe.bench.collectives import bus_bytes_per_s
from meshwright.spec.cluster import Gpu
from meshwright.spec.units import format_bytes

Unit = Literal["flops", "bytes", "tokens", "reads", "files", "seconds"]
_TIMED = frozenset({"collectives", "messages", "launches"})
"""Families whose shortest time says as much as their best rate."""


class Line(NamedTuple):
    """One kind of work."""

    family: str
    what: str
    unit: Unit
    best: float
    """Per second; the shortest time where the unit is seconds."""
    middle: float
    """The median over all cases, in the same unit."""
    peak: float | None
    """What the catalog says at most."""
    shortest_s: float | None
    """Time of the quickest case, where that is of interest."""
    cases: int
    spread: float
    """The median spread of a case's samples."""

    @property
    def share(self) -> float | None:
        """The best rate over the peak."""
        return self.best / self.peak if self.peak else None


def lines(rows: Sequence[Row], gpu: Gpu | None = None) -> tuple[Line, ...]:
    """Return one line for each kind of work, in the order in which it was measured."""
    groups = defaultdict[tuple[str, str], list[Row]](list)
    for row in rows:
        if row.seconds > 0:
            groups[row.case.family, _what(row)].append(row)
    return tuple(_line(family, what, mine, gpu) for (family, what), mine in groups.items())


def _what(row: Row) -> str:
    case = row.case
    sizes = case.sizes
    match case.family:
        case "products":
            return str(sizes.get("precision", "grouped, bf16"))
        case "elementwise":
            return "all kernels"
        case "copies":
            words = [case.name, str(sizes.get("memory", ""))]
        case "launches":
            words = [case.name, str(sizes.get("operation", ""))]
            words += [f"of {sizes['nodes']}"] if "nodes" in sizes else []
            words += [f"of {format_bytes(case.size('bytes'))}"] if "bytes" in sizes else []
        case "collectives" | "messages":
            words = [case.name, f"{sizes['ranks']} ranks", str(sizes["backend"])]
        case "storage" if case.name == "random_read":
            block = format_bytes(case.size("block"))
            words = [case.name, block, f"{sizes['at_once']} at once"]
        case "data" if case.name == "load":
            words = [case.name, str(sizes["packing"])]
        case _:
            words = [case.name]
    return ", ".join(word for word in words if word).replace("_", " ")


def _line(family: str, what: str, rows: Sequence[Row], gpu: Gpu | None) -> Line:
    unit = _unit(rows[0])
    if unit == "seconds":
        times = [row.seconds / (row.items or 1.0) for row in rows]
        best, middle = min(times), median(times)
    else:
        rates = [_rate(row, unit) for row in rows]
        best, middle = max(rates), median(rates)
    return Line(
        family=family,
        what=what,
        unit=unit,
        best=best,
        middle=middle,
        peak=None if gpu is None or unit == "seconds" else _peak(rows[0], gpu),
        shortest_s=min(row.seconds for row in rows) if family in _TIMED else None,
        cases=len(rows),
        spread=median(row.spread for row in rows),
    )


def _unit(row: Row) -> Unit:
    name = row.case.name
    if row.case.family == "launches" or name == "fsync":
        return "seconds"
    if row.case.family == "data" and row.items:
        return "tokens"
    if name == "random_read":
        return "reads"
    if row.items:
        return "files"
    return "flops" if row.flops else "bytes"


def _rate(row: Row, unit: Unit) -> float:
    if unit == "flops":
        return row.flops_per_s or 0.0
    if unit == "bytes":
        if row.case.family == "collectives":
            return bus_bytes_per_s(row)
        return row.bytes_per_s or 0.0
    return row.items_per_s or 0.0


def _peak(row: Row, gpu: Gpu) -> float | None:
    """Return what the catalog states for a kind of work; what nobody states has none."""
    if gpu.kind != "gpu":
        return None
    case = row.case
    match case.family:
        case "products" | "attention":
            precision = str(case.sizes.get("precision", "bf16")).partition("-")[0]
            return {
                "fp32": gpu.fp32_flops,
                "tf32": gpu.tf32_flops,
                "bf16": gpu.bf16_flops,
                "fp16": gpu.fp16_flops,
                "fp8": gpu.fp8_flops,
            }.get(precision)
        case "elementwise":
            return gpu.memory_bytes_per_s
        case "copies":
            if case.name in ("copy", "fill"):
                return gpu.memory_bytes_per_s
            ways = 2 if case.name == "both_ways" else 1
            return ways * gpu.pcie_bytes_per_s if gpu.pcie_bytes_per_s else None
        case "collectives" | "messages" if case.sizes["backend"] == "nccl":
            return gpu.nvlink_bytes_per_s
    return None


class Meanwhile(NamedTuple):
    """What a device said of itself during a family."""

    family: str
    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle: tuple[str, ...]


def meanwhile(rows: Sequence[Row]) -> tuple[Meanwhile, ...]:
    """Return it for each family that was watched."""
    found = list[Meanwhile]()
    for family in dict.fromkeys(row.case.family for row in rows):
        seen = [row.telemetry for row in rows if row.case.family == family and row.telemetry]
        if not seen:
            continue
        clocks = [one.clock_mhz for one in seen if one.clock_mhz is not None]
        watts = [one.power_w for one in seen if one.power_w is not None]
        degrees = [one.temperature_c for one in seen if one.temperature_c is not None]
        reasons = dict.fromkeys(reason for one in seen for reason in one.throttle)
        found.append(
            Meanwhile(
                family,
                median(clocks) if clocks else None,
                median(watts) if watts else None,
                max(degrees, default=None),
                tuple(reasons),
            )
        )
    return tuple(found)
