"""Steps of a training run, how much they vary, and which device work is counted.

A step is the profiler's own mark on the host (`ProfilerStep#N`); where a trace has none, the ends
of the optimizer's steps (`Optimizer.step#…`) part it. Knows names of marks; measures nothing else.
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
from meshwright.timeline.timeline import Timeline

_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d+)")
_OPTIMIZER = "Optimizer.step#"


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
    """What the recorded steps launched, up to the latest mark of the last one (host or device).

    Work that was already queued when the profiler began has no recorded launch, and work of the
    last step may still run when it stops: both would be counted in part. Where a trace has fewer
    than two steps, or no launches, nothing can be told and all is counted (up to the mark)."""
    ALL = "all"
    """Everything that was recorded."""


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


@once
def counted(part: Timeline, extent: Extent = Extent.SETTLED) -> DeviceSpans:
    """The device work of one rank that analyses count."""
    spans = device_spans(part)
    cut = None if extent is Extent.ALL else cut_ns(part)
    if cut is None:
        return spans
    launched = launch_starts(part, spans)
    if not np.any(launched != ABSENT):
        return spans.take(spans.start < cut)
    return spans.take((launched != ABSENT) & (launched < cut))


@once
def cut_ns(part: Timeline) -> int | None:
    """When the last step's latest mark starts, on host or device; None for fewer than two steps."""
    names = part.strings("name")
    is_step = where(names, _STEP.match)
    if len({names.values[code] for code in np.unique(names.codes[is_step])}) < 2:
        return None
    return int(part.column("start_ns")[is_step].max())


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
        return number, start[row], start[row] + duration[row], "ProfilerStep"
    row = np.flatnonzero(host & where(names, lambda value: value.startswith(_OPTIMIZER)))
    ends = distinct(start[row] + duration[row])
    if ends.size < 2:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none, ""
    return np.arange(ends.size - 1), ends[:-1], ends[1:], "Optimizer.step"
