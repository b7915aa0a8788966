"""Why the device of a rank is idle, gap by gap.

A gap is a time in which nothing runs on the device, between its first start and last end. What
ends it was launched by the host at some moment; that tells the causes apart:

    launched before the gap began, or launch not known:
        kernel gap        the gap is shorter than 30 µs: the device's own delay between kernels
        other             a longer one: it waited for an event, a peer, memory, or nobody knows
    launched after it began: the device had nothing to do because the host was late
        data wait         the part of the gap in which a launching thread was in the data loader
        synchronisation   the rest, if the host sat in a synchronising call when the device ran dry,
                          and otherwise the part in which it sat in one
        host bound        what remains: Python, operators, launches were too slow

The five add up to the idle time, to the nanosecond.
"""

import re
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.spans import (
    DeviceSpans,
    Flags,
    Intervals,
    Ints,
    covered,
    gaps,
    subtract,
    union,
    where,
)
from meshwright.observe.analyze.steps import Extent, counted, launch_rows, on_host, threads
from meshwright.timeline.once import once
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline

KERNEL_GAP_NS = 30_000
"""A gap between kernels that were launched in time, and shorter than this, is the device's own."""
SYNCHRONISING = re.compile(
    r"^(cuda|cu|hip)(Device|Stream|Event|Ctx)Synchronize|^(cuda|hip)(Memcpy|Free)$|"
    r"^hipMemcpyWithStream$"
)
"""Calls in which the host waits for the device."""
LOADING = re.compile(
    r"^enumerate\(DataLoader\)#|dataloader\.py\(\d+\): __next__$|"
    r"(?i:^(## )?(load|data[_ ]?load(er|ing)?|"
    r"(load|get|next|fetch|prepare)(ing)?[_ ](next[_ ])?(data|batch|samples?|inputs?))( ##)?$)"
)
"""Spans in which the host waits for, or makes, the next batch: PyTorch's, and annotations."""


class Cause(StrEnum):
    """Why a gap is there."""

    HOST_BOUND = "host_bound"
    DATA_WAIT = "data_wait"
    SYNCHRONISATION = "synchronisation"
    KERNEL_GAP = "kernel_gap"
    OTHER = "other"


class Gap(NamedTuple):
    """One long gap."""

    start_ns: int
    end_ns: int
    cause: Cause
    """The cause of its greatest part."""
    before: str
    """What ran last before it."""
    after: str
    """What ended it."""


class RankIdle(NamedTuple):
    """The idle time of one rank's device by cause."""

    rank: int
    window_ns: int
    idle_ns: int
    host_bound_ns: int
    data_wait_ns: int
    synchronisation_ns: int
    kernel_gap_ns: int
    other_ns: int
    num_gaps: int
    longest: tuple[Gap, ...]
    """The longest gaps, longest first."""


def idle(timeline: Timeline, extent: Extent = Extent.SETTLED) -> tuple[RankIdle, ...]:
    """Why the devices of all ranks are idle."""
    return tuple(idle_of(part, extent) for part in per_device(timeline))


@once
def idle_of(part: Timeline, extent: Extent = Extent.SETTLED, *, num_longest: int = 10) -> RankIdle:
    """Why the device of one rank is idle."""
    spans = counted(part, extent)
    low, high = spans.window_ns
    empty = gaps(spans.of(), (low, high))
    length = empty.end - empty.start
    ending = np.searchsorted(spans.start, empty.end, side="left")
    launch = launch_rows(part, spans)[ending] if ending.size else ending
    known = launch != ABSENT
    late = known & (part.column("start_ns")[launch] > empty.start)
    loading, waiting = _host_waits(part, spans)
    data = np.where(late, covered(loading, empty.start, empty.end), 0)
    only_waiting = subtract(waiting, loading)
    dry = late & (covered(waiting, empty.start, empty.start + 1) > 0)
    sync = np.where(late, covered(only_waiting, empty.start, empty.end), 0)
    sync = np.where(dry, length - data, sync)
    short = ~late & (length < KERNEL_GAP_NS)
    parts = np.stack(
        [
            np.where(late, length - data - sync, 0),
            data,
            sync,
            np.where(short, length, 0),
            np.where(~late & ~short, length, 0),
        ]
    )
    host_bound, data_wait, synchronisation, kernel_gap, other = parts.sum(axis=1).tolist()
    return RankIdle(
        rank=part.ranks[0] if part.ranks else 0,
        window_ns=high - low,
        idle_ns=int(length.sum()),
        host_bound_ns=host_bound,
        data_wait_ns=data_wait,
        synchronisation_ns=synchronisation,
        kernel_gap_ns=kernel_gap,
        other_ns=other,
        num_gaps=int(length.size),
        longest=_longest(spans, empty, parts, ending, num_longest),
    )


@once
def loading_spans(part: Timeline) -> Flags:
    """Which rows are the host's, waiting for the next batch."""
    return on_host(part) & where(part.strings("name"), LOADING.search)


@once
def synchronising_calls(part: Timeline) -> Flags:
    """Which rows are calls in which the host waits for the device."""
    return on_host(part) & where(part.strings("name"), SYNCHRONISING.search)


def _host_waits(part: Timeline, spans: DeviceSpans) -> tuple[Intervals, Intervals]:
    """When the threads that launch work load data, and when they wait for the device."""
    start = part.column("start_ns")
    launch, thread = launch_rows(part, spans), threads(part)
    launching = np.zeros(int(thread.max(initial=0)) + 1, dtype=np.bool_)
    launching[thread[launch[launch != ABSENT]]] = True
    loads, waits = (
        rows[launching[thread[rows]]]
        for rows in map(np.flatnonzero, (loading_spans(part), synchronising_calls(part)))
    )
    duration = part.column("duration_ns")
    return (
        union(start[loads], start[loads] + duration[loads]),
        union(start[waits], start[waits] + duration[waits]),
    )


def _longest(
    spans: DeviceSpans, empty: Intervals, parts: Ints, ending: Ints, number: int
) -> tuple[Gap, ...]:
    length = empty.end - empty.start
    chosen = np.argsort(-length, kind="stable")[:number]
    by_end = np.argsort(spans.end, kind="stable")
    before = by_end[np.searchsorted(spans.end[by_end], empty.start[chosen], side="right") - 1]
    causes = tuple(Cause)
    return tuple(
        Gap(
            int(empty.start[gap]),
            int(empty.end[gap]),
            causes[int(parts[:, gap].argmax())],
            spans.names[spans.name[last]],
            spans.names[spans.name[ending[gap]]],
        )
        for gap, last in zip(chosen.tolist(), before.tolist(), strict=True)
    )
