"""Where all ranks of a timeline wait for each other without a collective to show it.

Our own timelines say so: a wait called `wait for other ranks` ends on every rank at one moment, and
the work behind it starts there. Profiles of real runs show a collective instead.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.critical_path.device import Device
from meshwright.observe.analyze.spans import Ints, where
from meshwright.timeline.timeline import Timeline

WAIT = "wait for other ranks"


class Met(NamedTuple):
    """The work of one rank that starts at a meeting."""

    number: Ints
    """The meeting of each work; -1 for most."""
    ready: Ints
    """When the rank was ready for it."""
    start: Ints
    """When it started."""


def meetings(parts: Mapping[int, Timeline], devices: Mapping[int, Device]) -> dict[int, Met]:
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
        found[rank] = Met(number, ready, device.start)
    return found


def _waits(part: Timeline) -> tuple[Ints, Ints]:
    rows = np.flatnonzero(where(part.strings("name"), lambda name: name == WAIT))
    start = part.column("start_ns")[rows]
    return start, start + part.column("duration_ns")[rows]
