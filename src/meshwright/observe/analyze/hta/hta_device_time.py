"""HTA's temporal breakdown, its overlap and its kernel types.

All three come of merged intervals and of what runs between their ends. Merging keeps negative
lengths, and the sweep keeps its running sum where ends precede starts: so does HTA.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.hta.hta_frame import (
    COMMUNICATION,
    COMPUTATION,
    MEMORY,
    HtaFrame,
    sort_as_hta,
)
from meshwright.observe.analyze.spans.intervals import Intervals, Ints, measure_total_ns

_BITS = {COMPUTATION: 1, COMMUNICATION: 2, MEMORY: 4}


class HtaTemporalBreakdown(NamedTuple):
    """A row of HTA's `get_temporal_breakdown`."""

    rank: int
    idle_us: int
    compute_us: int
    non_compute_us: int
    kernel_us: int
    """From the first start to the last end."""

    def percent(self, part_us: int) -> float | None:
        """A part of the kernel time as HTA prints it."""
        return round(100 * (part_us / self.kernel_us), 2) if self.kernel_us else None


class HtaKernelType(NamedTuple):
    """A row of HTA's kernel types, over all ranks."""

    kernel_type: str
    """One sort, or several that run at once: `COMPUTATION overlapping COMMUNICATION`."""
    sum_us: int
    percent: float


def get_temporal_breakdown(frame: HtaFrame) -> HtaTemporalBreakdown:
    """Idle, compute and other time of one rank."""
    device = frame.mask_device()
    busy = merge_intervals(device)
    device = device.take(sort_as_hta(device.ts))  # HTA sorts in place, then sorts a part again.
    compute_us = measure_total_ns(merge_intervals(device.match_kernel_type(COMPUTATION)))
    kernel_us = int(busy.end[-1] - busy.start[0]) if busy.start.size else 0
    idle_us = kernel_us - measure_total_ns(busy)
    non_compute_us = kernel_us - compute_us - idle_us
    return HtaTemporalBreakdown(frame.rank, idle_us, compute_us, non_compute_us, kernel_us)


def get_comm_comp_overlap(frame: HtaFrame) -> float | None:
    """The part of one rank's communication that runs beside computation, in percent."""
    device = frame.mask_device()
    communication = merge_intervals(device.match_kernel_type(COMMUNICATION))
    computation = merge_intervals(device.match_kernel_type(COMPUTATION))
    both_us = _NOTHING.add((communication, 1), (computation, 2)).spent().get(3, 0)
    total_us = measure_total_ns(communication)
    return round(100 * (both_us / total_us), 2) if total_us else None


def get_kernel_types(frames: tuple[HtaFrame, ...]) -> tuple[HtaKernelType, ...]:
    """How long each sort of kernel ran, alone or beside others, summed over ranks."""
    sums: dict[int, int] = {}
    for frame in frames:
        device, sweep = frame.mask_device(), _NOTHING
        for sort, bit in _BITS.items():
            sweep = sweep.add((merge_intervals(device.match_kernel_type(sort)), bit))
        for state, us in sweep.spent().items():
            sums[state] = sums.get(state, 0) + us
    ran = [(_label(state), us) for state, us in sums.items() if state > 0]
    total = sum(us for _, us in ran)
    found = sorted(ran, key=lambda item: -item[1])
    return tuple(HtaKernelType(label, us, round(us / total * 100, 1)) for label, us in found)


def merge_intervals(frame: HtaFrame) -> Intervals:
    """Intervals that overlap or touch, made one; a lone negative one stays negative."""
    if not frame.ts.size:
        return Intervals(frame.ts, frame.ts)
    order = sort_as_hta(frame.ts)
    start = frame.ts[order]
    reach = np.maximum.accumulate(start + frame.duration[order])
    opens = np.append(0, np.flatnonzero(start[1:] > reach[:-1]) + 1)
    ends = np.maximum.reduceat(start + frame.duration[order], opens)
    return Intervals(start[opens], ends)


class _Sweep(NamedTuple):
    """Moments at which something starts or ends, in order, and the change of what runs."""

    time: Ints
    change: Ints

    def add(self, *sets: tuple[Intervals, int]) -> "_Sweep":
        """Put in intervals, each with its weight, and sort."""
        time, change = [self.time], [self.change]
        for intervals, weight in sets:
            time += [intervals.start, intervals.end]
            change.append(np.repeat([weight, -weight], intervals.start.size))
        order = sort_as_hta(np.concatenate(time))
        return _Sweep(np.concatenate(time)[order], np.concatenate(change)[order])

    def spent(self) -> dict[int, int]:
        """How long each sum of weights ran."""
        running, length = np.cumsum(self.change)[:-1], np.diff(self.time)
        return {state: int(length[running == state].sum()) for state in np.unique(running).tolist()}


_NOTHING = _Sweep(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _label(state: int) -> str:
    return " overlapping ".join(sort for sort, bit in _BITS.items() if state & bit)
