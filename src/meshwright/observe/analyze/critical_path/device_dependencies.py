"""What each work of a device waited for: its launch, its stream, other streams.

Where the profiler wrote synchronization down, that is used. Most profiles have none; there, two
rules of how frameworks run stand in: a collective waits for the work launched before it on the
busiest stream, and work that starts right behind other work's end, with nothing else to explain its
start, waited for it.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.critical_path.dependency_graph import EdgeCause
from meshwright.observe.analyze.critical_path.device_work import (
    SHORT_GAP_NS,
    DeviceWork,
    find_event_waits,
    find_latest_end_before,
    follows_closely,
)
from meshwright.observe.analyze.spans.intervals import COMMUNICATION, COMPUTE, Flags, Ints
from meshwright.timeline.timeline import Timeline

EXPLAINED_NS = 3_000
"""A start that lies so near to what its launch and its stream allow needs no other cause."""
MAX_LAUNCH_NS = 50_000
"""No launch takes longer to reach an idle stream."""
_NEVER = np.iinfo(np.int64).min // 2


class DeviceDependencies(NamedTuple):
    """Edges into the work of one rank."""

    source: Ints
    """Place of the work that is waited for; -1 for launches and work before the window."""
    target: Ints
    """Place of the work that waits."""
    lag_ns: Ints
    cause: Ints
    waits_for_earlier_work: Flags
    """Whether it waits for work of before the window."""


class _Column(NamedTuple):
    """One possible dependency of every work."""

    source: Ints
    moment: Ints
    """When the source was over; `_NEVER` where there is none."""
    usual_ns: int
    """How long after that work starts as a rule."""
    cause: EdgeCause
    held: bool = False


def find_device_dependencies(part: Timeline, device: DeviceWork, tied: Flags) -> DeviceDependencies:
    """Find what each work waited for; receives that are `tied` to a send wait for that alone."""
    columns = [
        _launches(device),
        *_streams(device),
        *_events(part, device),
        _collectives(device),
        *_microbatches(part, device, tied),
    ]
    columns.append(_adjacent(device, columns))
    moment = np.stack([column.moment for column in columns], axis=1)
    usual = np.array([column.usual_ns for column in columns])
    usable = (moment > _NEVER) & (moment <= device.start[:, None]) & ~tied[:, None]
    slack = device.start[:, None] - moment
    lag = np.where(usable, np.minimum(usual[None, :], slack), 0)
    reach = np.where(usable, moment + lag, _NEVER)
    # The latest decides: its lag is all that is left, so that the start is what it was.
    last = reach.shape[1] - 1 - np.argmax(reach[:, ::-1], axis=1)
    work = np.arange(device.row.size)
    lag[work, last] = slack[work, last]
    target, column = np.nonzero(usable)
    source = np.stack([one.source for one in columns], axis=1)
    return DeviceDependencies(
        source[target, column],
        target,
        lag[target, column],
        np.array([int(one.cause) for one in columns])[column],
        np.array([one.held for one in columns])[column],
    )


def _launches(device: DeviceWork) -> _Column:
    known = device.launch_time >= 0
    free = known & (_previous_end(device) < device.launch_time)
    delays = (device.start - device.launch_time)[free]
    # Longer ones waited for something else than the way to the device.
    delays = delays[(delays >= 0) & (delays <= MAX_LAUNCH_NS)]
    usual = int(np.median(delays)) if delays.size else 0
    moment = np.where(known, device.launch_time, _NEVER)
    return _Column(np.full(moment.size, -1), moment, usual, EdgeCause.LAUNCH)


def _streams(device: DeviceWork) -> tuple[_Column, _Column]:
    gap = device.start - _previous_end(device)
    short = gap[(device.previous_work >= 0) & (gap >= 0) & (gap <= SHORT_GAP_NS)]
    usual = int(np.median(short)) if short.size else 0
    inside = np.where(device.previous_work >= 0, _previous_end(device), _NEVER)
    before = np.where(device.earlier_work_end >= 0, device.earlier_work_end, _NEVER)
    return (
        _Column(device.previous_work, inside, usual, EdgeCause.STREAM),
        _Column(np.full(before.size, -1), before, usual, EdgeCause.STREAM, held=True),
    )


def _previous_end(device: DeviceWork) -> Ints:
    return np.where(
        device.previous_work >= 0, device.end[np.maximum(device.previous_work, 0)], _NEVER
    )


def _events(part: Timeline, device: DeviceWork) -> tuple[_Column, ...]:
    """Waits for events that the profiler wrote down, several columns where one work has several."""
    source, target = find_event_waits(part, device)
    columns = []
    while source.size:
        _, first = np.unique(target, return_index=True)
        columns.append(_column(device, source[first], target[first]))
        rest = np.setdiff1d(np.arange(source.size), first)
        source, target = source[rest], target[rest]
    return tuple(columns)


def _column(device: DeviceWork, source: Ints, target: Ints) -> _Column:
    place = np.full(device.row.size, -1, dtype=np.int64)
    place[target] = source
    moment = np.where(place >= 0, device.end[np.maximum(place, 0)], _NEVER)
    return _Column(place, moment, 0, EdgeCause.WAIT)


def _collectives(device: DeviceWork) -> _Column:
    """A collective's stream waits for the stream it was called from (`ProcessGroupNCCL`)."""
    compute = np.flatnonzero((device.kind == COMPUTE) & (device.launch_time >= 0))
    asked = np.flatnonzero((device.kind == COMMUNICATION) & (device.launch_time >= 0))
    if not compute.size or not asked.size:
        return _column(device, asked[:0], asked[:0])
    busiest = np.argmax(np.bincount(device.lane[compute]))
    compute = compute[device.lane[compute] == busiest]
    compute = compute[np.argsort(device.launch_time[compute], kind="stable")]
    at = np.searchsorted(device.launch_time[compute], device.launch_time[asked], side="left") - 1
    asked, at = asked[at >= 0], at[at >= 0]
    return _column(device, compute[at], asked)


def _microbatches(part: Timeline, device: DeviceWork, tied: Flags) -> tuple[_Column, ...]:
    """A pass waits for what it receives, and a send for the pass before it, by microbatch."""
    microbatch = part.column("microbatch")[device.row].astype(np.int64)
    if not tied.any() or not np.any(microbatch >= 0):
        return ()
    collective = part.string_column("collective")
    sending = np.array([value == "send" for value in collective.values] + [False])
    sends = np.flatnonzero(sending[collective.codes[device.row]])
    compute = np.flatnonzero((device.kind == COMPUTE) & (microbatch >= 0))
    received = np.flatnonzero(tied)
    begun = compute[np.argsort(device.start[compute], kind="stable")]
    done = compute[np.argsort(device.end[compute], kind="stable")]
    pass_of, receive = _next(microbatch, device.start, begun, received, device.end)
    before, send = _last(microbatch, device.end, done, sends, device.start)
    return _column(device, receive, pass_of), _column(device, before, send)


def _next(key: Ints, moment: Ints, among: Ints, asked: Ints, since: Ints) -> tuple[Ints, Ints]:
    """The first of `among` with the same key from each asked moment on, and who asked."""
    order = among[np.lexsort((moment[among], key[among]))]
    span = int(moment.max()) - int(moment.min()) + 1
    low = int(moment.min())
    scale = key[order] * span + (moment[order] - low)
    offset = np.clip(since[asked] - low, 0, span)
    at = np.searchsorted(scale, key[asked] * span + offset, side="left")
    hit = at < order.size
    hit[hit] = key[order[at[hit]]] == key[asked[hit]]
    return order[at[hit]], asked[hit]


def _last(key: Ints, moment: Ints, among: Ints, asked: Ints, until: Ints) -> tuple[Ints, Ints]:
    """The last of `among` with the same key up to each asked moment, and who asked."""
    return _next(key, -moment, among, asked, -until)


def _adjacent(device: DeviceWork, columns: list[_Column]) -> _Column:
    """Work right behind the end of other work, where nothing else explains its start."""
    reach = np.full(device.row.size, _NEVER)
    for column in columns:
        usable = (column.moment > _NEVER) & (column.moment <= device.start)
        own = column.moment + np.minimum(column.usual_ns, device.start - column.moment)
        reach = np.where(usable, np.maximum(reach, own), reach)
    open_ = np.flatnonzero(device.start - reach > EXPLAINED_NS)
    found = find_latest_end_before(device, device.start[open_])
    near = (found >= 0) & (found != open_)
    near[near] = follows_closely(device.start[open_[near]], device.end[found[near]])
    return _column(device, found[near], open_[near])
