"""How the host feeds the device: delays, queues, regions that launching holds up, graphs.

A launch is the host's call whose flow a device span ends; a CUDA graph launches many with one call.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.idle import loading_spans, synchronising_calls
from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.spans import (
    DeviceSpans,
    Intervals,
    Ints,
    covered,
    distinct,
    union,
    where,
)
from meshwright.observe.analyze.steps import (
    Extent,
    by_step,
    counted,
    launch_rows,
    steps_of,
)
from meshwright.timeline.once import once
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline

BIN_NS = 1_000_000
"""Launch-bound regions are looked for in pieces of this length."""
SHORT_NS = 50_000
"""A mean kernel below this is short. Chosen, not measured, as are the next and the one before."""
LEAST_KERNELS = 10
"""A piece with fewer kernels than this is idle rather than busy with launching."""


class Spread(NamedTuple):
    """A series of times in short."""

    num: int
    mean_ns: float
    median_ns: float
    p99_ns: float
    max_ns: int


class Queue(NamedTuple):
    """Work that a stream has been given and has not begun."""

    lane: str
    mean_length: float
    """Over time, from its first launch to its last start."""
    max_length: int


class Region(NamedTuple):
    """A time in which launching holds up the device.

    The device is idle for more than half of it, its kernels are short, and the host neither waits
    for the device nor for data: it launches as fast as it can.
    """

    start_ns: int
    end_ns: int
    idle_ns: int
    num_kernels: int
    mean_kernel_ns: float


class GraphCandidate(NamedTuple):
    """Steps that launch the same kernels in the same order: a CUDA graph could replay them."""

    step_numbers: tuple[int, ...]
    num_launches: int
    """Calls of the host per step that one launch of a graph would replace."""
    idle_ns: int
    """Device idle per step, mean: the most that a graph could win."""
    num_synchronising: int
    """Calls per step, mean, that have to go first: a graph cannot hold them."""


class RankLaunches(NamedTuple):
    """How one rank's host feeds its device."""

    rank: int
    num_launches: int
    """Calls that launched counted work."""
    num_graph_launches: int
    """Of them, launches of CUDA graphs."""
    num_unknown: int
    """Device spans whose launch is not in the trace."""
    delay: Spread | None
    """From the end of the call to the start on the device, not below 0; None without launches."""
    call: Spread | None
    """Length of the calls."""
    num_shorter_than_call: int
    """Device spans that took the device less time than launching them took the host."""
    queues: tuple[Queue, ...]
    launch_bound: tuple[Region, ...]
    graph_candidates: tuple[GraphCandidate, ...]


def launches(timeline: Timeline, extent: Extent = Extent.SETTLED) -> tuple[RankLaunches, ...]:
    """How every rank's host feeds its device."""
    return tuple(launches_of(part, extent) for part in per_device(timeline))


@once
def launches_of(part: Timeline, extent: Extent = Extent.SETTLED) -> RankLaunches:
    """How one rank's host feeds its device."""
    spans = counted(part, extent)
    launch = launch_rows(part, spans)
    known = launch != ABSENT
    start, duration = part.column("start_ns"), part.column("duration_ns")
    calls = distinct(launch[known])
    of_graph = where(part.strings("name"), lambda name: "GraphLaunch" in name)
    single = known & ~of_graph[launch]
    delay = np.maximum(spans.start - start[launch] - duration[launch], 0)
    took = spans.end - spans.start
    return RankLaunches(
        rank=part.ranks[0] if part.ranks else 0,
        num_launches=int(calls.size),
        num_graph_launches=int(of_graph[calls].sum()),
        num_unknown=int((~known).sum()),
        delay=_spread(delay[single]),
        call=_spread(duration[calls]),
        num_shorter_than_call=int((took < duration[launch])[single].sum()),
        queues=_queues(spans, start[launch], known),
        launch_bound=_launch_bound(part, spans),
        graph_candidates=_graph_candidates(part, spans, launch, of_graph[launch] & known),
    )


def _spread(values: Ints) -> Spread | None:
    if not values.size:
        return None
    median, p99 = np.quantile(values, [0.5, 0.99]).tolist()
    return Spread(int(values.size), float(values.mean()), median, p99, int(values.max()))


def _queues(spans: DeviceSpans, launched: Ints, known: Ints) -> tuple[Queue, ...]:
    found = []
    for lane in np.unique(spans.lane[known]).tolist():
        own = known & (spans.lane == lane)
        time = np.append(launched[own], spans.start[own])
        change = np.repeat([1, -1], int(own.sum()))
        order = np.argsort(time, kind="stable")  # At equal times, launches come first.
        length, wide = np.cumsum(change[order])[:-1], np.diff(time[order])
        total = int(wide.sum())
        mean = float((length * wide).sum() / total) if total else 0.0
        found.append(Queue(spans.lanes[lane], mean, int(length.max(initial=0))))
    return tuple(found)


def _launch_bound(part: Timeline, spans: DeviceSpans) -> tuple[Region, ...]:
    low, high = spans.window_ns
    # Only pieces in which something starts: a trace may span centuries by one odd time.
    begin = low + BIN_NS * np.unique((spans.start - low) // BIN_NS)
    end = np.minimum(begin + BIN_NS, high)
    waits = np.flatnonzero(loading_spans(part) | synchronising_calls(part))
    since = part.column("start_ns")[waits]
    until = since + part.column("duration_ns")[waits]
    idle = end - begin - covered(spans.of(), begin, end)
    first, last = np.searchsorted(spans.start, begin), np.searchsorted(spans.start, end)
    number = last - first
    before = np.append(0, np.cumsum(spans.end - spans.start))
    length = before[last] - before[first]
    waited = covered(union(since, until), begin, end)
    bound = (
        (2 * idle > end - begin)
        & (number >= LEAST_KERNELS)
        & (length < SHORT_NS * number)
        & (waited == 0)
    )
    places = union(begin[bound], end[bound])
    return tuple(_regions(places, spans, before))


def _regions(places: Intervals, spans: DeviceSpans, before: Ints) -> list[Region]:
    idle = places.end - places.start - covered(spans.of(), places.start, places.end)
    first = np.searchsorted(spans.start, places.start)
    last = np.searchsorted(spans.start, places.end)
    mean = (before[last] - before[first]) / np.maximum(last - first, 1)
    columns = (places.start, places.end, idle, last - first, mean)
    return [Region(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _graph_candidates(
    part: Timeline, spans: DeviceSpans, launch: Ints, by_graph: Ints
) -> tuple[GraphCandidate, ...]:
    """Steps with the same sequence of kernels, copies and streams, put together."""
    start = part.column("start_ns")
    launched = np.where(launch != ABSENT, start[launch], ABSENT)
    keys = np.stack([spans.name, spans.lane, spans.kind], axis=1)
    waits, busy = np.sort(start[synchronising_calls(part)]), spans.of()
    marks = steps_of(part).steps
    begin, end = (np.array([mark[at] for mark in marks], dtype=np.int64) for at in (1, 2))
    syncs = np.searchsorted(waits, end) - np.searchsorted(waits, begin)
    inside = by_step(launched, begin, end)
    first, last = (np.array([mark[at] for mark in marks], dtype=np.int64) for at in (5, 6))
    idle = last - first - covered(busy, first, last)
    by_sequence: dict[bytes, list[tuple[int, int, int, int]]] = {}
    for place, own in enumerate(inside):
        alone = own[~by_graph[own]]
        if alone.size < LEAST_KERNELS:
            continue
        calls = int(distinct(launch[alone]).size)
        row = (marks[place].number, calls, int(idle[place]), int(syncs[place]))
        by_sequence.setdefault(keys[own].tobytes(), []).append(row)
    return tuple(
        GraphCandidate(
            tuple(row[0] for row in rows),
            rows[0][1],
            sum(row[2] for row in rows) // len(rows),
            round(sum(row[3] for row in rows) / len(rows)),
        )
        for rows in by_sequence.values()
        if len(rows) > 1
    )
