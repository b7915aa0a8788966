"""Replays an allocator's events over its segments: block sizes, reserved bytes, room at a failure.

Events tell what was requested; the allocator hands out whole blocks, and counts those. How much a
block holds beyond the request follows from what lies behind it in its segment, so the segments are
put back to how they were before the first event and every event is applied in order.

Rules (c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.1 to 2.11): sizes are rounded up to 512 bytes; a
free block is cut where at least 512 bytes would be left over (small pool: requests up to 1 MiB; and
expandable segments), or more than 1 MiB (large pool) and the request is below `max_split_size`.
"""

import secrets
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    INACTIVE,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    MemorySnapshot,
)

_GRAIN = 512
_SMALL = 1 << 20
_MOST_FAILURES = 16
_SHIFT = secrets.randbits(60)
"""Added to all addresses, which are keys here. A file can name addresses that make a dict probe the
places of all others for each of them; behind a shift that it does not know they are like any."""


class AllocatorState(NamedTuple):
    """What the allocator had at the moment a request failed."""

    reserved_bytes: int
    peak_reserved_bytes: int
    """Most it had reserved until then: any limit on it lies above."""
    free_bytes: int
    """Free inside its segments, in pieces."""
    largest_free_bytes: int


class AllocatorReplay(NamedTuple):
    """What a device's allocator counted, as `torch.cuda.max_memory_…` tells it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    failures: Mapping[int, AllocatorState]
    """By the number of the `oom` event; the first ones only."""
    is_exact: bool
    """Whether the replay ends with just the blocks that the snapshot lists."""


class _Memory:
    """Segments and the blocks in use in them."""

    def __init__(self, *, max_split_bytes: int) -> None:
        self.starts: list[int] = []
        self.end: dict[int, int] = {}
        self.used: dict[int, list[int]] = {}
        self.size: dict[int, int] = {}
        self.expandable: set[int] = set()
        self.private: set[int] = set()
        """Those whose free room serves only their owners."""
        self.max_split_bytes = max_split_bytes
        self.reserved = 0

    def add(self, start: int, size: int) -> None:
        """Add a segment asked of the driver."""
        if size <= 0 or start in self.end:
            return
        insort(self.starts, start)
        self.end[start] = start + size
        self.used[start] = []
        self.reserved += size

    def drop(self, start: int) -> None:
        """Give a segment back."""
        if start in self.end:
            self.starts.remove(start)
            self.reserved -= self.end.pop(start) - start
            self.expandable.discard(start)
            del self.used[start]

    def map(self, start: int, size: int) -> None:
        """Grow an expandable segment; joined with what it touches."""
        if size <= 0:
            return
        at = self._segment(start - 1)
        if at is None or at not in self.expandable:
            self.add(start, size)
            self.expandable.add(start)
            at = start
        elif start + size > self.end[at]:
            self.reserved += start + size - self.end[at]
            self.end[at] = start + size
        after = self.end[at]
        if after in self.expandable:
            end, blocks = self.end[after], self.used[after]
            self.drop(after)
            self.used[at].extend(blocks)
            self.reserved += end - after
            self.end[at] = end

    def unmap(self, start: int, size: int) -> None:
        """Shrink an expandable segment, perhaps in its middle."""
        at = self._segment(start)
        if at is None or size <= 0:
            return
        end, blocks = self.end[at], self.used[at]
        stop = start + size
        behind = blocks[bisect_left(blocks, stop) :]
        del blocks[bisect_left(blocks, start) :]
        self.reserved -= end - start
        self.end[at] = start
        if start == at:
            self.drop(at)
        if stop < end:
            self.add(stop, end - stop)
            self.used[stop] = behind
            self.expandable.add(stop)

    def _segment(self, address: int) -> int | None:
        at = bisect_right(self.starts, address) - 1
        if at < 0:
            return None
        start = self.starts[at]
        return start if address < self.end[start] else None

    def place(self, address: int, size: int) -> None:
        """Note a block that is in use."""
        self.size[address] = size
        start = self._segment(address)
        if start is not None:
            insort(self.used[start], address)

    def allocate(self, address: int, requested: int) -> int:
        """Hand out the block at an address; return its size."""
        size = _rounded(requested)
        start = self._segment(address)
        if start is not None:
            used = self.used[start]
            at = bisect_left(used, address)
            after = used[at] if at < len(used) else self.end[start]
            rest = after - address - size
            if size <= _SMALL or start in self.expandable:
                is_cut = rest >= _GRAIN
            else:
                is_cut = rest > _SMALL and size < self.max_split_bytes
            if rest > 0 and not is_cut:
                size += rest
            used.insert(at, address)
        self.size[address] = size
        return size

    def release(self, address: int) -> None:
        """Take a block back."""
        self.size.pop(address, None)
        start = self._segment(address)
        if start is not None:
            used = self.used[start]
            at = bisect_left(used, address)
            if at < len(used) and used[at] == address:
                del used[at]

    def room(self, peak: int) -> AllocatorState:
        """Say what is free, and in what pieces."""
        free = largest = 0
        for start, used in self.used.items():
            if start in self.private:
                continue
            at = start
            for block in [*used, self.end[start]]:
                gap = block - at
                if gap > 0:
                    free += gap
                    largest = max(largest, gap)
                at = max(at, block + self.size.get(block, 0))
        return AllocatorState(self.reserved, peak, free, largest)


def _shifted(addresses: NDArray[np.int64]) -> list[int]:
    return [address + _SHIFT for address in addresses.tolist()]


def _rounded(size: int) -> int:
    return max(_GRAIN, -(-size // _GRAIN) * _GRAIN)


def replay_allocator(snapshot: MemorySnapshot, device: int) -> AllocatorReplay:
    """Apply a device's events to the state it must have started from."""
    events = snapshot.events
    rows = np.flatnonzero(events.device == device)
    steps = list(
        zip(
            rows.tolist(), events.action[rows].tolist(), _shifted(events.address[rows]),
            events.size_bytes[rows].tolist(), strict=True,
        )
    )  # fmt: skip
    memory = _before(snapshot, device, steps)
    asked_back: set[int] = set()
    peak = allocated = sum(memory.size.values())
    peak_reserved = memory.reserved
    failures: dict[int, AllocatorState] = {}
    for row, action, address, size in steps:
        if action == ALLOC:
            allocated += memory.allocate(address, size)
            peak = max(peak, allocated)
        elif action == FREE_REQUESTED:
            allocated -= memory.size.get(address, 0)
            asked_back.add(address)
        elif action == FREE_COMPLETED:
            if address in asked_back:
                asked_back.discard(address)
            else:
                allocated -= memory.size.get(address, 0)
            memory.release(address)
        elif action == OOM and len(failures) < _MOST_FAILURES:
            failures[row] = memory.room(peak_reserved)
        else:
            _segment_event(memory, action, address, size)
            peak_reserved = max(peak_reserved, memory.reserved)
    here = snapshot.segments.device == device
    is_exact = (
        sum(memory.size.values()) == int(snapshot.segments.active_bytes[here].sum())
        and memory.reserved == int(snapshot.segments.total_bytes[here].sum())
    )  # fmt: skip
    return AllocatorReplay(peak, peak_reserved, failures, is_exact)


def _segment_event(memory: _Memory, action: int, address: int, size: int) -> None:
    if action == SEGMENT_ALLOC:
        memory.add(address, size)
    elif action == SEGMENT_FREE:
        memory.drop(address)
    elif action == SEGMENT_MAP:
        memory.map(address, size)
    elif action == SEGMENT_UNMAP:
        memory.unmap(address, size)


_UNDO = {
    SEGMENT_ALLOC: SEGMENT_FREE, SEGMENT_FREE: SEGMENT_ALLOC, SEGMENT_MAP: SEGMENT_UNMAP,
    SEGMENT_UNMAP: SEGMENT_MAP,
}  # fmt: skip


def _before(
    snapshot: MemorySnapshot, device: int, steps: list[tuple[int, int, int, int]]
) -> _Memory:
    """Put segments and blocks back to how they were before the first event."""
    split = snapshot.allocator_settings.get("max_split_size", -1)
    memory = _Memory(max_split_bytes=split if isinstance(split, int) and split > 0 else 1 << 62)
    segments, blocks = snapshot.segments, snapshot.blocks
    for row in np.flatnonzero(segments.device == device).tolist():
        start = int(segments.address[row]) + _SHIFT
        memory.add(start, int(segments.total_bytes[row]))
        if segments.is_expandable[row]:
            memory.expandable.add(start)
        if segments.is_private[row]:
            memory.private.add(start)
    first: dict[int, tuple[int, int]] = {}
    for _, action, address, size in steps:
        if action <= FREE_COMPLETED:
            first.setdefault(address, (action, size))
    for _, action, address, size in reversed(steps):
        if action in _UNDO:
            _segment_event(memory, _UNDO[action], address, size)
    mine = (segments.device[blocks.segment] == device) & (blocks.state != INACTIVE)
    for row in np.flatnonzero(mine).tolist():
        address = int(blocks.address[row]) + _SHIFT
        if address not in first:
            memory.place(address, int(blocks.size_bytes[row]))
    for address, (action, size) in first.items():
        if action != ALLOC:
            memory.place(address, _rounded(size))
    return memory
