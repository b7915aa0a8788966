"""The device's part of a window: its work in order, stream by stream, and what it waited for."""

from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import Flags, Ints, match_values
from meshwright.timeline.readers.parsing.arrow_arrays import take_rows
from meshwright.timeline.timeline import Timeline

SHORT_GAP_NS = 10_000
"""Longer gaps between kernels of one stream have another cause than the stream itself."""
MAX_FOLLOWING_GAP_NS = 20_000
"""Work that starts so soon after other work's end is taken to have waited for it."""


class DeviceWork(NamedTuple):
    """The work of one rank that belongs to a window, by start."""

    row: Ints
    start: Ints
    end: Ints
    kind: Ints
    lane: Ints
    flow: Ints
    launch_time: Ints
    """When it was launched; -1 where no launch is known."""
    previous_work: Ints
    """Place of the work before it on its lane; -1 where there is none in the window."""
    earlier_work_end: Ints
    """End of earlier work on its lane that belongs to no launch of the window; -1 where none."""
    order_by_end: Ints
    """Places in the order of ends."""
    lanes: tuple[str, ...]

    def find_awaited_streams(self, part: Timeline, rows: Ints) -> Ints:
        """The lane that each blocking call waited for; -1 where the profile does not say."""
        found = np.full(rows.size, -1, dtype=np.int64)
        syncs = find_recorded_syncs(part)
        if not syncs:
            return found
        names = {lane: place for place, lane in enumerate(self.lanes)}
        by_call = {
            sync.correlation: names.get(f"gpu {sync.device} stream {sync.stream}", -1)
            for sync in syncs
            if sync.kind == "Stream Sync" and sync.stream is not None
        }
        calls = part.column("flow_out")[rows].tolist()
        return np.array([by_call.get(one, -1) for one in calls], dtype=np.int64)


class RecordedSync(msgspec.Struct):
    """A synchronization as the profiler wrote it down."""

    kind: str = msgspec.field(default="", name="cuda_sync_kind")
    device: int | None = None
    stream: int | None = None
    correlation: int = -1
    wait_on_stream: int | None = None
    record: int | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


_SYNC = msgspec.json.Decoder(RecordedSync, strict=False)


def find_device_work(part: Timeline, window_ns: tuple[int, int]) -> DeviceWork:
    """The work that was launched in a window, or started in it where no launch is known."""
    spans = find_device_spans(part)
    start, flow_out = part.column("start_ns"), part.column("flow_out")
    calls = np.flatnonzero(flow_out >= 0)
    calls = calls[np.argsort(flow_out[calls], kind="stable")]
    launched = np.full(spans.row.size, -1, dtype=np.int64)
    if calls.size:
        at = np.minimum(np.searchsorted(flow_out[calls], spans.flow), calls.size - 1)
        known = (flow_out[calls][at] == spans.flow) & (spans.flow >= 0)
        launched[known] = start[calls[at[known]]]
    moment = np.where(launched >= 0, launched, spans.start)
    inside = (moment >= window_ns[0]) & (moment < window_ns[1])
    # Work of a lane in order; the last that is not inside holds up the first that is.
    order = np.lexsort((spans.end, spans.start, spans.lane))
    earlier = np.full(spans.row.size, -1, dtype=np.int64)
    same = spans.lane[order][1:] == spans.lane[order][:-1]
    earlier[order[1:][same]] = order[:-1][same]
    number = np.cumsum(inside) - 1
    chosen = np.flatnonzero(inside)
    previous = earlier[chosen]
    stays = (previous >= 0) & inside[np.maximum(previous, 0)]
    held = np.where((previous >= 0) & ~stays, spans.end[np.maximum(previous, 0)], -1)
    end = spans.end[chosen]
    return DeviceWork(
        row=spans.row[chosen],
        start=spans.start[chosen],
        end=end,
        kind=spans.kind[chosen],
        lane=spans.lane[chosen],
        flow=spans.flow[chosen],
        launch_time=launched[chosen],
        previous_work=np.where(stays, number[np.maximum(previous, 0)], -1),
        earlier_work_end=held,
        order_by_end=np.argsort(end, kind="stable"),
        lanes=spans.lanes,
    )


def find_latest_end_before(device: DeviceWork, moment: Ints, lane: Ints | None = None) -> Ints:
    """The work that ended last until each moment, on any lane or on the given one (-1: any)."""
    found = _latest(device.order_by_end, device.end, moment)
    if lane is not None:
        for one in np.unique(lane[lane >= 0]).tolist():
            own = device.order_by_end[device.lane[device.order_by_end] == one]
            asked = lane == one
            found[asked] = _latest(own, device.end, moment[asked])
    return found


def _latest(by_end: Ints, end: Ints, moment: Ints) -> Ints:
    if not by_end.size:
        return np.full(moment.size, -1, dtype=np.int64)
    at = np.searchsorted(end[by_end], moment, side="right") - 1
    return np.where(at >= 0, by_end[np.maximum(at, 0)], -1)


def find_recorded_syncs(part: Timeline) -> list[RecordedSync]:
    """The synchronizations that the profiler wrote down; most profiles have none."""
    category = part.string_column("category")
    if "cuda_sync" not in category.values or "extra" not in part.spans.column_names:
        return []
    rows = np.flatnonzero(match_values(category, lambda name: name == "cuda_sync"))
    found = list[RecordedSync]()
    for text in take_rows(part.spans.column("extra"), rows).to_pylist():
        # Of arguments that are no profiler's, nothing is known.
        with suppress(msgspec.MsgspecError):
            found += [_SYNC.decode(text)] if text else []
    return found


def find_event_waits(part: Timeline, device: DeviceWork) -> tuple[Ints, Ints]:
    """Work that waits for a recorded event, and the work that stands before the record.

    Known where the profiler wrote `Stream Wait Event` down. Calls are numbered in the order they
    are made: the last work of the event's stream with a number below the record's is waited for,
    the first of the waiting stream with a number above the wait's is held up.
    """
    waits = [
        sync
        for sync in find_recorded_syncs(part)
        if sync.kind == "Stream Wait Event" and sync.record is not None and sync.correlation >= 0
    ]
    places = {lane: place for place, lane in enumerate(device.lanes)}
    by_call: dict[int, Ints] = {}
    source, target = [], []
    for sync in waits:
        lanes = [
            places.get(f"gpu {sync.device} stream {stream}", -1)
            for stream in (sync.wait_on_stream, sync.stream)
        ]
        for lane in lanes:
            by_call.setdefault(lane, _by_call(device, lane))
        before, after = by_call[lanes[0]], by_call[lanes[1]]
        first = int(np.searchsorted(device.flow[before], sync.record or 0)) - 1
        second = int(np.searchsorted(device.flow[after], sync.correlation))
        if first >= 0 and second < after.size:
            source.append(int(before[first]))
            target.append(int(after[second]))
    return np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)


def _by_call(device: DeviceWork, lane: int) -> Ints:
    """Work of a lane in the order of the calls that launched it."""
    own = np.flatnonzero((device.lane == lane) & (device.launch_time >= 0))
    return own[np.argsort(device.flow[own], kind="stable")]


def follows_closely(later: Ints, earlier: Ints) -> Flags:
    """Whether one moment follows another so closely that it is taken to have waited for it."""
    near: Flags = (later >= earlier) & (later - earlier <= MAX_FOLLOWING_GAP_NS)
    return near
