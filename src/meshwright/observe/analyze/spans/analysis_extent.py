"""`AnalysisExtent`: which device spans an analysis counts (complete steps, window or all)."""

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import (
    DeviceSpans,
    Flags,
    Ints,
    match_values,
    sort_unique,
)
from meshwright.observe.analyze.spans.steps import (
    _OPTIMIZER_STEP,
    _PROFILER_STEP,
    _STEP,
    _bounds,
    find_launch_starts,
    mask_host_rows,
)
from meshwright.timeline.memo import memoize
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline, Window


class AnalysisExtent(StrEnum):
    """Which device work an analysis counts."""

    COMPLETE_STEPS = "settled"
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


CHOSEN_STEPS_KEY = "chosen_steps"
"""Metadata of a timeline that holds nothing but whole steps: their numbers."""


class _Counted(NamedTuple):
    spans: DeviceSpans
    num_steps: int


def select_counted_spans(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> DeviceSpans:
    """The device work of one rank that analyses count."""
    return _counted(part, extent).spans


def count_complete_steps(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> int:
    """How many whole steps the counted device work is; 0 where that is not known."""
    return _counted(part, extent).num_steps


@memoize
def find_counted_window(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> Window | None:
    """When the host launched what is counted; None where everything is."""
    if extent is AnalysisExtent.ALL or CHOSEN_STEPS_KEY in part.metadata:
        return None
    if extent is AnalysisExtent.WINDOW:
        cut = _latest_mark(part)
        return None if cut is None else (0, cut)
    number, start, end, found_by = _bounds(part)
    if not number.size:
        return None
    whole = found_by == _OPTIMIZER_STEP or number.size == 1
    return int(start[0]), int(end[-1] if whole else start[-1])


def mask_counted_rows(
    part: Timeline, row: Ints, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> Ints:
    """Those of these rows of the host that start while counted work is launched."""
    window = find_counted_window(part, extent)
    if window is None:
        return row
    return row[_between(part.column("start_ns")[row], window)]


@memoize
def _counted(part: Timeline, extent: AnalysisExtent) -> _Counted:
    spans = find_device_spans(part)
    number, _, _, found_by = _bounds(part)
    window = find_counted_window(part, extent)
    if window is not None:
        inside = _inside(part, spans, extent, window)
        last_cut = found_by == _PROFILER_STEP and number.size > 1
        if not inside.any():
            return _Counted(spans, 0)
        whole = number.size - last_cut if extent is AnalysisExtent.COMPLETE_STEPS else 0
        return _Counted(spans.take(inside), whole)
    if CHOSEN_STEPS_KEY in part.metadata:
        return _Counted(spans, len(part.metadata[CHOSEN_STEPS_KEY].split(",")))
    if extent is AnalysisExtent.WINDOW:
        return _Counted(spans, 0)
    # What comes before the first end of an optimizer's step is one more.
    return _Counted(spans, number.size + (found_by == _OPTIMIZER_STEP))


def _inside(part: Timeline, spans: DeviceSpans, extent: AnalysisExtent, window: Window) -> Flags:
    """Which device work the host launched in a window."""
    launched = find_launch_starts(part, spans)
    known = launched != ABSENT
    if not known.any():
        if extent is AnalysisExtent.WINDOW:
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
    names = part.string_column("name")
    row = np.flatnonzero(match_values(names, _STEP.match))
    if sort_unique(names.codes[row]).size < 2:
        return None
    return int(part.column("start_ns")[row].max())


def _device_window(part: Timeline) -> Window | None:
    """From the first step's mark on a device to the last one's; None where there are no two."""
    names = part.string_column("name")
    row = np.flatnonzero(~mask_host_rows(part) & match_values(names, _STEP.match))
    codes = sort_unique(names.codes[row])
    starts = {}
    for code in codes.tolist():
        match = _STEP.match(names.values[code])
        if match:
            starts[int(match[1])] = int(
                part.column("start_ns")[row][names.codes[row] == code].min()
            )
    return (starts[min(starts)], starts[max(starts)]) if len(starts) > 1 else None
