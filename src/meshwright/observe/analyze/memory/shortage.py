"""After an out-of-memory error: what was asked, what there was, what would have fitted."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.categories import Sorted, user_line
from meshwright.observe.analyze.memory.lifetimes import NEVER, Live
from meshwright.observe.analyze.memory.peak import Moment, moment
from meshwright.observe.analyze.memory.totals import fragmentation
from meshwright.timeline.readers.memory_snapshot import OOM

_MOST = 16
"""A job that retries fails many times alike."""


class Shortage(NamedTuple):
    """One request that failed."""

    asked_bytes: int
    device_free_bytes: int
    """What the driver still had."""
    time_us: int
    line: str
    """Who asked."""
    live: Moment
    """What was live when it failed."""
    largest_free_bytes: int
    """Largest free block: the largest request that would have been served from the cache."""
    free_bytes: int
    """Free inside the allocator's segments, in pieces."""
    lacking_bytes: int
    """How much less would have had to be asked, or be live, for the request to fit."""
    frees_enough: tuple[str, ...]
    """Live lines that, given back, would each or together have made room, largest first."""
    would_fit_unfragmented: bool
    """Whether all free memory in one piece would have done."""


def shortages(known: Sorted, live: Live) -> tuple[Shortage, ...]:
    """Explain every failed request of one device."""
    events = known.snapshot.events
    rows = np.flatnonzero((events.action == OOM) & (events.device == live.device))
    return tuple(_shortage(known, live, int(row)) for row in rows[:_MOST])


def _shortage(known: Sorted, live: Live, event: int) -> Shortage:
    snapshot = known.snapshot
    events = snapshot.events
    before = int(np.searchsorted(live.event, event)) - 1
    in_use = int(live.bytes[before]) if before >= 0 else live.at_start_bytes
    last = int(live.event[before]) if before >= 0 else NEVER
    then = moment(known, live.device, last, in_use)
    asked, free_there = int(events.size_bytes[event]), int(events.address[event])
    pieces = fragmentation(snapshot, live.device)
    free = pieces.cached_bytes + pieces.stranded_bytes
    lacking = max(0, asked - max(free_there, pieces.largest_free_bytes))
    enough, room = [], 0
    for source in then.sources:
        if room >= lacking:
            break
        if source.line != "no stack":
            enough.append(source.line)
            room += source.size_bytes
    return Shortage(
        asked,
        free_there,
        int(events.time_us[event]),
        user_line(snapshot.stack(int(events.stack[event]))) or "no stack",
        then,
        pieces.largest_free_bytes,
        free,
        lacking,
        tuple(enough),
        free + free_there >= asked,
    )
