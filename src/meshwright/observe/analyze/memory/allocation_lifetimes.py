"""Pairs each allocation with the event that ended it, and follows the bytes that are live."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MemorySnapshot,
    Numbers,
)

NO_EVENT = -1


class AllocationLifetimes(NamedTuple):
    """One row for each allocation that the events tell of."""

    alloc_event: Numbers
    """Number of the event that made it."""
    free_event: Numbers
    """Number of the event that ended it, `NO_EVENT` for none."""
    free_requested_event: Numbers
    """Number of the event that asked to end it, `NO_EVENT` for none."""
    size_bytes: Numbers
    stack: Numbers
    device: Numbers
    address: Numbers


class LiveBytes(NamedTuple):
    """Bytes in use on one device after each of its events."""

    device: int
    at_start_bytes: int
    """In use before the first event: what is active now, less what the events added."""
    event: Numbers
    """Numbers of the events that changed it."""
    bytes: Numbers
    peak_bytes: int
    peak_event: int
    """Number of the event that reached the peak, `NO_EVENT` where it was at the start."""


def find_lifetimes(snapshot: MemorySnapshot) -> AllocationLifetimes:
    """Find the end of each allocation: the next completed free of its address on its device."""
    events = snapshot.events
    end = _next_of(snapshot, FREE_COMPLETED)
    asked = _next_of(snapshot, FREE_REQUESTED)
    made = np.flatnonzero(events.action == ALLOC)
    # A request belongs to this allocation only if it came before its end.
    belongs = (asked[made] != NO_EVENT) & ((end[made] == NO_EVENT) | (asked[made] <= end[made]))
    return AllocationLifetimes(
        made,
        end[made],
        np.where(belongs, asked[made], NO_EVENT),
        events.size_bytes[made],
        events.stack[made],
        events.device[made],
        events.address[made],
    )


def _next_of(snapshot: MemorySnapshot, action: int) -> Numbers:
    """Return for each allocation the next event of a kind at its address, before it is reused."""
    events = snapshot.events
    found = np.full(events.action.size, NO_EVENT, np.int64)
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


def trace_live_bytes(snapshot: MemorySnapshot, device: int) -> LiveBytes:
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
        return LiveBytes(device, start, rows, found, start, NO_EVENT)
    top = int(found.argmax())
    return LiveBytes(device, start, rows, found, int(found[top]), int(rows[top]))


def mask_live_at(lives: AllocationLifetimes, event: int, device: int) -> NDArray[np.bool_]:
    """Tell which allocations were in use right after an event."""
    begun: NDArray[np.bool_] = (lives.alloc_event <= event) & (lives.device == device)
    lasting: NDArray[np.bool_] = (lives.free_event == NO_EVENT) | (lives.free_event > event)
    return np.logical_and(begun, lasting)


def mask_last_at_address(lives: AllocationLifetimes) -> NDArray[np.bool_]:
    """Tell which allocations are the last at their address.

    One given out twice without a free in between was lost once, while nothing was recorded.
    """
    order = np.lexsort((lives.alloc_event, lives.address, lives.device))
    found = np.ones(order.size, np.bool_)
    if order.size > 1:
        a, b = order[:-1], order[1:]
        same = (lives.address[a] == lives.address[b]) & (lives.device[a] == lives.device[b])
        found[a[same]] = False
    return found


def list_devices(snapshot: MemorySnapshot) -> list[int]:
    """Return the devices that have segments or events."""
    both = np.concatenate([snapshot.segments.device, snapshot.events.device])
    return [int(device) for device in np.unique(both)]
