"""Builds the dependency graph of a window from the timelines of one or more ranks."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.collectives import Collectives, match_collectives
from meshwright.observe.analyze.critical_path.depends import Depends, depends_of
from meshwright.observe.analyze.critical_path.device import Device, device_of
from meshwright.observe.analyze.critical_path.graph import Cause, Draft, Graph, Node
from meshwright.observe.analyze.critical_path.host import Points, points_of
from meshwright.observe.analyze.critical_path.meetings import Met, meetings
from meshwright.observe.analyze.spans import Flags, Ints
from meshwright.timeline.timeline import Timeline, Window

_NONE: Ints = np.zeros(0, dtype=np.int64)


class Built(NamedTuple):
    """A graph, and what its rows and calls refer to."""

    graph: Graph
    parts: dict[int, Timeline]
    """The timeline of each rank."""
    windows: dict[int, Window]
    collectives: Collectives


class _Rank(NamedTuple):
    """One rank's part of a draft."""

    rank: int
    window: Window
    device: Device
    points: Points
    call: Ints
    """The collective of each work that other ranks are in too; -1 where it is none."""
    tied: Flags
    """Which work is the receive of a send that is known."""
    met: Met
    """Which work starts where all ranks wait for each other."""
    host: Ints = _NONE
    """Nodes of the points, and of the host's end."""
    begin: Ints = _NONE
    """Node at which each work starts."""
    finish: Ints = _NONE
    """Node with which each work ends."""


def build(
    timeline: Timeline,
    windows: Mapping[int, Window],
    collectives: Collectives | None = None,
) -> Built:
    """Return the dependencies between everything that these windows hold, rank by rank."""
    matched = match_collectives(timeline) if collectives is None else collectives
    parts = {int(part.column("rank")[0]): part for part in timeline.by_rank() if part.num_spans}
    ranks = _ranks(parts, windows, matched)
    draft = Draft()
    ranks = [_with_nodes(draft, one) for one in ranks]
    _tie_collectives(draft, ranks)
    _tie_meetings(draft, ranks)
    _tie_messages(draft, parts, ranks)
    for one in ranks:
        _add_host(draft, one)
        _add_device(draft, one, depends_of(parts[one.rank], one.device, one.tied))
    return Built(draft.graph(), parts, dict(windows), matched)


def _ranks(
    parts: Mapping[int, Timeline], windows: Mapping[int, Window], matched: Collectives
) -> list[_Rank]:
    """Collect what each window holds, with the ends that collectives and messages allow."""
    devices = {rank: device_of(parts[rank], window) for rank, window in windows.items()}
    sent = [parts[rank].column("flow_out")[device.row] for rank, device in devices.items()]
    met_at = meetings(parts, devices)
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
        tied = np.isin(device.flow, flows) & (device.flow >= 0) & (device.launched < 0)
        # A receive is posted ahead of time: only its end says something.
        start[tied] = end[tied]
        device = device._replace(start=start, end=end, by_end=np.argsort(end, kind="stable"))
        points = points_of(parts[rank], device, window)
        ranks.append(_Rank(rank, window, device, points, call, tied, met_at[rank]))
    return ranks


def _calls_of(matched: Collectives, rank: int, device: Device) -> Ints:
    """The matched collective of each work; -1 where it is none."""
    own = np.flatnonzero(matched.members.rank == rank)
    own = own[np.argsort(matched.members.row[own])]
    rows = matched.members.row[own]
    found = np.full(device.row.size, -1, dtype=np.int64)
    if own.size:
        at = np.minimum(np.searchsorted(rows, device.row), own.size - 1)
        hit = rows[at] == device.row
        found[hit] = matched.members.call[own[at[hit]]]
    return found


def _with_nodes(draft: Draft, one: _Rank) -> _Rank:
    device, called, meets = one.device, one.call >= 0, one.met.number >= 0
    host = draft.nodes(Node.HOST, one.rank, np.append(one.points.time, one.points.last_ns))
    begin, finish = np.empty_like(device.row), np.empty_like(device.row)
    plain = ~called
    # A moment later than the arrival it waits for, so that it comes behind it in order.
    start = device.start + meets
    finish[plain] = draft.nodes(
        Node.WORK,
        one.rank,
        start[plain],
        length=np.maximum(device.end - start, 0)[plain],
        row=device.row[plain],
    )
    begin[plain] = finish[plain]
    finish[called] = draft.nodes(
        Node.COLLECTIVE_END,
        one.rank,
        device.end[called],
        row=device.row[called],
        call=one.call[called],
    )
    begin[called] = draft.nodes(
        Node.COLLECTIVE_START,
        one.rank,
        device.start[called],
        row=device.row[called],
        call=one.call[called],
    )
    ready = one.met.ready[meets]
    begin[meets] = draft.nodes(Node.COLLECTIVE_START, one.rank, ready, row=device.row[meets])
    # What the rank itself needed was there when it was ready.
    start = np.where(meets, one.met.ready, device.start)
    return one._replace(device=device._replace(start=start), host=host, begin=begin, finish=finish)


def _tie_collectives(draft: Draft, ranks: list[_Rank]) -> None:
    """Let every member wait for the last one, then for the data."""
    starts, ends = [one.device.start for one in ranks], [one.device.end for one in ranks]
    _tie(draft, ranks, [one.call for one in ranks], (starts, ends), Cause.TRANSFER)


def _tie_meetings(draft: Draft, ranks: list[_Rank]) -> None:
    """Let the work behind a meeting wait until every rank is ready."""
    numbers, ready = [one.met.number for one in ranks], [one.met.ready for one in ranks]
    _tie(draft, ranks, numbers, (ready, [one.met.start + 1 for one in ranks]), Cause.MEETING)


def _tie(
    draft: Draft,
    ranks: list[_Rank],
    calls: list[Ints],
    moments: tuple[list[Ints], list[Ints]],
    cause: Cause,
) -> None:
    """Tie the starts of every call to one arrival, and that to the ends."""
    size = 1 + max((int(call.max(initial=-1)) for call in calls), default=-1)
    latest = np.full(size, -1, dtype=np.int64)
    for call, start in zip(calls, moments[0], strict=True):
        np.maximum.at(latest, call[call >= 0], start[call >= 0])
    used = np.flatnonzero(latest >= 0)
    node_of = np.full(size, -1, dtype=np.int64)
    number = used if cause is Cause.TRANSFER else np.full(used.size, -1)
    node_of[used] = draft.nodes(Node.ARRIVAL, -1, latest[used], call=number)
    for one, call, end in zip(ranks, calls, moments[1], strict=True):
        places = np.flatnonzero(call >= 0)
        there = node_of[call[places]]
        draft.edges(one.begin[places], there, np.zeros_like(places), Cause.MEMBER)
        lag = np.maximum(0, end[places] - latest[call[places]])
        draft.edges(there, one.finish[places], lag, cause)


def _tie_messages(draft: Draft, parts: Mapping[int, Timeline], ranks: list[_Rank]) -> None:
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
        draft.edges(node[at], one.finish[own], lag, Cause.MESSAGE)


def _add_host(draft: Draft, one: _Rank) -> None:
    """Chain the host's points; where it waits, the device decides and not the host."""
    points = one.points
    time = np.append(points.time, points.last_ns)
    waits = np.append(points.awaited >= 0, False)
    lag = np.where(waits[1:], 0, np.diff(time))
    draft.edges(one.host[:-1], one.host[1:], lag, Cause.HOST)
    ends = np.flatnonzero(points.awaited >= 0)
    awaited = points.awaited[ends]
    lag = points.time[ends] - one.device.end[awaited]
    seen = lag >= 0
    draft.edges(one.finish[awaited[seen]], one.host[ends[seen]], lag[seen], Cause.SYNC)


def _add_device(draft: Draft, one: _Rank, depends: Depends) -> None:
    """Tie work to its launch, its stream and what else it waited for."""
    device, points = one.device, one.points
    launches = np.flatnonzero(points.launch >= 0)
    launches = launches[np.argsort(points.launch[launches], kind="stable")]
    source = one.finish[np.maximum(depends.source, 0)]
    launch = depends.cause == int(Cause.LAUNCH)
    at = np.searchsorted(points.launch[launches], device.flow[depends.target[launch]])
    source[launch] = one.host[launches[at]]
    held = depends.held
    source[held] = draft.nodes(Node.BEFORE, one.rank, device.held_until[depends.target[held]])
    target = one.begin[depends.target]
    for cause in np.unique(depends.cause).tolist():
        some = depends.cause == cause
        draft.edges(source[some], target[some], depends.lag[some], Cause(cause))
