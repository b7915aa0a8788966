"""The sums of a snapshot, and how fragmented its free memory is."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.allocation_lifetimes import (
    NO_EVENT,
    AllocationLifetimes,
    LiveBytes,
    mask_last_at_address,
)
from meshwright.observe.analyze.memory.allocator_replay import AllocatorReplay
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    ALLOC,
    FREE_COMPLETED,
    INACTIVE,
    MemorySnapshot,
)


class MemoryTotals(NamedTuple):
    """Sums over one device."""

    num_segments: int
    num_blocks: int
    reserved_bytes: int
    active_bytes: int
    allocated_bytes: int
    requested_bytes: int
    inactive_bytes: int
    largest_inactive_bytes: int
    num_events: int
    num_allocs: int
    num_frees: int
    live_at_start_bytes: int
    peak_live_bytes: int
    """Of the requested sizes, by the events alone."""
    peak_allocated_bytes: int
    """Of whole blocks, by replay: what `torch.cuda.max_memory_allocated()` tells."""
    peak_reserved_bytes: int
    live_end_bytes: int
    num_never_freed: int
    never_freed_bytes: int


class MemoryFragmentation(NamedTuple):
    """Why free memory may not serve a request."""

    private_free_bytes: int
    """Free in private pools, of CUDA graphs or a `MemPool`: only their owners can use it."""
    cached_bytes: int
    """In segments that are wholly free: `torch.cuda.empty_cache()` gives them back."""
    inactive_split_bytes: int
    """Free, in segments that something still uses: neither given back nor joined with others."""
    largest_free_bytes: int
    """Largest request that needs nothing new of the driver."""
    num_mostly_free_segments: int
    """Segments of which at least half is free but not all."""
    mostly_free_used_bytes: int
    """What is in use in those."""
    rounding_bytes: int
    """Handed out beyond what was requested."""
    is_expandable: bool
    """Whether the snapshot was taken with expandable segments."""


def sum_memory(
    snapshot: MemorySnapshot, lives: AllocationLifetimes, live: LiveBytes, replayed: AllocatorReplay
) -> MemoryTotals:
    """Sum up one device; where events do not fit the segments, peaks are those of the events."""
    segments, blocks, events = snapshot.segments, snapshot.blocks, snapshot.events
    here = segments.device == live.device
    own = here[blocks.segment]
    free = blocks.size_bytes[own & (blocks.state == INACTIVE)]
    mine = events.device == live.device
    last = live.bytes[-1] if live.bytes.size else live.at_start_bytes
    kept = (lives.free_event == NO_EVENT) & (lives.device == live.device)
    kept &= mask_last_at_address(lives)
    exact = replayed.is_exact
    reserved = int(segments.total_bytes[here].sum())
    return MemoryTotals(
        num_segments=int(here.sum()),
        num_blocks=int(own.sum()),
        reserved_bytes=reserved,
        active_bytes=int(segments.active_bytes[here].sum()),
        allocated_bytes=int(segments.allocated_bytes[here].sum()),
        requested_bytes=int(segments.requested_bytes[here].sum()),
        inactive_bytes=int(free.sum()),
        largest_inactive_bytes=int(free.max(initial=0)),
        num_events=int(mine.sum()),
        num_allocs=int((mine & (events.action == ALLOC)).sum()),
        num_frees=int((mine & (events.action == FREE_COMPLETED)).sum()),
        live_at_start_bytes=live.at_start_bytes,
        peak_live_bytes=live.peak_bytes,
        peak_allocated_bytes=replayed.peak_allocated_bytes if exact else live.peak_bytes,
        peak_reserved_bytes=replayed.peak_reserved_bytes if exact else reserved,
        live_end_bytes=int(last),
        num_never_freed=int(kept.sum()),
        never_freed_bytes=int(lives.size_bytes[kept].sum()),
    )


def measure_fragmentation(snapshot: MemorySnapshot, device: int) -> MemoryFragmentation:
    """Say how much free memory is out of reach, and by what."""
    segments, blocks = snapshot.segments, snapshot.blocks
    private = (segments.device == device) & (segments.is_private != 0)
    here = (segments.device == device) & ~private
    is_free = blocks.state == INACTIVE
    free = np.bincount(
        blocks.segment[is_free], blocks.size_bytes[is_free], minlength=segments.device.size
    ).astype(np.int64)
    whole = here & (free >= segments.total_bytes)
    pinned = here & ~whole & (2 * free >= segments.total_bytes)
    mine = here[blocks.segment]
    used = (mine | private[blocks.segment]) & ~is_free
    return MemoryFragmentation(
        private_free_bytes=int(free[private].sum()),
        cached_bytes=int(free[whole].sum()),
        inactive_split_bytes=int(free[here & ~whole].sum()),
        largest_free_bytes=int(blocks.size_bytes[mine & is_free].max(initial=0)),
        num_mostly_free_segments=int(pinned.sum()),
        mostly_free_used_bytes=int((segments.total_bytes - free)[pinned].sum()),
        rounding_bytes=int(
            (blocks.size_bytes[used] - blocks.requested_bytes[used]).clip(min=0).sum()
        ),
        is_expandable=bool(segments.is_expandable[here | private].any()),
    )
