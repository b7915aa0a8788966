"""`ShapeQueues`: jobs that wait, in order, in one lane for each shape that jobs have.

If one job of a shape does not fit, none of that shape does. A scan over the whole queue so looks at
one job of each shape, of which there are few, and not at each job. A lane is cut into blocks that
know the shortest job in them, so that the next job that is short enough is found without looking at
all the others.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from itertools import chain, islice
from typing import Any

from meshwright.policy.job_queue.job import QueuedJob

Entry = tuple[Any, int, QueuedJob]
"""Key, order of arrival, job: no two compare equal before they come to the job."""
QueuePosition = tuple[int, int]
"""A block of a lane, and a place in it."""
_LONGEST = 256


class ShapeQueue:
    """Jobs of one shape, in order."""

    __slots__ = ("blocks", "gpus", "last_entries", "shortest_s")

    def __init__(self, gpus: float) -> None:
        """Begin empty."""
        self.gpus = gpus
        self.blocks: list[list[Entry]] = []
        """Never an empty one."""
        self.last_entries: list[Entry] = []
        self.shortest_s: list[float] = []
        """How long the shortest job of each block is expected to take."""

    def add(self, entry: Entry) -> None:
        """Put an entry in its place."""
        left_s = entry[2].remaining_s
        if not self.blocks:
            self._insert(0, [entry])
            return
        block = min(bisect_left(self.last_entries, entry), len(self.blocks) - 1)
        entries = self.blocks[block]
        if entry > entries[-1]:
            entries.append(entry)
            self.last_entries[block] = entry
        else:
            insort(entries, entry)
        self.shortest_s[block] = min(self.shortest_s[block], left_s)
        if len(entries) > _LONGEST:
            half = entries[_LONGEST // 2 :]
            del entries[_LONGEST // 2 :]
            self.last_entries[block] = entries[-1]
            self.shortest_s[block] = _shortest(entries)
            self._insert(block + 1, half)

    def _insert(self, block: int, entries: list[Entry]) -> None:
        self.blocks.insert(block, entries)
        self.last_entries.insert(block, entries[-1])
        self.shortest_s.insert(block, _shortest(entries))

    def get(self, spot: QueuePosition) -> Entry:
        """Return the entry at a spot."""
        return self.blocks[spot[0]][spot[1]]

    def pop(self, spot: QueuePosition = (0, 0)) -> QueuedJob:
        """Take out the entry at a spot, or the first; what comes after it moves up to its spot."""
        block, at = spot
        entries = self.blocks[block]
        job = entries.pop(at)[2]
        if not entries:
            del self.blocks[block], self.last_entries[block], self.shortest_s[block]
        else:
            self.last_entries[block] = entries[-1]
            if job.remaining_s <= self.shortest_s[block]:
                self.shortest_s[block] = _shortest(entries)
        return job

    def iter_entries(self, since: tuple[Any, int] | None = None) -> Iterator[Entry]:
        """Return all entries, or those from a key and an order of arrival on."""
        if since is None:
            return chain.from_iterable(self.blocks)
        begin: Any = since
        block = bisect_left(self.last_entries, begin)
        if block == len(self.blocks):
            return iter(())
        entries = self.blocks[block]
        first = islice(entries, bisect_left(entries, begin), None)
        return chain(first, chain.from_iterable(islice(self.blocks, block + 1, None)))

    def find_position(self, entry: Entry) -> QueuePosition:
        """Return the spot of an entry that is there."""
        block = bisect_left(self.last_entries, entry)
        return block, bisect_left(self.blocks[block], entry)

    def resolve_position(self, spot: QueuePosition) -> QueuePosition | None:
        """Return the spot itself, or the next where its block has ended."""
        block, at = spot
        if block < len(self.blocks) and at >= len(self.blocks[block]):
            block, at = block + 1, 0
        return (block, at) if block < len(self.blocks) else None

    def find_shorter(self, spot: QueuePosition, within_s: float) -> QueuePosition | None:
        """Return where, from a spot on, the next job is that takes no longer than that."""
        first, at = spot
        for block in range(first, len(self.blocks)):
            if self.shortest_s[block] <= within_s:
                entries = self.blocks[block]
                for place in range(at, len(entries)):
                    if entries[place][2].remaining_s <= within_s:
                        return block, place
            at = 0
        return None


def _shortest(entries: list[Entry]) -> float:
    return min(entry[2].remaining_s for entry in entries)


class ShapeQueues:
    """Jobs that wait, by shape and in order."""

    def __init__(self) -> None:
        """Begin empty."""
        self.queues: dict[Hashable, ShapeQueue] = {}
        self.count = 0

    def __len__(self) -> int:
        """Count those who wait."""
        return self.count

    def add(self, key: Any, job: QueuedJob) -> None:
        """Let a job wait at its place."""
        lane = self.queues.get(job.shape)
        if lane is None:
            lane = self.queues[job.shape] = ShapeQueue(job.gpus)
        lane.add((key, job.index, job))
        self.count += 1

    def remove(self, key: Any, job: QueuedJob) -> None:
        """Take out a job wherever it waits."""
        lane = self.queues[job.shape]
        self.pop(lane, lane.find_position((key, job.index, job)))

    def pop(self, lane: ShapeQueue, spot: QueuePosition = (0, 0)) -> QueuedJob:
        """Take out the head of a lane, or the entry at a spot."""
        self.count -= 1
        return lane.pop(spot)

    def find_first_fitting(self, free: float) -> ShapeQueue | None:
        """Return the lane whose head comes first of all that ask for no more than `free`."""
        best: ShapeQueue | None = None
        head: Entry | None = None
        for lane in self.queues.values():
            if lane.gpus <= free and lane.blocks:
                entry = lane.blocks[0][0]
                if head is None or entry < head:
                    best, head = lane, entry
        return best

    def iter_ordered(self, since: tuple[Any, int] | None = None) -> Iterator[QueuedJob]:
        """Return all who wait, in order, or those from a key and an order of arrival on."""
        waiting = (lane.iter_entries(since) for lane in self.queues.values())
        return (job for _, _, job in heapq.merge(*waiting))

    def clear(self) -> None:
        """Let nobody wait."""
        self.queues.clear()
        self.count = 0
