"""Steps of a training run, how much they vary, and which of them are counted.

A step is the profiler's own mark on the host (`ProfilerStep#N`); where a trace has none, the ends
of the optimizer's steps (`Optimizer.step#…`) part it. `select_counted_spans` and
`count_complete_steps` are the one notion of which device work analyses look at, and of how many
steps it is: whole steps for every figure per step, the recorded window for where a device's time
goes.
"""

import re
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import (
    DeviceSpans,
    Flags,
    Ints,
    match_values,
    measure_total_ns,
    union,
)
from meshwright.timeline.memo import memoize
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline

_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d{1,18})(?!\d)")

_OPTIMIZER = "Optimizer.step#"

_PROFILER_STEP, _OPTIMIZER_STEP = "ProfilerStep", "Optimizer.step"

MAX_JOINED_STEP_GAP = 0.1
"""Steps of optimizers less apart than this part of the usual distance belong together."""


class TrainingStep(NamedTuple):
    """One step on one rank."""

    number: int
    """The profiler's number; counted from 0 where the optimizer's steps part the trace."""
    start_ns: int
    """Start on the host."""
    end_ns: int
    """End on the host."""
    num_spans: int
    """How many device spans it launched."""
    device_busy_ns: int
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
    steps: tuple[TrainingStep, ...]
    step_marker: str
    """What told the steps apart: `ProfilerStep`, `Optimizer.step`, or nothing (empty)."""

    @property
    def variation(self) -> float | None:
        """Standard deviation of their durations over the mean; None for fewer than two."""
        if len(self.steps) < 2:
            return None
        durations = np.array([step.duration_ns for step in self.steps], dtype=np.float64)
        return float(durations.std(ddof=1) / durations.mean()) if durations.any() else None

    @property
    def slowest_step(self) -> TrainingStep | None:
        """The step that took the host longest."""
        return max(self.steps, key=lambda step: step.duration_ns, default=None)


def find_steps(timeline: Timeline) -> tuple[RankSteps, ...]:
    """The steps of every rank."""
    return tuple(find_rank_steps(part) for part in timeline.split_by_rank())


@memoize
def find_rank_steps(part: Timeline) -> RankSteps:
    """The steps of one rank."""
    rank = part.ranks[0] if part.ranks else 0
    number, start, end, found_by = _bounds(part)
    if not number.size:
        return RankSteps(rank, (), "")
    spans = find_device_spans(part)
    found = []
    for index, own in enumerate(
        group_launches_by_step(find_launch_starts(part, spans), start, end)
    ):
        begins, ends = spans.start[own], spans.end[own]
        device = (int(begins.min()), int(ends.max())) if begins.size else (ABSENT, ABSENT)
        found.append(
            TrainingStep(
                int(number[index]),
                int(start[index]),
                int(end[index]),
                int(begins.size),
                measure_total_ns(union(begins, ends)),
                *device,
            )
        )
    return RankSteps(rank, tuple(found), found_by)


def group_launches_by_step(launched: Ints, start: Ints, end: Ints) -> list[Ints]:
    """The places of the launches inside each step, in order of time; steps are apart and sorted."""
    order = np.argsort(launched, kind="stable")
    first = np.searchsorted(launched[order], start, side="left")
    last = np.searchsorted(launched[order], end, side="left")
    return [order[low:high] for low, high in zip(first.tolist(), last.tolist(), strict=True)]


@memoize
def find_launch_starts(part: Timeline, spans: DeviceSpans) -> Ints:
    """When the host began to launch each device span; -1 where the trace does not say."""
    row = find_launch_rows(part, spans)
    begun: Ints = np.where(row >= 0, part.column("start_ns")[row], ABSENT)
    return begun


@memoize
def find_launch_rows(part: Timeline, spans: DeviceSpans) -> Ints:
    """The row of the call that launched each device span; -1 where the trace does not say."""
    flow = part.column("flow_out")
    callers = np.flatnonzero(flow >= 0)
    if not callers.size:
        return np.full(spans.flow.size, ABSENT, dtype=np.int64)
    callers = callers[np.argsort(flow[callers], kind="stable")]
    place = np.minimum(np.searchsorted(flow[callers], spans.flow), callers.size - 1)
    row: Ints = callers[place]
    return np.where((spans.flow >= 0) & (flow[row] == spans.flow), row, ABSENT)


@memoize
def mask_host_rows(part: Timeline) -> Flags:
    """Which rows are the host's own: neither device work nor marks projected onto a device."""
    on_device = match_values(part.string_column("process"), lambda value: value.startswith("gpu"))
    return ~on_device


@memoize
def number_threads(part: Timeline) -> Ints:
    """One number per process and lane, for every row."""
    lane, process = part.string_column("lane"), part.string_column("process")
    thread: Ints = process.codes.astype(np.int64) * max(len(lane.values), 1) + lane.codes
    return thread


@memoize
def _bounds(part: Timeline) -> tuple[Ints, Ints, Ints, str]:
    """Numbers, starts and ends of the steps, in order of time, and what told them apart."""
    names = part.string_column("name")
    start, duration = part.column("start_ns"), part.column("duration_ns")
    host = mask_host_rows(part)
    row = np.flatnonzero(host & match_values(names, _STEP.match))
    if row.size:
        row = row[np.argsort(start[row], kind="stable")]
        matches = (_STEP.match(names.values[code]) for code in names.codes[row].tolist())
        number = np.array([int(match[1]) for match in matches if match], dtype=np.int64)
        # Several processes or threads in one file may mark the same step.
        first = np.sort(np.unique(number, return_index=True)[1])
        number, row = number[first], row[first]
        return number, start[row], start[row] + duration[row], _PROFILER_STEP
    row = np.flatnonzero(host & match_values(names, lambda value: value.startswith(_OPTIMIZER)))
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
    apart = between > MAX_JOINED_STEP_GAP * np.quantile(between, 0.8)
    closes: Ints = end[np.append(apart, True)]
    return closes
