"""`Lanes`: jobs that wait, in order, in one lane for each shape that jobs have.

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

from meshwright.policy.queue.ask import Standing

Entry = tuple[Any, int, Standing]
"""Key, order of arrival, job: no two compare equal before they come to the job."""
Spot = tuple[int, int]
"""A block of a lane, and a place in it."""
_LONGEST = 256


class Lane:
    """Jobs of one shape, in order."""

    __slots__ = ("blocks", "gpus", "lasts", "shortest_s")

    def __init__(self, gpus: float) -> None:
        """Begin empty."""
        self.gpus = gpus
        self.blocks: list[list[Entry]] = []
        """Never an empty one."""
        self.lasts: list[Entry] = []
        self.shortest_s: list[float] = []
        """How long the shortest job of each block is expected to take."""

    def add(self, entry: Entry) -> None:
        """Put an entry in its place."""
        left_s = entry[2].left_s
        if not self.blocks:
            self._insert(0, [entry])
            return
        block = min(bisect_left(self.lasts, entry), len(self.blocks) - 1)
        entries = self.blocks[block]
        if entry > entries[-1]:
            entries.append(entry)
            self.lasts[block] = entry
        else:
            insort(entries, entry)
        self.shortest_s[block] = min(self.shortest_s[block], left_s)
        if len(entries) > _LONGEST:
            half = entries[_LONGEST // 2 :]
            del entries[_LONGEST // 2 :]
            self.lasts[block] = entries[-1]
            self.shortest_s[block] = _shortest(entries)
            self._insert(block + 1, half)

    def _insert(self, block: int, entries: list[Entry]) -> None:
        self.blocks.insert(block, entries)
        self.lasts.insert(block, entries[-1])
        self.shortest_s.insert(block, _shortest(entries))

    def at(self, spot: Spot) -> Entry:
        """Return the entry at a spot."""
        return self.blocks[spot[0]][spot[1]]

    def take(self, spot: Spot = (0, 0)) -> Standing:
        """Take out the entry at a spot, or the first; what comes after it moves up to its spot."""
        block, at = spot
        entries = self.blocks[block]
        job = entries.pop(at)[2]
        if not entries:
            del self.blocks[block], self.lasts[block], self.shortest_s[block]
        else:
            self.lasts[block] = entries[-1]
            if job.left_s <= self.shortest_s[block]:
                self.shortest_s[block] = _shortest(entries)
        return job

    def entries(self, since: tuple[Any, int] | None = None) -> Iterator[Entry]:
        """Return all entries, or those from a key and an order of arrival on."""
        if since is None:
            return chain.from_iterable(self.blocks)
        begin: Any = since
        block = bisect_left(self.lasts, begin)
        if block == len(self.blocks):
            return iter(())
        entries = self.blocks[block]
        first = islice(entries, bisect_left(entries, begin), None)
        return chain(first, chain.from_iterable(islice(self.blocks, block + 1, None)))

    def find(self, entry: Entry) -> Spot:
        """Return the spot of an entry that is there."""
        block = bisect_left(self.lasts, entry)
        return block, bisect_left(self.blocks[block], entry)

    def from_spot(self, spot: Spot) -> Spot | None:
        """Return the spot itself, or the next where its block has ended."""
        block, at = spot
        if block < len(self.blocks) and at >= len(self.blocks[block]):
            block, at = block + 1, 0
        return (block, at) if block < len(self.blocks) else None

    def seek(self, spot: Spot, within_s: float) -> Spot | None:
        """Return where, from a spot on, the next job is that takes no longer than that."""
        first, at = spot
        for block in range(first, len(self.blocks)):
            if self.shortest_s[block] <= within_s:
                entries = self.blocks[block]
                for place in range(at, len(entries)):
                    if entries[place][2].left_s <= within_s:
                        return block, place
            at = 0
        return None


def _shortest(entries: list[Entry]) -> float:
    return min(entry[2].left_s for entry in entries)


class Lanes:
    """Jobs that wait, by shape and in order."""

    def __init__(self) -> None:
        """Begin empty."""
        self.lanes: dict[Hashable, Lane] = {}
        self.count = 0

    def __len__(self) -> int:
        """Count those who wait."""
        return self.count

    def add(self, key: Any, job: Standing) -> None:
        """Let a job wait at its place."""
        lane = self.lanes.get(job.shape)
        if lane is None:
            lane = self.lanes[job.shape] = Lane(job.gpus)
        lane.add((key, job.index, job))
        self.count += 1

    def remove(self, key: Any, job: Standing) -> None:
        """Take out a job wherever it waits."""
        lane = self.lanes[job.shape]
        self.take(lane, lane.find((key, job.index, job)))

    def take(self, lane: Lane, spot: Spot = (0, 0)) -> Standing:
        """Take out the head of a lane, or the entry at a spot."""
        self.count -= 1
        return lane.take(spot)

    def first(self, free: float) -> Lane | None:
        """Return the lane whose head comes first of all that ask for no more than `free`."""
        best: Lane | None = None
        head: Entry | None = None
        for lane in self.lanes.values():
            if lane.gpus <= free and lane.blocks:
                entry = lane.blocks[0][0]
                if head is None or entry < head:
                    best, head = lane, entry
        return best

    def in_order(self, since: tuple[Any, int] | None = None) -> Iterator[Standing]:
        """Return all who wait, in order, or those from a key and an order of arrival on."""
        waiting = (lane.entries(since) for lane in self.lanes.values())
        return (job for _, _, job in heapq.merge(*waiting))

    def clear(self) -> None:
        """Let nobody wait."""
        self.lanes.clear()
        self.count = 0
