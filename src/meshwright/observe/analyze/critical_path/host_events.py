"""The host's part of a window: when it launched what, and where it waited for the device.

All threads of a rank that launch are taken for one chain in the order of time: forward and
autograd's backward take turns, and no profile says who wakes whom. Between two points the host
computes.
"""

import re
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.critical_path.device_work import DeviceWork, find_latest_end_before
from meshwright.observe.analyze.spans.intervals import Flags, Ints, match_values
from meshwright.timeline.timeline import Timeline

_BLOCKING = re.compile(
    r"^(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize(_v2|_ptsz)?$|^(cuda|hip)Memcpy(Async|WithStream)?$"
)


class HostEvents(NamedTuple):
    """Moments of the host in the order of time."""

    time: Ints
    launch: Ints
    """Flow of the launch that begins here; -1 where none does."""
    awaited: Ints
    """Place of the device work whose end the host waited for here; -1 where it did not wait."""
    last_ns: int
    """When the threads that launch were done; the last point's time where none launches."""


def find_host_events(part: Timeline, device: DeviceWork, window_ns: tuple[int, int]) -> HostEvents:
    """Find the launches and the waits of one rank in a window."""
    start, duration = part.column("start_ns"), part.column("duration_ns")
    flow = part.column("flow_out")
    inside = (start >= window_ns[0]) & (start < window_ns[1])
    launches = np.flatnonzero(inside & np.isin(flow, device.flow[device.flow >= 0]) & (flow >= 0))
    waits, awaited = _waits(part, device, inside)
    begin = np.concatenate([start[launches], start[waits]])
    flows = np.concatenate([flow[launches], np.full(waits.size, -1, dtype=np.int64)])
    # A call that launches and waits has two points: the launch, and the end of its wait.
    ends = (start + duration)[waits]
    time = np.concatenate([[window_ns[0]], begin, ends])
    launch = np.concatenate([[-1], flows, np.full(waits.size, -1)])
    held = np.concatenate([np.full(1 + begin.size, -1), awaited])
    order = np.lexsort((held >= 0, time))
    last = int(time.max())
    if launches.size:
        lanes = part.string_column("lane").codes
        busy = inside & np.isin(lanes, np.unique(lanes[launches]))
        last = max(last, min(window_ns[1], int((start + duration)[busy].max())))
    return HostEvents(time[order], launch[order], held[order], last)


def _waits(part: Timeline, device: DeviceWork, inside: Flags) -> tuple[Ints, Ints]:
    """Calls that ended because device work did, and which work that was.

    Such a call lasts beyond the end of the last work that ended before the call's own end. The
    stream it waited for is used where the profile says it.
    """
    if not device.end.size:
        nobody = np.empty(0, dtype=np.int64)
        return nobody, nobody
    names = part.string_column("name")
    rows = np.flatnonzero(inside & match_values(names, lambda name: bool(_BLOCKING.match(name))))
    begin = part.column("start_ns")[rows]
    end = begin + part.column("duration_ns")[rows]
    lanes = device.find_awaited_streams(part, rows)
    awaited = find_latest_end_before(device, end, lanes)
    late = (awaited >= 0) & (device.end[np.maximum(awaited, 0)] > begin)
    return rows[late], awaited[late]
