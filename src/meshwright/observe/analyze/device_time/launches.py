"""How the host feeds the device: delays, queues, regions that launching holds up, graphs.

A launch is the host's call whose flow a device span ends; a CUDA graph launches many with one call.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.device_time.idle_time import (
    find_data_loading,
    find_synchronizing_calls,
)
from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, select_counted_spans
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    DeviceSpans,
    Intervals,
    Ints,
    match_values,
    measure_covered_ns,
    sort_unique,
    union,
)
from meshwright.observe.analyze.spans.steps import (
    find_launch_rows,
    find_rank_steps,
    group_launches_by_step,
)
from meshwright.timeline.memo import memoize
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline

BIN_NS = 1_000_000
"""Launch-bound regions are looked for in pieces of this length."""
SHORT_KERNEL_NS = 50_000
"""A mean kernel below this is short. Chosen, not measured, as are the next and the one before."""
MIN_KERNELS_PER_BIN = 10
"""A piece with fewer kernels than this is idle rather than busy with launching."""


class DurationStats(NamedTuple):
    """A series of times in short."""

    num_samples: int
    mean_ns: float
    median_ns: float
    p99_ns: float
    max_ns: int


class StreamQueue(NamedTuple):
    """Work that a stream has been given and has not begun."""

    lane: str
    mean_length: float
    """Over time, from its first launch to its last start."""
    max_length: int


class LaunchBoundRegion(NamedTuple):
    """A time in which launching holds up the device.

    The device is idle for more than half of it, its kernels are short, and the host neither waits
    for the device nor for data: it launches as fast as it can.
    """

    start_ns: int
    end_ns: int
    idle_ns: int
    num_kernels: int
    mean_kernel_ns: float


class CudaGraphCandidate(NamedTuple):
    """Steps that launch the same kernels in the same order: a CUDA graph could replay them."""

    step_numbers: tuple[int, ...]
    num_launches: int
    """Calls of the host per step that one launch of a graph would replace."""
    idle_ns: int
    """Device idle per step, mean: the most that a graph could win."""
    num_synchronizing_calls: int
    """Calls per step, mean, that have to go first: a graph cannot hold them."""


class RankLaunches(NamedTuple):
    """How one rank's host feeds its device."""

    rank: int
    num_launches: int
    """Calls that launched counted work."""
    num_graph_launches: int
    """Of them, launches of CUDA graphs."""
    num_unknown_launches: int
    """Device spans whose launch is not in the trace."""
    launch_delay: DurationStats | None
    """From the end of the call to the start on the device, not below 0; None without launches."""
    call_duration: DurationStats | None
    """Length of the calls."""
    num_kernels_shorter_than_call: int
    """Device spans that took the device less time than launching them took the host."""
    stream_queues: tuple[StreamQueue, ...]
    launch_bound_regions: tuple[LaunchBoundRegion, ...]
    graph_candidates: tuple[CudaGraphCandidate, ...]


def analyze_launches(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> tuple[RankLaunches, ...]:
    """How every rank's host feeds its device."""
    return tuple(analyze_rank_launches(part, extent) for part in split_by_device(timeline))


@memoize
def analyze_rank_launches(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> RankLaunches:
    """How one rank's host feeds its device."""
    spans = select_counted_spans(part, extent)
    launch = find_launch_rows(part, spans)
    known = launch != ABSENT
    start, duration = part.column("start_ns"), part.column("duration_ns")
    calls = sort_unique(launch[known])
    of_graph = match_values(part.string_column("name"), lambda name: "GraphLaunch" in name)
    single = known & ~of_graph[launch]
    delay = np.maximum(spans.start - start[launch] - duration[launch], 0)
    took = spans.end - spans.start
    return RankLaunches(
        rank=part.ranks[0] if part.ranks else 0,
        num_launches=int(calls.size),
        num_graph_launches=int(of_graph[calls].sum()),
        num_unknown_launches=int((~known).sum()),
        launch_delay=_spread(delay[single]),
        call_duration=_spread(duration[calls]),
        num_kernels_shorter_than_call=int((took < duration[launch])[single].sum()),
        stream_queues=_queues(spans, start[launch], known),
        launch_bound_regions=_launch_bound(part, spans),
        graph_candidates=_graph_candidates(part, spans, launch, of_graph[launch] & known),
    )


def _spread(values: Ints) -> DurationStats | None:
    if not values.size:
        return None
    median, p99 = np.quantile(values, [0.5, 0.99]).tolist()
    return DurationStats(int(values.size), float(values.mean()), median, p99, int(values.max()))


def _queues(spans: DeviceSpans, launched: Ints, known: Ints) -> tuple[StreamQueue, ...]:
    found = []
    for lane in np.unique(spans.lane[known]).tolist():
        own = known & (spans.lane == lane)
        time = np.append(launched[own], spans.start[own])
        change = np.repeat([1, -1], int(own.sum()))
        order = np.argsort(time, kind="stable")  # At equal times, launches come first.
        length, wide = np.cumsum(change[order])[:-1], np.diff(time[order])
        total = int(wide.sum())
        mean = float((length * wide).sum() / total) if total else 0.0
        found.append(StreamQueue(spans.lanes[lane], mean, int(length.max(initial=0))))
    return tuple(found)


def _launch_bound(part: Timeline, spans: DeviceSpans) -> tuple[LaunchBoundRegion, ...]:
    low, high = spans.window_ns
    # Only pieces in which something starts: a trace may span centuries by one odd time.
    begin = low + BIN_NS * np.unique((spans.start - low) // BIN_NS)
    end = np.minimum(begin + BIN_NS, high)
    waits = np.flatnonzero(find_data_loading(part) | find_synchronizing_calls(part))
    since = part.column("start_ns")[waits]
    until = since + part.column("duration_ns")[waits]
    idle = end - begin - measure_covered_ns(spans.intervals_of(), begin, end)
    first, last = np.searchsorted(spans.start, begin), np.searchsorted(spans.start, end)
    number = last - first
    before = np.append(0, np.cumsum(spans.end - spans.start))
    length = before[last] - before[first]
    waited = measure_covered_ns(union(since, until), begin, end)
    bound = (
        (2 * idle > end - begin)
        & (number >= MIN_KERNELS_PER_BIN)
        & (length < SHORT_KERNEL_NS * number)
        & (waited == 0)
    )
    places = union(begin[bound], end[bound])
    return tuple(_regions(places, spans, before))


def _regions(places: Intervals, spans: DeviceSpans, before: Ints) -> list[LaunchBoundRegion]:
    idle = (
        places.end
        - places.start
        - measure_covered_ns(spans.intervals_of(), places.start, places.end)
    )
    first = np.searchsorted(spans.start, places.start)
    last = np.searchsorted(spans.start, places.end)
    mean = (before[last] - before[first]) / np.maximum(last - first, 1)
    columns = (places.start, places.end, idle, last - first, mean)
    return [
        LaunchBoundRegion(*row)
        for row in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _graph_candidates(
    part: Timeline, spans: DeviceSpans, launch: Ints, by_graph: Ints
) -> tuple[CudaGraphCandidate, ...]:
    """Steps with the same sequence of kernels, copies and streams, put together."""
    start = part.column("start_ns")
    launched = np.where(launch != ABSENT, start[launch], ABSENT)
    keys = np.stack([spans.name, spans.lane, spans.kind], axis=1)
    waits, busy = np.sort(start[find_synchronizing_calls(part)]), spans.intervals_of()
    marks = find_rank_steps(part).steps
    begin, end = (np.array([mark[at] for mark in marks], dtype=np.int64) for at in (1, 2))
    syncs = np.searchsorted(waits, end) - np.searchsorted(waits, begin)
    inside = group_launches_by_step(launched, begin, end)
    first, last = (np.array([mark[at] for mark in marks], dtype=np.int64) for at in (5, 6))
    idle = last - first - measure_covered_ns(busy, first, last)
    by_sequence: dict[bytes, list[tuple[int, int, int, int]]] = {}
    for place, own in enumerate(inside):
        alone = own[~by_graph[own]]
        if alone.size < MIN_KERNELS_PER_BIN:
            continue
        calls = int(sort_unique(launch[alone]).size)
        row = (marks[place].number, calls, int(idle[place]), int(syncs[place]))
        by_sequence.setdefault(keys[own].tobytes(), []).append(row)
    return tuple(
        CudaGraphCandidate(
            tuple(row[0] for row in rows),
            rows[0][1],
            sum(row[2] for row in rows) // len(rows),
            round(sum(row[3] for row in rows) / len(rows)),
        )
        for rows in by_sequence.values()
        if len(rows) > 1
    )
