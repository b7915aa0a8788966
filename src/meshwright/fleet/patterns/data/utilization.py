"""What each GPU did for each job that held it: samples, raw or rolled up, as one row for each.

Means are over all samples of a use; those that start with `busy_` over samples under load, which
is where clocks and watts say anything. What is not known is nan.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.fleet.columns import read_floats
from meshwright.fleet.patterns.data.allocation_columns import AllocationColumns
from meshwright.fleet.patterns.data.change_point import CHANGE_COLUMNS, find_change_point
from meshwright.fleet.patterns.data.group_math import (
    Flags,
    Floats,
    Ints,
    mean_where,
    slice_max,
    slice_sums,
)
from meshwright.fleet.patterns.data.node_index import NodeIndex
from meshwright.fleet.statistics.intervals import find_intervals

MEAN_METRICS = (
    "activity",
    "sm_active",
    "tensor_active",
    "dram_active",
    "fp64_active",
    "fp32_active",
    "power_w",
    "pcie_rx",
    "nvlink_tx",
)
BUSY_MEAN_METRICS = (
    "sm_clock_mhz",
    "tensor_active",
    "power_w",
    "temperature_c",
    "sm_active",
    "pcie_rx",
)
MAX_METRICS = ("memory_used", "memory_total", "activity", "sm_clock_mhz", "pcie_rx", "power_w")
LOAD_THRESHOLD = 0.3
"""Activity from which a sample is under load."""
IDLE_THRESHOLD = 0.01
"""A GPU that works for a smaller part of the time only answers those who look after it."""
LONG_IDLE_S = 1800.0
MIN_UNALLOCATED_BYTES = 1 << 30
"""A driver keeps some hundred MiB of a GPU's memory for itself."""
THROTTLE_BITS = {"power_cap": 0x4, "brake": 0x80 | 0x8, "thermal": 0x20 | 0x40, "locked": 0x2}
"""Reasons why clocks are held back, as DCGM's bits."""


class GpuUtilization(msgspec.Struct, frozen=True, eq=False):
    """One row for each row of `AllocationColumns`."""

    job: Ints
    node: Ints
    gpu: Ints
    start_s: Floats
    end_s: Floats
    gpu_hours: Floats
    values: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        """A figure of each use."""
        return self.values[name]


class UnallocatedUse(NamedTuple):
    """Stretches in which a GPU's memory was taken while no job held it."""

    node: Ints
    gpu: Ints
    start_s: Floats
    end_s: Floats
    memory_bytes: Floats


class UtilizationPart(NamedTuple):
    """What some of the samples say."""

    rows: Ints
    """Rows of `AllocationColumns`."""
    values: Mapping[str, Floats]
    unallocated_use: UnallocatedUse


def metric_mean(table: Any, metric: str) -> Floats:
    """A metric's mean in each window, or itself where samples are raw."""
    rolled = f"{metric}_mean"
    return read_floats(table, rolled if rolled in table.column_names else metric)


def metric_max(table: Any, metric: str) -> Floats:
    """A metric's largest value in each window."""
    rolled = f"{metric}_max"
    return read_floats(table, rolled if rolled in table.column_names else metric)


def read_activity(table: Any) -> Floats:
    """How much of the time a GPU worked: by the first of its metrics that is known."""
    found = metric_mean(table, "gpu_util")
    for other in ("engine_active", "sm_active"):
        if np.isnan(found).any():
            found = np.where(np.isnan(found), metric_mean(table, other), found)
    return found


def read_throttle_bits(table: Any) -> Ints:
    """Bits that were set in each window."""
    rolled = "throttle_any"
    bits = read_floats(table, rolled if rolled in table.column_names else "throttle")
    return np.nan_to_num(bits).astype(np.int64)


def estimate_sample_step(time_s: Floats, series: Ints) -> float:
    """How far apart samples of one GPU are, mostly."""
    apart = np.diff(time_s)[np.diff(series) == 0]
    apart = apart[apart > 0]
    return float(np.median(apart)) if apart.size else 60.0


def build_utilization(
    table: Any, allocations: AllocationColumns, places: NodeIndex, known: Flags
) -> UtilizationPart:
    """Reduce samples to uses; `known` are the nodes whose holders are all known."""
    gpu = np.nan_to_num(read_floats(table, "gpu"), nan=-1).astype(np.int64)
    series = places.codes(table) * 1024 + gpu
    time = read_floats(table, "time_s")
    same = series[1:] == series[:-1]
    if ((series[1:] < series[:-1]) | (same & (time[1:] < time[:-1]))).any():
        order = np.lexsort((time, series))
        table, series, time = table.take(order), series[order], time[order]
    step = estimate_sample_step(time, series)
    rows, low, high = _slices(series, time, allocations, step)
    activity = read_activity(table)
    values = _figures(table, activity, low, high, step)
    owner = np.full(time.size, -1, dtype=np.int64)
    # A GPU that is shared belongs, where runs of samples are looked at, to who came last.
    lengths = high - low
    place = np.repeat(low - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    owner[place] = np.repeat(np.arange(rows.size), lengths)
    allocation_rows = allocations.select(rows)
    values |= _idle(
        activity, time, owner, low=low, high=high, step=step, allocations=allocation_rows
    )
    values |= _stuck(table, activity, time, owner, step=step, allocations=allocation_rows)
    values |= find_change_point(_work(table, activity), time, owner, low=low, high=high, step=step)
    node = series // 1024
    certain: Flags = (node >= 0) & (known[node] if known.size else False)
    return UtilizationPart(rows, values, _stray(table, time, series, certain & (owner < 0), step))


def _slices(
    series: Ints, time: Floats, allocations: AllocationColumns, step: float
) -> tuple[Ints, Ints, Ints]:
    """The held rows of these GPUs, and from where to where their samples are.

    A window that begins before a job or ends after it also tells of somebody else.
    """
    number, first = np.unique(series, return_index=True)
    last = np.append(first[1:], series.size)
    wanted = allocations.node * 1024 + allocations.gpu
    place = np.searchsorted(number, wanted)
    here = (place < number.size) & (number[np.minimum(place, number.size - 1)] == wanted)
    rows = np.flatnonzero(here)
    place = place[rows]
    # One search for all GPUs: times made to rise from GPU to GPU.
    begin, span = float(time.min()), float(time.max() - time.min()) + 10 * step
    index = np.searchsorted(number, series)
    ramp = (time - begin) + index * span
    edge = span - step
    start = np.clip(allocations.start_s[rows] - begin, 0, edge) + place * span
    end = np.clip(allocations.end_s[rows] - begin - step, -1e-6, edge) + place * span
    low = np.searchsorted(ramp, start, side="left")
    high = np.searchsorted(ramp, end, side="right")
    low, high = np.maximum(low, first[place]), np.minimum(high, last[place])
    order = np.argsort(low, kind="stable")
    return rows[order], low[order], np.maximum(high, low)[order]


def _figures(table: Any, activity: Floats, low: Ints, high: Ints, step: float) -> dict[str, Floats]:
    known = ~np.isnan(activity)
    # A window that holds a pause, too, mixes clocks at work with clocks at rest.
    paused = np.nan_to_num(read_floats(table, "gpu_util_zero")) > 0
    loaded = known & (np.nan_to_num(activity) >= LOAD_THRESHOLD) & ~paused
    found = {
        "seen_s": step * slice_sums(known, low, high),
        "busy_s": step * slice_sums(loaded, low, high),
    }
    for name in dict.fromkeys((*MEAN_METRICS, *BUSY_MEAN_METRICS)):
        column = activity if name == "activity" else metric_mean(table, name)
        if name in MEAN_METRICS:
            found[name] = mean_where(column, None, low, high)
        if name in BUSY_MEAN_METRICS:
            found[f"busy_{name}"] = mean_where(column, loaded, low, high)
    for name in MAX_METRICS:
        column = activity if name == "activity" else metric_max(table, name)
        found[f"peak_{name}"] = slice_max(column, low, high)
    clock = metric_max(table, "sm_clock_mhz")
    square, mean = (mean_where(one, loaded, low, high) for one in (clock * clock, clock))
    found["clock_varies"] = np.sqrt(np.maximum(square - mean**2, 0.0))
    bits = read_throttle_bits(table)
    count = np.maximum(slice_sums(loaded, low, high), 1.0)
    for name, mask in THROTTLE_BITS.items():
        some = loaded & ((bits & mask) > 0)
        found[name] = slice_sums(some, low, high) / count
    return found


def _idle(
    activity: Floats,
    time: Floats,
    owner: Ints,
    *,
    low: Ints,
    high: Ints,
    step: float,
    allocations: AllocationColumns,
) -> dict[str, Floats]:
    quiet = np.nan_to_num(activity, nan=1.0) <= IDLE_THRESHOLD
    busy = np.flatnonzero(np.nan_to_num(activity) > IDLE_THRESHOLD)
    length = allocations.end_s - allocations.start_s
    first = np.searchsorted(busy, low)
    last = np.searchsorted(busy, high) - 1
    any_busy = (first < busy.size) & (busy[np.minimum(first, max(busy.size - 1, 0))] < high) if (
        busy.size
    ) else np.zeros(low.size, dtype=np.bool_)  # fmt: skip
    pick = np.where(any_busy, first, 0), np.where(any_busy, last, 0)
    place = busy if busy.size else np.zeros(1, dtype=np.int64)
    lead = np.where(any_busy, np.maximum(time[place[pick[0]]] - allocations.start_s, 0.0), length)
    tail = np.where(
        any_busy, np.maximum(allocations.end_s - time[place[pick[1]]] - step, 0.0), length
    )
    mine = (owner >= 0) & ~np.isnan(activity)
    runs = find_intervals(
        owner[mine], time[mine], quiet[mine], gap_s=3.5 * step, length_s=LONG_IDLE_S - step - 1
    )
    seconds = runs.durations_s + step
    longest = np.zeros(low.size)
    np.maximum.at(longest, runs.series, seconds)
    return {
        "idle_s": step * slice_sums(quiet, low, high),
        "long_idle_s": np.bincount(runs.series, seconds, minlength=low.size),
        "longest_idle_s": longest,
        "lead_idle_s": lead,
        "tail_idle_s": tail,
    }


def _stuck(
    table: Any,
    activity: Floats,
    time: Floats,
    owner: Ints,
    *,
    step: float,
    allocations: AllocationColumns,
) -> dict[str, Floats]:
    """How long, at its end, a GPU seemed busy and did nothing: a kernel that waits for ever.

    A collective that waits holds a few SMs: the GPU counts as used, moves nothing, and computes
    nothing.
    """
    tensor, dram = metric_mean(table, "tensor_active"), metric_mean(table, "dram_active")
    waits = (activity >= 0.95) & (tensor <= 0.003) & (dram <= 0.02)
    mine = owner >= 0
    runs = find_intervals(
        owner[mine], time[mine], waits[mine], gap_s=3.5 * step, length_s=LONG_IDLE_S
    )
    at_end = runs.end_s + 4.5 * step >= allocations.end_s[runs.series]
    stuck = np.bincount(
        runs.series[at_end], runs.durations_s[at_end] + step, minlength=allocations.job.size
    ).astype(np.float64)
    return {"stuck_s": stuck}


def _work(table: Any, activity: Floats) -> Floats:
    """What rises and falls with the speed of a job: tensor activity, else watts, else activity."""
    for name in ("tensor_active", "power_w"):
        found = metric_mean(table, name)
        if not np.isnan(found).all():
            return found
    return activity


def _stray(
    table: Any, time: Floats, series: Ints, free: Flags, step: float
) -> UnallocatedUse:  # fmt: skip
    memory = metric_mean(table, "memory_used")
    free = free & (np.nan_to_num(memory) > MIN_UNALLOCATED_BYTES)
    runs = find_intervals(series, time, free, gap_s=3.5 * step, length_s=LONG_IDLE_S)
    low = np.searchsorted(series, runs.series, side="left")
    level = np.zeros(runs.series.size)
    for at, (key, start, end) in enumerate(
        zip(runs.series.tolist(), runs.start_s.tolist(), runs.end_s.tolist(), strict=True)
    ):
        own = slice(int(low[at]), int(np.searchsorted(series, key, side="right")))
        inside = (time[own] >= start) & (time[own] <= end)
        level[at] = float(np.nanmedian(memory[own][inside]))
    return UnallocatedUse(
        runs.series // 1024, runs.series % 1024, runs.start_s, runs.end_s + step, level
    )


def join_utilization(
    parts: Sequence[UtilizationPart], allocations: AllocationColumns
) -> tuple[GpuUtilization, UnallocatedUse]:
    """Put parts together; what no sample tells of is nan."""
    names = dict.fromkeys(name for part in parts for name in part.values)
    values = {name: np.full(allocations.job.size, np.nan) for name in names or _NAMES}
    for part in parts:
        for name, column in part.values.items():
            values[name][part.rows] = column
    values["seen_s"] = np.nan_to_num(values["seen_s"])
    uses = GpuUtilization(
        allocations.job,
        allocations.node,
        allocations.gpu,
        allocations.start_s,
        allocations.end_s,
        allocations.gpu_hours,
        values,
    )
    if not parts:
        none = np.zeros(0)
        return uses, UnallocatedUse(none.astype(np.int64), none.astype(np.int64), none, none, none)
    return uses, UnallocatedUse(
        *(
            np.concatenate(column)
            for column in zip(*(p.unallocated_use for p in parts), strict=True)
        )
    )


_NAMES = (
    "seen_s", "busy_s", *MEAN_METRICS, *(f"busy_{name}" for name in BUSY_MEAN_METRICS),
    *(f"peak_{name}" for name in MAX_METRICS), "clock_varies", *THROTTLE_BITS, "idle_s",
    "long_idle_s",
    "longest_idle_s", "lead_idle_s", "tail_idle_s", "stuck_s", *CHANGE_COLUMNS,
)  # fmt: skip
