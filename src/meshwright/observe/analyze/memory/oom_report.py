"""After an out-of-memory error: what was asked, what there was, what would have fitted."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.allocation_lifetimes import NO_EVENT, LiveBytes
from meshwright.observe.analyze.memory.allocator_replay import AllocatorReplay, AllocatorState
from meshwright.observe.analyze.memory.memory_categories import (
    NO_STACK,
    CategorizedMemory,
    find_user_line,
)
from meshwright.observe.analyze.memory.memory_peak import LiveMemory, attribute_live_memory
from meshwright.observe.analyze.memory.memory_totals import measure_fragmentation
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import OOM

_MOST = 16
"""A job that retries fails many times alike."""
_LARGE_SEGMENT = 20 << 20
_GRAIN = 2 << 20
_SCALING = ("activations", "temporary")
"""What grows and shrinks with the batch."""


class OutOfMemoryReport(NamedTuple):
    """One request that failed."""

    requested_bytes: int
    device_free_bytes: int
    """What the driver still had."""
    time_us: int
    line: str
    """Who asked."""
    live_memory: LiveMemory
    """What was live when it failed."""
    reserved_bytes: int
    """What the allocator held of the driver then."""
    largest_free_bytes: int
    """Largest free block then: the largest request that would have been served from the cache."""
    free_bytes: int
    """Free inside the allocator's segments then, in pieces."""
    has_memory_limit: bool
    """Whether the driver had enough: the process was held to a limit of its own."""
    capacity_bytes: int
    """What the allocator could reserve in all; under a limit, the most it is known to have had."""
    capacity_upper_bound_bytes: int
    """What it could not reserve: under a limit, the limit lies below."""
    largest_fitting_bytes: int
    """The largest request that would have been served, from the cache or the driver."""
    missing_bytes: int
    """How much less would have had to be asked, or be live, for the request to fit (at most)."""
    lines_to_free: tuple[str, ...]
    """Live lines that, given back, would each or together have made room, largest first."""
    would_fit_unfragmented: bool
    """Whether all free memory in one piece would have done."""
    batch_dependent_bytes: int
    """Live activations and temporary memory, with the request: what a smaller batch makes less."""
    fitting_batch_share: float | None
    """Share of those that would have fitted beside the rest; None where all would."""


def explain_ooms(
    known: CategorizedMemory, live: LiveBytes, replayed: AllocatorReplay
) -> tuple[OutOfMemoryReport, ...]:
    """Explain every failed request of one device."""
    events = known.snapshot.events
    rows = np.flatnonzero((events.action == OOM) & (events.device == live.device))
    return tuple(_shortage(known, live, replayed, int(row)) for row in rows[:_MOST])


def _shortage(
    known: CategorizedMemory, live: LiveBytes, replayed: AllocatorReplay, event: int
) -> OutOfMemoryReport:
    snapshot = known.snapshot
    events = snapshot.events
    before = int(np.searchsorted(live.event, event)) - 1
    in_use = int(live.bytes[before]) if before >= 0 else live.at_start_bytes
    last = int(live.event[before]) if before >= 0 else NO_EVENT
    then = attribute_live_memory(known, live.device, last, in_use)
    asked, free_there = int(events.size_bytes[event]), int(events.address[event])
    room = replayed.failures.get(event)
    if room is None or not replayed.is_exact:
        room = _room_now(known, live.device)
    is_limited = free_there >= get_allocation_size(asked)
    capacity = room.reserved_bytes + free_there
    below = capacity + 1
    if is_limited:
        capacity = max(room.peak_reserved_bytes, room.reserved_bytes)
        below = room.reserved_bytes + get_allocation_size(asked)
    fits = max(capacity - room.reserved_bytes, room.largest_free_bytes)
    lacking = max(0, asked - fits)
    would_fit = room.reserved_bytes - room.free_bytes + asked <= capacity
    scaling = asked + sum(size for name, size in then.by_category if name in _SCALING)
    rest = max(0, in_use + asked - scaling)
    return OutOfMemoryReport(
        asked,
        free_there,
        int(events.time_us[event]),
        find_user_line(snapshot.get_stack(int(events.stack[event]))) or NO_STACK,
        then,
        room.reserved_bytes,
        room.largest_free_bytes,
        room.free_bytes,
        is_limited,
        capacity,
        below,
        fits,
        lacking,
        _makes_room(then, lacking),
        would_fit,
        scaling,
        None if would_fit or scaling <= 0 else max(0.0, min(1.0, (capacity - rest) / scaling)),
    )


def get_allocation_size(asked: int) -> int:
    """Return what the allocator asks of the driver for a request (`get_allocation_size` there)."""
    if asked <= 1 << 20:
        return _GRAIN
    return _LARGE_SEGMENT if asked < 10 << 20 else -(-asked // _GRAIN) * _GRAIN


def _room_now(known: CategorizedMemory, device: int) -> AllocatorState:
    """Stand in for the moment of the failure where it cannot be replayed: the end."""
    pieces = measure_fragmentation(known.snapshot, device)
    segments = known.snapshot.segments
    reserved = int(segments.total_bytes[segments.device == device].sum())
    free = pieces.cached_bytes + pieces.inactive_split_bytes
    return AllocatorState(reserved, reserved, free, pieces.largest_free_bytes)


def _makes_room(then: LiveMemory, lacking: int) -> tuple[str, ...]:
    enough, room = [], 0
    for source in then.sources:
        if room >= lacking:
            break
        if source.line != NO_STACK:
            enough.append(source.line)
            room += source.size_bytes
    return tuple(enough)
