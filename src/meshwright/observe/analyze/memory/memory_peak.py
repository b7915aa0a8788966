"""What is live at one moment: by category, by line of code, and the largest single tensors."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.allocation_lifetimes import NO_EVENT, mask_live_at
from meshwright.observe.analyze.memory.memory_categories import (
    CATEGORIES,
    NO_STACK,
    CategorizedMemory,
    MemorySource,
    find_user_line,
    sum_by_line,
)
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    ALLOC,
    FREE_COMPLETED,
    INACTIVE,
    MemorySnapshot,
    Numbers,
)

_UNKNOWN = CATEGORIES.index("unknown")


class LiveTensor(NamedTuple):
    """One live allocation."""

    size_bytes: int
    line: str
    category: str


class LiveMemory(NamedTuple):
    """What was live after one event."""

    live_bytes: int
    time_us: int
    by_category: tuple[tuple[str, int], ...]
    before_recording_bytes: int
    """Part of the live bytes that was allocated before the first event."""
    sources: tuple[MemorySource, ...]
    largest_tensors: tuple[LiveTensor, ...]


def attribute_live_memory(
    known: CategorizedMemory, device: int, event: int, live_bytes: int
) -> LiveMemory:
    """Attribute the live bytes after an event; `NO_EVENT` stands for before the first.

    What is older than the recording is told by the blocks that are still there (their stacks, if
    kept); what was freed since shows as unknown.
    """
    snapshot, lives = known.snapshot, known.lifetimes
    alive = (
        mask_live_at(lives, event, device)
        if event != NO_EVENT
        else np.zeros(lives.alloc_event.size, bool)
    )
    old = _old_blocks(snapshot, device)
    blocks = snapshot.blocks
    stack = np.concatenate([lives.stack[alive], blocks.stack[old]])
    kinds = np.concatenate([known.category[alive], known.block_category[old]])
    sizes = np.concatenate([lives.size_bytes[alive], blocks.size_bytes[old]])
    before = live_bytes - int(lives.size_bytes[alive].sum())
    lost = live_bytes - int(sizes.sum())
    if lost > 0:  # older than the recording, and freed during it after this moment
        stack = np.append(stack, 0)
        kinds = np.append(kinds, _UNKNOWN)
        sizes = np.append(sizes, lost)
    sums = np.zeros(len(CATEGORIES), np.int64)
    np.add.at(sums, kinds, sizes)
    if lost < 0:  # blocks carry rounded sizes, events the requested: take it from the unknown
        sums[_UNKNOWN] = max(0, int(sums[_UNKNOWN]) + lost)
    biggest = np.argsort(-sizes[: sizes.size - (lost > 0)], kind="stable")[:20]
    return LiveMemory(
        live_bytes,
        int(snapshot.events.time_us[event]) if event != NO_EVENT else -1,
        tuple((name, int(sums[code])) for code, name in enumerate(CATEGORIES)),
        before,
        sum_by_line(snapshot, stack, kinds, sizes),
        tuple(
            LiveTensor(
                int(sizes[row]),
                find_user_line(snapshot.get_stack(int(stack[row]))) or NO_STACK,
                CATEGORIES[int(kinds[row])],
            )
            for row in biggest
        ),
    )


def _old_blocks(snapshot: MemorySnapshot, device: int) -> Numbers:
    """Return the blocks in use now that no event allocated."""
    blocks = snapshot.blocks
    here = snapshot.segments.device[blocks.segment] == device
    used = np.flatnonzero(here & (blocks.state != INACTIVE))
    events = snapshot.events
    touched = (events.action == ALLOC) | (events.action == FREE_COMPLETED)
    known = events.address[touched & (events.device == device)]
    return used[~np.isin(blocks.address[used], known)]
