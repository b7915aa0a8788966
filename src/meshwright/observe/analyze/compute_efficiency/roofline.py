"""Kernels against the device's roofline: how long each must take, and how long it took.

A kernel takes at least its FLOPs over the peak of their element type, and its bytes over the
bandwidth of the memory; the larger of both is its roof (S. Williams, A. Waterman, D. Patterson,
"Roofline", CACM 52(4), 2009). FLOPs are those of `find_operator_flops`, bytes those of `traffic`.
What has neither is listed as not covered, never guessed. A share above 1 means that data came from
a cache.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.compute_efficiency.byte_formulas import (
    count_minimum_bytes,
    has_byte_formula,
)
from meshwright.observe.analyze.compute_efficiency.flop_formulas import FLOP_FORMULAS
from meshwright.observe.analyze.compute_efficiency.kernel_table import attribute_flops
from meshwright.observe.analyze.compute_efficiency.operator_flops import find_operator_flops
from meshwright.observe.analyze.compute_efficiency.trace_device import (
    find_peak_flops,
    find_trace_device,
)
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.call_stacks import NO_SPAN, build_call_stacks, find_innermost
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import COMPUTE, DeviceSpans, Ints, match_values
from meshwright.observe.analyze.spans.steps import find_launch_rows, mask_host_rows, number_threads
from meshwright.spec.cluster import Gpu
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline


class RooflineKernel(NamedTuple):
    """All covered launches of one kernel; per step, the mean over ranks."""

    name: str
    operator: str
    """What launched it."""
    calls: float
    total_ns: float
    flops: float
    bytes: float
    roofline_ns: float
    """What the roof allows."""
    bound: str
    """`compute` or `memory`: which of the two roofs is the lower one."""

    @property
    def roofline_share(self) -> float:
        """How near it comes to its roof: 1 is as fast as the device allows."""
        return self.roofline_ns / self.total_ns if self.total_ns else 0.0

    @property
    def lost_ns(self) -> float:
        """What it takes longer than its roof."""
        return max(0.0, self.total_ns - self.roofline_ns)

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte; None where FLOPs or bytes are not known."""
        return self.flops / self.bytes if self.flops and self.bytes else None


class UncoveredKernel(NamedTuple):
    """A compute kernel whose work is not known."""

    name: str
    total_ns: float


class Roofline(NamedTuple):
    """All ranks' kernels against one device."""

    device: str
    num_ranks: int
    num_steps: int
    """Steps per rank; 0 where none are marked, and then figures are of the whole trace."""
    compute_ns: float
    """Time in compute kernels per step; kernels that run at once count each."""
    covered_ns: float
    kernels: tuple[RooflineKernel, ...]
    """Those that lose most first."""
    uncovered_kernels: tuple[UncoveredKernel, ...]
    """The longest first."""
    has_shapes: bool
    """Whether the trace records shapes at all."""

    @property
    def covered_share(self) -> float:
        """Part of the compute time that is held against a roof."""
        return self.covered_ns / self.compute_ns if self.compute_ns else 0.0


class _Sums:
    """Adds up ranks; keys are kernel and operator."""

    def __init__(self) -> None:
        self.covered: dict[tuple[str, str], np.ndarray] = {}
        self.rest: dict[str, float] = {}
        self.ranks = 0
        self.steps: list[int] = []
        self.has_shapes = False


def analyze_roofline(
    timelines: Iterable[Timeline],
    device: Gpu | None = None,
    extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS,
    *,
    roofs: Callable[[Gpu], Gpu] = lambda gpu: gpu,
) -> Roofline | None:
    """Hold the kernels of ranks that come one after another against a device's roofs.

    The device is the one that the trace names, unless one is given; None where neither is known.
    `roofs` turns it into one whose peaks are others than the catalog's.
    """
    sums = _Sums()
    device = device and roofs(device)
    for timeline in timelines:
        if device is None:
            named = find_trace_device(timeline)
            if named is None:
                return None
            device = roofs(named)
        for part in split_by_device(timeline):
            _add(sums, part, device, extent)
    if device is None:
        return None
    count = max(sums.ranks, 1)
    rows = []
    for (name, operator), total in sums.covered.items():
        calls, ns, flops, moved, by_flops, by_bytes, least = (total / count).tolist()
        bound = "compute" if by_flops >= by_bytes else "memory"
        rows.append(RooflineKernel(name, operator, calls, ns, flops, moved, least, bound))
    rest = [UncoveredKernel(name, ns / count) for name, ns in sums.rest.items()]
    covered = sum(row.total_ns for row in rows)
    return Roofline(
        device=device.name,
        num_ranks=sums.ranks,
        num_steps=max(sums.steps, default=0),
        compute_ns=covered + sum(one.total_ns for one in rest),
        covered_ns=covered,
        kernels=tuple(sorted(rows, key=lambda row: -row.lost_ns)),
        uncovered_kernels=tuple(sorted(rest, key=lambda one: -one.total_ns)),
        has_shapes=sums.has_shapes,
    )


def _add(sums: _Sums, part: Timeline, device: Gpu, extent: AnalysisExtent) -> None:
    spans = select_counted_spans(part, extent)
    spans = spans.take(spans.kind == COMPUTE)
    steps = count_complete_steps(part, extent)
    each = 1.0 / max(steps, 1)
    sums.ranks += 1
    sums.steps.append(steps)
    operator = _operator_rows(part, spans)
    found = find_operator_flops(part)
    has = attribute_flops(part, spans, found)
    bytes_ = np.full(spans.row.size, ABSENT, dtype=np.int64)
    chosen = _one_per_call(spans, operator, has.operator_index)
    if chosen.size:
        sums.has_shapes = True
        # Bytes alone are too low a roof for a product whose FLOPs are not known.
        multiplies = match_values(part.string_column("name"), FLOP_FORMULAS.__contains__)[
            operator[chosen]
        ]
        chosen = chosen[~multiplies | (has.operator_index[chosen] != ABSENT)]
        bytes_[chosen] = count_minimum_bytes(part, operator[chosen])
    length = (spans.end - spans.start).astype(np.float64)
    by_flops = np.zeros(spans.row.size)
    for place in np.flatnonzero(has.operator_index != ABSENT).tolist():
        name = spans.names[spans.name[place]]
        peak = find_peak_flops(device, found.dtype[has.operator_index[place]], name)
        by_flops[place] = has.flops[place] * 1e9 / peak if peak else 0.0
    by_bytes = np.maximum(bytes_, 0) * 1e9 / device.memory_bytes_per_s
    least = np.maximum(by_flops, by_bytes)
    known = least > 0
    columns = np.stack(
        [np.ones_like(length), length, has.flops, np.maximum(bytes_, 0), by_flops, by_bytes, least],
        axis=1,
    )
    names = part.string_column("name")
    codes = np.where(operator != ABSENT, names.codes[operator], ABSENT)
    keys = np.stack([spans.name[known], codes[known]], axis=1)
    distinct, place_of = np.unique(keys, axis=0, return_inverse=True)
    for at, (name, op) in enumerate(distinct.tolist()):
        total = columns[known][place_of.reshape(-1) == at].sum(axis=0) * each
        key = (spans.names[name], names.values[op] if op >= 0 else "")
        sums.covered[key] = sums.covered.get(key, np.zeros(7)) + total
    rest = np.bincount(spans.name[~known], weights=length[~known]) if (~known).any() else ()
    for name, ns in enumerate(rest):
        if ns:
            text = spans.names[name]
            sums.rest[text] = sums.rest.get(text, 0.0) + float(ns) * each


def _operator_rows(part: Timeline, spans: DeviceSpans) -> Ints:
    """The innermost covered operator around each span's launch; -1 where there is none."""
    rows = np.full(spans.row.size, ABSENT, dtype=np.int64)
    if "extra" not in part.known_columns or "extra" not in part.spans.column_names:
        return rows
    row = np.flatnonzero(
        mask_host_rows(part) & match_values(part.string_column("name"), has_byte_formula)
    )
    launch = find_launch_rows(part, spans)
    known = np.flatnonzero(launch != ABSENT)
    if not row.size or not known.size:
        return rows
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    thread = number_threads(part)
    tree = build_call_stacks(thread[row], start[row], end[row])
    place = find_innermost(tree, thread[launch[known]], start[launch[known]])
    rows[known] = np.where(place != NO_SPAN, row[place], ABSENT)
    return rows


def _one_per_call(spans: DeviceSpans, operator: Ints, product: Ints) -> Ints:
    """Of the kernels that one call launched, the one that does its work.

    That is the one that has its FLOPs, else the longest; the others are not covered.
    """
    own = np.flatnonzero(operator != ABSENT)
    length = spans.end[own] - spans.start[own]
    order = np.lexsort((length, product[own] != ABSENT, operator[own]))
    own = own[order]
    last = np.append(operator[own][1:] != operator[own][:-1], True) if own.size else own > 0
    chosen: Ints = own[last]
    return chosen
