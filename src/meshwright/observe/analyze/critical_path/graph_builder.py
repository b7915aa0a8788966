"""Builds the dependency graph of a window from the timelines of one or more ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.collectives.matched_collectives import (
    MatchedCollectives,
    match_collectives,
)
from meshwright.observe.analyze.critical_path.dependency_graph import (
    DependencyGraph,
    DependencyGraphBuilder,
    EdgeCause,
    NodeKind,
)
from meshwright.observe.analyze.critical_path.device_dependencies import (
    DeviceDependencies,
    find_device_dependencies,
)
from meshwright.observe.analyze.critical_path.device_work import DeviceWork, find_device_work
from meshwright.observe.analyze.critical_path.host_events import HostEvents, find_host_events
from meshwright.observe.analyze.spans.intervals import Flags, Ints, match_values
from meshwright.timeline.timeline import Timeline, Window

WAIT = "wait for other ranks"


class RankBarrier(NamedTuple):
    """The work of one rank that starts at a meeting."""

    barrier_id: Ints
    """The meeting of each work; -1 for most."""
    ready_ns: Ints
    """When the rank was ready for it."""
    start_ns: Ints
    """When it started."""


def find_rank_barriers(
    parts: Mapping[int, Timeline], devices: Mapping[int, DeviceWork]
) -> dict[int, RankBarrier]:
    """Find the work that starts when such a wait ends, on all ranks that have some."""
    waits = {rank: _waits(parts[rank]) for rank in devices}
    moments = np.unique(np.concatenate([end for _, end in waits.values()] or [np.zeros(0)]))
    found = {}
    for rank, device in devices.items():
        number = np.full(device.row.size, -1, dtype=np.int64)
        begun, ended = waits[rank]
        ready = device.start.copy()
        for meeting, moment in enumerate(moments.tolist()):
            starting = np.flatnonzero(device.start == moment)[:1]
            number[starting] = meeting
            ready[starting] = min([moment, *begun[ended == moment].tolist()])
        found[rank] = RankBarrier(number, ready, device.start)
    return found


def _waits(part: Timeline) -> tuple[Ints, Ints]:
    rows = np.flatnonzero(match_values(part.string_column("name"), lambda name: name == WAIT))
    start = part.column("start_ns")[rows]
    return start, start + part.column("duration_ns")[rows]


_NONE: Ints = np.zeros(0, dtype=np.int64)


class WindowGraph(NamedTuple):
    """A graph, and what its rows and calls refer to."""

    graph: DependencyGraph
    rank_timelines: dict[int, Timeline]
    """The timeline of each rank."""
    windows: dict[int, Window]
    collectives: MatchedCollectives


class _Rank(NamedTuple):
    """One rank's part of a draft."""

    rank: int
    window: Window
    device: DeviceWork
    points: HostEvents
    call: Ints
    """The collective of each work that other ranks are in too; -1 where it is none."""
    tied: Flags
    """Which work is the receive of a send that is known."""
    met: RankBarrier
    """Which work starts where all ranks wait for each other."""
    host: Ints = _NONE
    """Nodes of the points, and of the host's end."""
    begin: Ints = _NONE
    """Node at which each work starts."""
    finish: Ints = _NONE
    """Node with which each work ends."""


def build_window_graph(
    timeline: Timeline,
    windows: Mapping[int, Window],
    collectives: MatchedCollectives | None = None,
) -> WindowGraph:
    """Return the dependencies between everything that these windows hold, rank by rank."""
    matched = match_collectives(timeline) if collectives is None else collectives
    parts = {
        int(part.column("rank")[0]): part for part in timeline.split_by_rank() if part.num_spans
    }
    ranks = _ranks(parts, windows, matched)
    draft = DependencyGraphBuilder()
    ranks = [_with_nodes(draft, one) for one in ranks]
    _tie_collectives(draft, ranks)
    _tie_meetings(draft, ranks)
    _tie_messages(draft, parts, ranks)
    for one in ranks:
        _add_host(draft, one)
        _add_device(draft, one, find_device_dependencies(parts[one.rank], one.device, one.tied))
    return WindowGraph(draft.build(), parts, dict(windows), matched)


def _ranks(
    parts: Mapping[int, Timeline], windows: Mapping[int, Window], matched: MatchedCollectives
) -> list[_Rank]:
    """Collect what each window holds, with the ends that collectives and messages allow."""
    devices = {rank: find_device_work(parts[rank], window) for rank, window in windows.items()}
    sent = [parts[rank].column("flow_out")[device.row] for rank, device in devices.items()]
    met_at = find_rank_barriers(parts, devices)
    flows = np.concatenate([_NONE, *sent])
    flows = flows[flows >= 0]
    calls = {rank: _calls_of(matched, rank, device) for rank, device in devices.items()}
    counts = np.zeros(matched.calls.op.size + 1, dtype=np.int64)
    for own in calls.values():
        np.add.at(counts, own[own >= 0], 1)
    ranks = []
    for rank, window in windows.items():
        device, call = devices[rank], calls[rank]
        call = np.where(counts[call] > 1, call, -1)
        met = call >= 0
        end, start = device.end.copy(), device.start.copy()
        # No member ends before the last arrives; clocks may say so by some microseconds.
        end[met] = np.maximum(end[met], matched.arrival_ns[call[met]] + 1)
        tied = np.isin(device.flow, flows) & (device.flow >= 0) & (device.launch_time < 0)
        # A receive is posted ahead of time: only its end says something.
        start[tied] = end[tied]
        device = device._replace(start=start, end=end, order_by_end=np.argsort(end, kind="stable"))
        points = find_host_events(parts[rank], device, window)
        ranks.append(_Rank(rank, window, device, points, call, tied, met_at[rank]))
    return ranks


def _calls_of(matched: MatchedCollectives, rank: int, device: DeviceWork) -> Ints:
    """The matched collective of each work; -1 where it is none."""
    own = np.flatnonzero(matched.members.rank == rank)
    own = own[np.argsort(matched.members.row[own])]
    rows = matched.members.row[own]
    found = np.full(device.row.size, -1, dtype=np.int64)
    if own.size:
        at = np.minimum(np.searchsorted(rows, device.row), own.size - 1)
        hit = rows[at] == device.row
        found[hit] = matched.members.call_index[own[at[hit]]]
    return found


def _with_nodes(draft: DependencyGraphBuilder, one: _Rank) -> _Rank:
    device, called, meets = one.device, one.call >= 0, one.met.barrier_id >= 0
    host = draft.add_nodes(NodeKind.HOST, one.rank, np.append(one.points.time, one.points.last_ns))
    begin, finish = np.empty_like(device.row), np.empty_like(device.row)
    plain = ~called
    # A moment later than the arrival it waits for, so that it comes behind it in order.
    start = device.start + meets
    finish[plain] = draft.add_nodes(
        NodeKind.DEVICE_WORK,
        one.rank,
        start[plain],
        length=np.maximum(device.end - start, 0)[plain],
        row=device.row[plain],
    )
    begin[plain] = finish[plain]
    finish[called] = draft.add_nodes(
        NodeKind.COLLECTIVE_END,
        one.rank,
        device.end[called],
        row=device.row[called],
        call=one.call[called],
    )
    begin[called] = draft.add_nodes(
        NodeKind.COLLECTIVE_START,
        one.rank,
        device.start[called],
        row=device.row[called],
        call=one.call[called],
    )
    ready = one.met.ready_ns[meets]
    begin[meets] = draft.add_nodes(
        NodeKind.COLLECTIVE_START, one.rank, ready, row=device.row[meets]
    )
    # What the rank itself needed was there when it was ready.
    start = np.where(meets, one.met.ready_ns, device.start)
    return one._replace(device=device._replace(start=start), host=host, begin=begin, finish=finish)


def _tie_collectives(draft: DependencyGraphBuilder, ranks: list[_Rank]) -> None:
    """Let every member wait for the last one, then for the data."""
    starts, ends = [one.device.start for one in ranks], [one.device.end for one in ranks]
    _tie(draft, ranks, [one.call for one in ranks], (starts, ends), EdgeCause.TRANSFER)


def _tie_meetings(draft: DependencyGraphBuilder, ranks: list[_Rank]) -> None:
    """Let the work behind a meeting wait until every rank is ready."""
    numbers, ready = [one.met.barrier_id for one in ranks], [one.met.ready_ns for one in ranks]
    _tie(
        draft,
        ranks,
        numbers,
        (ready, [one.met.start_ns + 1 for one in ranks]),
        EdgeCause.RANK_BARRIER,
    )


def _tie(
    draft: DependencyGraphBuilder,
    ranks: list[_Rank],
    calls: list[Ints],
    moments: tuple[list[Ints], list[Ints]],
    cause: EdgeCause,
) -> None:
    """Tie the starts of every call to one arrival, and that to the ends."""
    size = 1 + max((int(call.max(initial=-1)) for call in calls), default=-1)
    latest = np.full(size, -1, dtype=np.int64)
    for call, start in zip(calls, moments[0], strict=True):
        np.maximum.at(latest, call[call >= 0], start[call >= 0])
    used = np.flatnonzero(latest >= 0)
    node_of = np.full(size, -1, dtype=np.int64)
    number = used if cause is EdgeCause.TRANSFER else np.full(used.size, -1)
    node_of[used] = draft.add_nodes(NodeKind.ARRIVAL, -1, latest[used], call=number)
    for one, call, end in zip(ranks, calls, moments[1], strict=True):
        places = np.flatnonzero(call >= 0)
        there = node_of[call[places]]
        draft.add_edges(one.begin[places], there, np.zeros_like(places), EdgeCause.MEMBER)
        lag = np.maximum(0, end[places] - latest[call[places]])
        draft.add_edges(there, one.finish[places], lag, cause)


def _tie_messages(
    draft: DependencyGraphBuilder, parts: Mapping[int, Timeline], ranks: list[_Rank]
) -> None:
    """Tie receives to the sends of other ranks that their flows name."""
    flows = [parts[one.rank].column("flow_out")[one.device.row] for one in ranks]
    some = [np.flatnonzero(own >= 0) for own in flows]
    both = list(zip(ranks, some, strict=True))
    flow = np.concatenate([_NONE, *(own[at] for own, at in zip(flows, some, strict=True))])
    node = np.concatenate([_NONE, *(one.finish[at] for one, at in both)])
    end = np.concatenate([_NONE, *(one.device.end[at] for one, at in both)])
    order = np.argsort(flow, kind="stable")
    for one in ranks:
        own = np.flatnonzero(one.tied)
        at = order[np.searchsorted(flow[order], one.device.flow[own])] if own.size else own
        lag = np.maximum(0, one.device.end[own] - end[at])
        draft.add_edges(node[at], one.finish[own], lag, EdgeCause.MESSAGE)


def _add_host(draft: DependencyGraphBuilder, one: _Rank) -> None:
    """Chain the host's points; where it waits, the device decides and not the host."""
    points = one.points
    time = np.append(points.time, points.last_ns)
    waits = np.append(points.awaited >= 0, False)
    lag = np.where(waits[1:], 0, np.diff(time))
    draft.add_edges(one.host[:-1], one.host[1:], lag, EdgeCause.HOST)
    ends = np.flatnonzero(points.awaited >= 0)
    awaited = points.awaited[ends]
    lag = points.time[ends] - one.device.end[awaited]
    seen = lag >= 0
    draft.add_edges(one.finish[awaited[seen]], one.host[ends[seen]], lag[seen], EdgeCause.SYNC)


def _add_device(draft: DependencyGraphBuilder, one: _Rank, depends: DeviceDependencies) -> None:
    """Tie work to its launch, its stream and what else it waited for."""
    device, points = one.device, one.points
    launches = np.flatnonzero(points.launch >= 0)
    launches = launches[np.argsort(points.launch[launches], kind="stable")]
    source = one.finish[np.maximum(depends.source, 0)]
    launch = depends.cause == int(EdgeCause.LAUNCH)
    at = np.searchsorted(points.launch[launches], device.flow[depends.target[launch]])
    source[launch] = one.host[launches[at]]
    held = depends.waits_for_earlier_work
    source[held] = draft.add_nodes(
        NodeKind.BEFORE, one.rank, device.earlier_work_end[depends.target[held]]
    )
    target = one.begin[depends.target]
    for cause in np.unique(depends.cause).tolist():
        some = depends.cause == cause
        draft.add_edges(source[some], target[some], depends.lag_ns[some], EdgeCause(cause))
