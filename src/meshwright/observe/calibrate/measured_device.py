"""Which device rows are of: one of the catalog, or one known only by what was measured on it."""

import re
from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.observe.bench.bench_case import BenchRow
from meshwright.observe.hardware.catalog_device import find_catalog_device
from meshwright.observe.hardware.machine import Machine
from meshwright.predict.cost.curves import MeasuredPeaks
from meshwright.spec.catalog import get_gpu
from meshwright.spec.cluster import Gpu

PEAK_HEADROOM = 1.25
"""A peak over the best rate that was measured: no product fills every tile."""
MIN_UNCACHED_BYTES = 32 << 20
"""Bytes of a call that says something of the memory: less may lie in a cache of the processor."""
_PEAK_FIELDS = {
    "fp32": "fp32_flops",
    "tf32": "tf32_flops",
    "bf16": "bf16_flops",
    "fp16": "fp16_flops",
    "fp8-tensorwise": "fp8_flops",
}


def identify_device(
    machine: Machine, rows: Sequence[BenchRow], asked: str = ""
) -> tuple[Gpu, MeasuredPeaks | None]:
    """Return the device, and its peaks where they are only what was measured."""
    known = get_gpu(asked) if asked else None
    if known is None and machine.gpu:
        known = get_gpu(machine.gpu)
    known = known or find_catalog_device(machine.device)
    if known is not None and known.kind == "gpu":
        return known, None
    peaks = _peaks(machine, rows)
    name = known.name if known is not None else _name(machine.device)
    like = known or get_gpu("cpu-core")
    described = msgspec.structs.replace(
        like, name=name, title=machine.device.strip() or name, aliases=(), sources=(), notes=""
    )
    unknown = dict.fromkeys(_PEAK_FIELDS.values())
    return msgspec.structs.replace(described, **{**unknown, **peaks.known_peaks}), peaks


def _name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "host"


def _peaks(machine: Machine, rows: Sequence[BenchRow]) -> MeasuredPeaks:
    """Return the best rates there are among rows."""
    flops = dict[str, float]()
    for row in rows:
        field = _PEAK_FIELDS.get(str(row.case.sizes.get("precision", "")))
        if row.case.family == "gemm" and field and row.flops_per_s:
            flops[field] = max(flops.get(field, 0.0), row.flops_per_s)
    moved = [
        row.bytes_per_s
        for row in rows
        if row.case.family in ("memory_bound", "memory_copies")
        and row.bytes_per_s
        and (row.bytes or 0.0) >= MIN_UNCACHED_BYTES
    ]
    if not flops:
        what = f"has no products of {machine.device or 'this device'}, which no catalog has"
        fix = "measure products, or name a device of `mw gpus` with --gpu"
        raise InputError([Problem("rows", what, fix)])
    # Products say little of the memory's pace: without better rows it is the catalog's.
    moved = moved or [get_gpu("cpu-core").memory_bytes_per_s]
    raised = {field: PEAK_HEADROOM * best for field, best in flops.items()}
    return MeasuredPeaks(memory_bytes_per_s=max(moved), sms=max(1, machine.cores), **raised)
