"""What rows of a bench would take on a sound device of its kind, as the cost models have it.

Their built-in constants come from measurements of many devices, or of a relative where there are
none of its own: `basis` says which. Rows under load are held against the device at its power limit.
Only work is expected that the device sets the pace of: large products, attention and copies. How
fast small ones and the trainer's other kernels run is a matter of software.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.bench.health_check import classify_row
from meshwright.observe.bench.kernels.gemm import LARGE_FLOPS
from meshwright.observe.calibrate.fit_targets import FitTarget, list_fit_targets
from meshwright.predict.cost.device_costs import (
    DeviceCosts,
    apply_sustained_load,
    build_device_costs,
)
from meshwright.predict.cost.memory_bound import memory_s
from meshwright.spec.cluster import Gpu

LINK_SHARE = 0.85
"""Of a link's stated bandwidth that large copies from pinned memory reach (assumed): headers of
packets and acknowledgements take the rest."""
LARGE_BYTES = 128 << 20
"""Of memory: smaller copies are launched, or stay in a cache, more than they are carried out."""
LARGE_MESSAGE = 16 << 20
"""The same across a link."""
STREAMS = {"clone": "copy", "add": "residual"}
"""Kernels that do nothing but move bytes, by the class of their work."""
MEASURED_HEAD_DIMS = (64, 128)
"""Widths that attention was measured at."""
KERNEL_UNCERTAINTY = 0.06
"""Error of a figure that none is stated of: kernels of other versions differ by as much."""
MEMORY_UNCERTAINTY, LINK_UNCERTAINTY = 0.02, 0.1
BORROWED_UNCERTAINTY = 0.25
"""The same where all is taken from a relative."""


class ExpectedTimes(NamedTuple):
    """Times that rows are held against."""

    seconds: dict[str, float]
    """By key; rows that nothing is known of are left out."""
    uncertainty: dict[str, float]
    """How far one such time may be off, by group of rows."""
    basis: str


def predict_expected_times(rows: Sequence[BenchRow], gpu: Gpu) -> ExpectedTimes:
    """Return the times of a sound device."""
    cool = build_device_costs(gpu)
    least = 0.0 if cool.basis == "measured" else BORROWED_UNCERTAINTY
    seconds, doubts = dict[str, float](), dict[str, float]()
    for row, time_s, doubt in (*_computed(rows, gpu, cool), *_moved(rows, gpu, cool)):
        seconds[row.case.key] = time_s
        doubts[classify_row(row)] = max(doubt, least)
    return ExpectedTimes(seconds, doubts, cool.basis)


def _computed(
    rows: Sequence[BenchRow], gpu: Gpu, cool: DeviceCosts
) -> Iterator[tuple[BenchRow, float, float]]:
    """Yield large products and attention with their times, of kinds that were measured."""
    hot = apply_sustained_load(cool)
    for subject in list_fit_targets(rows, gpu):
        known, doubt = _known(subject, cool)
        for row in subject.rows if known else ():
            if (row.flops or 0.0) < LARGE_FLOPS:
                continue
            if subject.family == "attention" and not _usual(row):
                continue
            yield row, subject.predict_seconds(hot if row.under_load else cool, row), doubt


def _known(subject: FitTarget, cool: DeviceCosts) -> tuple[bool, float]:
    """Tell whether there is a curve of this very kind of work, and its error."""
    if subject.family != "products":
        return True, KERNEL_UNCERTAINTY
    curves = {curve.precision: curve for curve in cool.calibration.products}
    if subject.name not in curves:
        return False, 0.0
    error = curves[subject.name].error
    return True, KERNEL_UNCERTAINTY if error is None else error


def _usual(row: BenchRow) -> bool:
    sizes = row.case.sizes
    return sizes["mask"] in ("causal", "full") and sizes["head_dim"] in MEASURED_HEAD_DIMS


def _moved(
    rows: Sequence[BenchRow], gpu: Gpu, cool: DeviceCosts
) -> Iterator[tuple[BenchRow, float, float]]:
    """Yield large copies with their times."""
    for row in rows:
        family, name, moved = row.case.family, row.case.name, row.bytes or 0.0
        op = STREAMS.get(str(row.case.sizes.get("kernel", "")))
        if family == "memory_bound" and op == name and moved >= LARGE_BYTES:
            yield (
                row,
                memory_s(cool, "copy" if op == "copy" else "residual", moved),
                MEMORY_UNCERTAINTY,
            )
        elif family == "memory_copies" and name == "copy" and moved >= LARGE_BYTES:
            yield row, memory_s(cool, "copy", moved), MEMORY_UNCERTAINTY
        elif _over_link(row) and moved >= LARGE_MESSAGE and gpu.pcie_bytes_per_s:
            yield row, moved / (LINK_SHARE * gpu.pcie_bytes_per_s), LINK_UNCERTAINTY


def _over_link(row: BenchRow) -> bool:
    one_way = row.case.name in ("host_to_device", "device_to_host")
    return one_way and row.case.sizes.get("memory") == "pinned"
