"""Pairs each allocation with the event that ended it, and follows the bytes that are live."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.timeline.readers.memory_snapshot import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    Numbers,
    Snapshot,
)

NEVER = -1


class Lifetimes(NamedTuple):
    """One row for each allocation that the events tell of."""

    event: Numbers
    """Number of the event that made it."""
    end: Numbers
    """Number of the event that ended it, `NEVER` for none."""
    asked_back: Numbers
    """Number of the event that asked to end it, `NEVER` for none."""
    size_bytes: Numbers
    stack: Numbers
    device: Numbers
    address: Numbers


class Live(NamedTuple):
    """Bytes in use on one device after each of its events."""

    device: int
    at_start_bytes: int
    """In use before the first event: what is active now, less what the events added."""
    event: Numbers
    """Numbers of the events that changed it."""
    bytes: Numbers
    peak_bytes: int
    peak_event: int
    """Number of the event that reached the peak, `NEVER` where it was at the start."""


def lifetimes(snapshot: Snapshot) -> Lifetimes:
    """Find the end of each allocation: the next completed free of its address on its device."""
    events = snapshot.events
    end = _next_of(snapshot, FREE_COMPLETED)
    asked = _next_of(snapshot, FREE_REQUESTED)
    made = np.flatnonzero(events.action == ALLOC)
    # A request belongs to this allocation only if it came before its end.
    belongs = (asked[made] != NEVER) & ((end[made] == NEVER) | (asked[made] <= end[made]))
    return Lifetimes(
        made,
        end[made],
        np.where(belongs, asked[made], NEVER),
        events.size_bytes[made],
        events.stack[made],
        events.device[made],
        events.address[made],
    )


def _next_of(snapshot: Snapshot, action: int) -> Numbers:
    """Return for each allocation the next event of a kind at its address, before it is reused."""
    events = snapshot.events
    found = np.full(events.action.size, NEVER, np.int64)
    rows = np.flatnonzero((events.action == ALLOC) | (events.action == action))
    order = rows[np.lexsort((rows, events.address[rows], events.device[rows]))]
    if order.size < 2:
        return found
    here, after = order[:-1], order[1:]
    pairs = (
        (events.action[here] == ALLOC)
        & (events.action[after] == action)
        & (events.address[here] == events.address[after])
        & (events.device[here] == events.device[after])
    )
    found[here[pairs]] = after[pairs]
    return found


def live(snapshot: Snapshot, device: int) -> Live:
    """Follow the live bytes of one device through its events."""
    events, segments = snapshot.events, snapshot.segments
    mine = (events.device == device) & (
        (events.action == ALLOC) | (events.action == FREE_COMPLETED)
    )
    rows = np.flatnonzero(mine)
    sign = np.where(events.action[rows] == ALLOC, 1, -1)
    change = np.cumsum(sign * events.size_bytes[rows])
    active = int(segments.active_bytes[segments.device == device].sum())
    start = active - (int(change[-1]) if change.size else 0)
    found = start + change
    if not found.size or int(found.max()) <= start:
        return Live(device, start, rows, found, start, NEVER)
    top = int(found.argmax())
    return Live(device, start, rows, found, int(found[top]), int(rows[top]))


def alive_at(lives: Lifetimes, event: int, device: int) -> NDArray[np.bool_]:
    """Tell which allocations were in use right after an event."""
    begun: NDArray[np.bool_] = (lives.event <= event) & (lives.device == device)
    lasting: NDArray[np.bool_] = (lives.end == NEVER) | (lives.end > event)
    return np.logical_and(begun, lasting)


def last_of_address(lives: Lifetimes) -> NDArray[np.bool_]:
    """Tell which allocations are the last at their address.

    One given out twice without a free in between was lost once, while nothing was recorded.
    """
    order = np.lexsort((lives.event, lives.address, lives.device))
    found = np.ones(order.size, np.bool_)
    if order.size > 1:
        a, b = order[:-1], order[1:]
        same = (lives.address[a] == lives.address[b]) & (lives.device[a] == lives.device[b])
        found[a[same]] = False
    return found


def devices(snapshot: Snapshot) -> list[int]:
    """Return the devices that have segments or events."""
    both = np.concatenate([snapshot.segments.device, snapshot.events.device])
    return [int(device) for device in np.unique(both)]
