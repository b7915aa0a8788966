"""Steps of a training run, how much they vary, and which of them are counted.

A step is the profiler's own mark on the host (`ProfilerStep#N`); where a trace has none, the ends
of the optimizer's steps (`Optimizer.step#…`) part it. `counted` and `counted_steps` are the one
notion of which device work analyses look at, and of how many steps it is: whole steps for every
figure per step, the recorded window for where a device's time goes.
"""

import re
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans import (
    DeviceSpans,
    Flags,
    Ints,
    device_spans,
    distinct,
    measure,
    union,
    where,
)
from meshwright.timeline.once import once
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline, Window

_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d{1,18})(?!\d)")
_OPTIMIZER = "Optimizer.step#"
_PROFILER_STEP, _OPTIMIZER_STEP = "ProfilerStep", "Optimizer.step"
BACK_TO_BACK = 0.1
"""Steps of optimizers less apart than this part of the usual distance belong together."""


class Step(NamedTuple):
    """One step on one rank."""

    number: int
    """The profiler's number; counted from 0 where the optimizer's steps part the trace."""
    start_ns: int
    """Start on the host."""
    end_ns: int
    """End on the host."""
    num_spans: int
    """How many device spans it launched."""
    busy_ns: int
    """How long the device worked on what it launched."""
    device_start_ns: int
    """When the device began with it; -1 where it launched nothing."""
    device_end_ns: int
    """When the device had done it; -1 where it launched nothing."""

    @property
    def duration_ns(self) -> int:
        """How long the host took."""
        return self.end_ns - self.start_ns


class RankSteps(NamedTuple):
    """The steps of one rank, in order."""

    rank: int
    steps: tuple[Step, ...]
    found_by: str
    """What told the steps apart: `ProfilerStep`, `Optimizer.step`, or nothing (empty)."""

    @property
    def variation(self) -> float | None:
        """Standard deviation of their durations over the mean; None for fewer than two."""
        if len(self.steps) < 2:
            return None
        durations = np.array([step.duration_ns for step in self.steps], dtype=np.float64)
        return float(durations.std(ddof=1) / durations.mean()) if durations.any() else None

    @property
    def slowest(self) -> Step | None:
        """The step that took the host longest."""
        return max(self.steps, key=lambda step: step.duration_ns, default=None)


class Extent(StrEnum):
    """Which device work an analysis counts."""

    SETTLED = "settled"
    """What whole steps launched, whenever it ran.

    Work that was already queued when the profiler began belongs to no recorded step, and the last
    `ProfilerStep` may be recorded in part: both would be counted in part. So launches count from
    the host's start of the first step to its start of the last; of a single step, to its end. Ends
    of optimizer steps part whole steps, so that all between the first and the last count. Where a
    trace has no marks, all is counted."""
    WINDOW = "window"
    """What was launched before the latest mark of the last step, on host or device.

    As much of the recording as is surely complete, whole steps or not: where the device trails the
    host, a part of the last step is in it. Work queued before the profile began is left out. Where
    a trace has fewer than two of the profiler's steps, all is counted."""
    ALL = "all"
    """Everything that was recorded."""


CHOSEN = "chosen_steps"
"""Metadata of a timeline that holds nothing but whole steps: their numbers."""


def steps(timeline: Timeline) -> tuple[RankSteps, ...]:
    """The steps of every rank."""
    return tuple(steps_of(part) for part in timeline.by_rank())


@once
def steps_of(part: Timeline) -> RankSteps:
    """The steps of one rank."""
    rank = part.ranks[0] if part.ranks else 0
    number, start, end, found_by = _bounds(part)
    if not number.size:
        return RankSteps(rank, (), "")
    spans = device_spans(part)
    found = []
    for index, own in enumerate(by_step(launch_starts(part, spans), start, end)):
        begins, ends = spans.start[own], spans.end[own]
        device = (int(begins.min()), int(ends.max())) if begins.size else (ABSENT, ABSENT)
        found.append(
            Step(
                int(number[index]),
                int(start[index]),
                int(end[index]),
                int(begins.size),
                measure(union(begins, ends)),
                *device,
            )
        )
    return RankSteps(rank, tuple(found), found_by)


def by_step(launched: Ints, start: Ints, end: Ints) -> list[Ints]:
    """The places of the launches inside each step, in order of time; steps are apart and sorted."""
    order = np.argsort(launched, kind="stable")
    first = np.searchsorted(launched[order], start, side="left")
    last = np.searchsorted(launched[order], end, side="left")
    return [order[low:high] for low, high in zip(first.tolist(), last.tolist(), strict=True)]


class _Counted(NamedTuple):
    spans: DeviceSpans
    num_steps: int


def counted(part: Timeline, extent: Extent = Extent.SETTLED) -> DeviceSpans:
    """The device work of one rank that analyses count."""
    return _counted(part, extent).spans


def counted_steps(part: Timeline, extent: Extent = Extent.SETTLED) -> int:
    """How many whole steps the counted device work is; 0 where that is not known."""
    return _counted(part, extent).num_steps


@once
def counted_window(part: Timeline, extent: Extent = Extent.SETTLED) -> Window | None:
    """When the host launched what is counted; None where everything is."""
    if extent is Extent.ALL or CHOSEN in part.metadata:
        return None
    if extent is Extent.WINDOW:
        cut = _latest_mark(part)
        return None if cut is None else (0, cut)
    number, start, end, found_by = _bounds(part)
    if not number.size:
        return None
    whole = found_by == _OPTIMIZER_STEP or number.size == 1
    return int(start[0]), int(end[-1] if whole else start[-1])


def in_counted_steps(part: Timeline, row: Ints, extent: Extent = Extent.SETTLED) -> Ints:
    """Those of these rows of the host that start while counted work is launched."""
    window = counted_window(part, extent)
    if window is None:
        return row
    return row[_between(part.column("start_ns")[row], window)]


@once
def _counted(part: Timeline, extent: Extent) -> _Counted:
    spans = device_spans(part)
    number, _, _, found_by = _bounds(part)
    window = counted_window(part, extent)
    if window is not None:
        inside = _inside(part, spans, extent, window)
        last_cut = found_by == _PROFILER_STEP and number.size > 1
        if not inside.any():
            return _Counted(spans, 0)
        whole = number.size - last_cut if extent is Extent.SETTLED else 0
        return _Counted(spans.take(inside), whole)
    if CHOSEN in part.metadata:
        return _Counted(spans, len(part.metadata[CHOSEN].split(",")))
    if extent is Extent.WINDOW:
        return _Counted(spans, 0)
    # What comes before the first end of an optimizer's step is one more.
    return _Counted(spans, number.size + (found_by == _OPTIMIZER_STEP))


def _inside(part: Timeline, spans: DeviceSpans, extent: Extent, window: Window) -> Flags:
    """Which device work the host launched in a window."""
    launched = launch_starts(part, spans)
    known = launched != ABSENT
    if not known.any():
        if extent is Extent.WINDOW:
            return _between(spans.start, window)
        if _bounds(part)[0].size == 1:
            return np.ones(known.size, dtype=np.bool_)
        return _between(spans.start, _device_window(part) or window)
    if known.all():
        return _between(launched, window)
    # A stream works in the order of launches, so work without a recorded one (of the driver, which
    # older profilers leave out) was launched after what ran before it on its stream.
    order = np.argsort(spans.lane, kind="stable")
    last = np.maximum.accumulate(np.where(known[order], np.arange(order.size), 0))
    before = order[last]
    follows = known[before] & (spans.lane[before] == spans.lane[order])
    launched = launched.copy()
    launched[order[follows]] = launched[before[follows]]
    inside = _between(launched, window)
    # A stream of which no launch is known goes by time.
    alone = ~np.isin(spans.lane, spans.lane[known])
    if alone.any() and inside.any():
        later = spans.start[launched >= window[1]]
        first, end = spans.start[inside].min(), later.min(initial=np.iinfo(np.int64).max)
        inside |= alone & _between(spans.start, (first, end))
    return inside


def _between(moment: Ints, window: Window) -> Flags:
    inside: Flags = (moment >= window[0]) & (moment < window[1])
    return inside


def _latest_mark(part: Timeline) -> int | None:
    """When the latest mark of a step starts, on host or device; None for fewer than two steps."""
    names = part.strings("name")
    row = np.flatnonzero(where(names, _STEP.match))
    if distinct(names.codes[row]).size < 2:
        return None
    return int(part.column("start_ns")[row].max())


def _device_window(part: Timeline) -> Window | None:
    """From the first step's mark on a device to the last one's; None where there are no two."""
    names = part.strings("name")
    row = np.flatnonzero(~on_host(part) & where(names, _STEP.match))
    codes = distinct(names.codes[row])
    starts = {}
    for code in codes.tolist():
        match = _STEP.match(names.values[code])
        if match:
            starts[int(match[1])] = int(
                part.column("start_ns")[row][names.codes[row] == code].min()
            )
    return (starts[min(starts)], starts[max(starts)]) if len(starts) > 1 else None


@once
def launch_starts(part: Timeline, spans: DeviceSpans) -> Ints:
    """When the host began to launch each device span; -1 where the trace does not say."""
    row = launch_rows(part, spans)
    begun: Ints = np.where(row >= 0, part.column("start_ns")[row], ABSENT)
    return begun


@once
def launch_rows(part: Timeline, spans: DeviceSpans) -> Ints:
    """The row of the call that launched each device span; -1 where the trace does not say."""
    flow = part.column("flow_out")
    callers = np.flatnonzero(flow >= 0)
    if not callers.size:
        return np.full(spans.flow.size, ABSENT, dtype=np.int64)
    callers = callers[np.argsort(flow[callers], kind="stable")]
    place = np.minimum(np.searchsorted(flow[callers], spans.flow), callers.size - 1)
    row: Ints = callers[place]
    return np.where((spans.flow >= 0) & (flow[row] == spans.flow), row, ABSENT)


@once
def on_host(part: Timeline) -> Flags:
    """Which rows are the host's own: neither device work nor marks projected onto a device."""
    on_device = where(part.strings("process"), lambda value: value.startswith("gpu"))
    return ~on_device


@once
def threads(part: Timeline) -> Ints:
    """One number per process and lane, for every row."""
    lane, process = part.strings("lane"), part.strings("process")
    thread: Ints = process.codes.astype(np.int64) * max(len(lane.values), 1) + lane.codes
    return thread


@once
def _bounds(part: Timeline) -> tuple[Ints, Ints, Ints, str]:
    """Numbers, starts and ends of the steps, in order of time, and what told them apart."""
    names = part.strings("name")
    start, duration = part.column("start_ns"), part.column("duration_ns")
    host = on_host(part)
    row = np.flatnonzero(host & where(names, _STEP.match))
    if row.size:
        row = row[np.argsort(start[row], kind="stable")]
        matches = (_STEP.match(names.values[code]) for code in names.codes[row].tolist())
        number = np.array([int(match[1]) for match in matches if match], dtype=np.int64)
        # Several processes or threads in one file may mark the same step.
        first = np.sort(np.unique(number, return_index=True)[1])
        number, row = number[first], row[first]
        return number, start[row], start[row] + duration[row], _PROFILER_STEP
    row = np.flatnonzero(host & where(names, lambda value: value.startswith(_OPTIMIZER)))
    ends = _ends(start[row], start[row] + duration[row])
    if ends.size < 2:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, ""
    return np.arange(ends.size - 1), ends[:-1], ends[1:], _OPTIMIZER_STEP


def _ends(start: Ints, end: Ints) -> Ints:
    """Where steps of optimizers end; several that run one after the other are one step.

    Between those lies next to nothing, between steps a forward and a backward pass.
    """
    if start.size < 2:
        return end
    order = np.lexsort((-end, start))
    start, end = start[order], np.maximum.accumulate(end[order])
    between = start[1:] - end[:-1]
    apart = between > BACK_TO_BACK * np.quantile(between, 0.8)
    closes: Ints = end[np.append(apart, True)]
    return closes
