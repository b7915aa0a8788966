"""Why the device of a rank is idle, gap by gap.

A gap is a time in which nothing runs on the device, between its first start and last end. What
ends it was launched by the host at some moment; that tells the causes apart:

    launched before the gap began, or launch not known:
        kernel gap        the gap is shorter than 30 µs: the device's own delay between kernels
        other             a longer one: it waited for an event, a peer, memory, or nobody knows
    launched after it began: the device had nothing to do because the host was late
        data wait         the part of the gap in which a launching thread was in the data loader
        synchronization   the rest, if the host sat in a synchronizing call when the device ran dry,
                          and otherwise the part in which it sat in one
        host bound        what remains: Python, operators, launches were too slow

The five add up to the idle time, to the nanosecond.
"""

import re
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, select_counted_spans
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    DeviceSpans,
    Flags,
    Intervals,
    Ints,
    find_gaps,
    match_values,
    measure_covered_ns,
    subtract,
    union,
)
from meshwright.observe.analyze.spans.steps import find_launch_rows, mask_host_rows, number_threads
from meshwright.timeline.memo import memoize
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline

MAX_KERNEL_GAP_NS = 30_000
"""A gap between kernels that were launched in time, and shorter than this, is the device's own."""
SYNCHRONIZING_CALL_PATTERN = re.compile(
    r"^(cuda|cu|hip)(Device|Stream|Event|Ctx)Synchronize|^(cuda|hip)(Memcpy|Free)$|"
    r"^hipMemcpyWithStream$"
)
"""Calls in which the host waits for the device."""
DATA_LOADING_PATTERN = re.compile(
    r"^enumerate\(DataLoader\)#|dataloader\.py\(\d+\): __next__$|"
    r"(?i:^(## )?(load|data[_ ]?load(er|ing)?|"
    r"(load|get|next|fetch|prepare)(ing)?[_ ](next[_ ])?(data|batch|samples?|inputs?))( ##)?$)"
)
"""Spans in which the host waits for, or makes, the next batch: PyTorch's, and annotations."""


class IdleGapCause(StrEnum):
    """Why a gap is there."""

    HOST_BOUND = "host_bound"
    DATA_WAIT = "data_wait"
    SYNCHRONIZATION = "synchronization"
    KERNEL_GAP = "kernel_gap"
    OTHER = "other"


class IdleGap(NamedTuple):
    """One long gap."""

    start_ns: int
    end_ns: int
    cause: IdleGapCause
    """The cause of its greatest part."""
    span_before: str
    """What ran last before it."""
    span_after: str
    """What ended it."""


class RankIdle(NamedTuple):
    """The idle time of one rank's device by cause."""

    rank: int
    window_ns: int
    idle_ns: int
    host_bound_ns: int
    data_wait_ns: int
    synchronization_ns: int
    kernel_gap_ns: int
    other_ns: int
    num_gaps: int
    longest_gaps: tuple[IdleGap, ...]
    """The longest gaps, longest first."""


def analyze_idle(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> tuple[RankIdle, ...]:
    """Why the devices of all ranks are idle."""
    return tuple(analyze_rank_idle(part, extent) for part in split_by_device(timeline))


@memoize
def analyze_rank_idle(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS, *, num_longest: int = 10
) -> RankIdle:
    """Why the device of one rank is idle."""
    spans = select_counted_spans(part, extent)
    low, high = spans.window_ns
    empty = find_gaps(spans.intervals_of(), (low, high))
    length = empty.end - empty.start
    ending = np.searchsorted(spans.start, empty.end, side="left")
    launch = find_launch_rows(part, spans)[ending] if ending.size else ending
    known = launch != ABSENT
    late = known & (part.column("start_ns")[launch] > empty.start)
    loading, waiting = _host_waits(part, spans)
    data = np.where(late, measure_covered_ns(loading, empty.start, empty.end), 0)
    only_waiting = subtract(waiting, loading)
    dry = late & (measure_covered_ns(waiting, empty.start, empty.start + 1) > 0)
    sync = np.where(late, measure_covered_ns(only_waiting, empty.start, empty.end), 0)
    sync = np.where(dry, length - data, sync)
    short = ~late & (length < MAX_KERNEL_GAP_NS)
    parts = np.stack(
        [
            np.where(late, length - data - sync, 0),
            data,
            sync,
            np.where(short, length, 0),
            np.where(~late & ~short, length, 0),
        ]
    )
    host_bound, data_wait, synchronization, kernel_gap, other = parts.sum(axis=1).tolist()
    return RankIdle(
        rank=part.ranks[0] if part.ranks else 0,
        window_ns=high - low,
        idle_ns=int(length.sum()),
        host_bound_ns=host_bound,
        data_wait_ns=data_wait,
        synchronization_ns=synchronization,
        kernel_gap_ns=kernel_gap,
        other_ns=other,
        num_gaps=int(length.size),
        longest_gaps=_longest(spans, empty, parts, ending, num_longest),
    )


@memoize
def find_data_loading(part: Timeline) -> Flags:
    """Which rows are the host's, waiting for the next batch."""
    return mask_host_rows(part) & match_values(
        part.string_column("name"), DATA_LOADING_PATTERN.search
    )


@memoize
def find_synchronizing_calls(part: Timeline) -> Flags:
    """Which rows are calls in which the host waits for the device."""
    return mask_host_rows(part) & match_values(
        part.string_column("name"), SYNCHRONIZING_CALL_PATTERN.search
    )


def _host_waits(part: Timeline, spans: DeviceSpans) -> tuple[Intervals, Intervals]:
    """When the threads that launch work load data, and when they wait for the device."""
    start = part.column("start_ns")
    launch, thread = find_launch_rows(part, spans), number_threads(part)
    launching = np.zeros(int(thread.max(initial=0)) + 1, dtype=np.bool_)
    launching[thread[launch[launch != ABSENT]]] = True
    loads, waits = (
        rows[launching[thread[rows]]]
        for rows in map(np.flatnonzero, (find_data_loading(part), find_synchronizing_calls(part)))
    )
    duration = part.column("duration_ns")
    return (
        union(start[loads], start[loads] + duration[loads]),
        union(start[waits], start[waits] + duration[waits]),
    )


def _longest(
    spans: DeviceSpans, empty: Intervals, parts: Ints, ending: Ints, number: int
) -> tuple[IdleGap, ...]:
    length = empty.end - empty.start
    chosen = np.argsort(-length, kind="stable")[:number]
    by_end = np.argsort(spans.end, kind="stable")
    before = by_end[np.searchsorted(spans.end[by_end], empty.start[chosen], side="right") - 1]
    causes = tuple(IdleGapCause)
    return tuple(
        IdleGap(
            int(empty.start[gap]),
            int(empty.end[gap]),
            causes[int(parts[:, gap].argmax())],
            spans.names[spans.name[last]],
            spans.names[spans.name[ending[gap]]],
        )
        for gap, last in zip(chosen.tolist(), before.tolist(), strict=True)
    )
