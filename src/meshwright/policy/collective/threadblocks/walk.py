"""Lets the lanes of a program run, each waiting for what it needs, until all are done or none can.

There is no time here, only what comes before what. A message of several chunks travels in pieces
that the buffers between two ranks can hold, and only a few pieces fit in between. Lanes that wait
for each other under these rules do so whatever their speed: a network of lists with bounded queues
cannot both hang and not hang.
"""

from collections import deque
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.policy.collective.threadblocks.program import (
    RECEIVING,
    SENDING,
    Lane,
    LaneProgram,
    described,
    step_name,
)

Link = tuple[int, int, int]
"""Who sends, who receives, and the channel."""
At = tuple[int, int]
"""A rank and a lane of it."""


class Unit(NamedTuple):
    """What of a step happens at once."""

    rank: int
    lane: int
    step: int
    first: int
    """The first of the chunks of the step that it is about."""
    length: int
    """How many."""


class Room(NamedTuple):
    """How messages travel between two ranks."""

    in_flight: int
    """Pieces that fit in between."""
    at_once: int
    """Chunks that travel as one piece."""


ENDLESS = Room(1 << 30, 1 << 30)


class Walk(NamedTuple):
    """How far the lanes came."""

    order: list[Unit]
    """All that ran, in an order that respects every dependency."""
    stuck: dict[At, int]
    """The step at which each lane that could not finish waits."""
    waits: dict[At, At]
    """The lane that each of them waits for."""


def links(program: LaneProgram) -> tuple[dict[Link, At], dict[Link, At]]:
    """Return the lane that sends on each link, and the one that receives."""
    senders: dict[Link, At] = {}
    receivers: dict[Link, At] = {}
    for rank, own in enumerate(program.ranks):
        for index, lane in enumerate(own.lanes):
            if lane.send >= 0:
                senders[rank, lane.send, lane.channel] = rank, index
            if lane.receive >= 0:
                receivers[lane.receive, rank, lane.channel] = rank, index
    return senders, receivers


def announced(lane: Lane, step: int) -> int:
    """Return the step whose end lets a wait for `step` pass: the next that is told, or -1.

    MSCCL's lanes publish how far they are, and only at steps marked so (RCCL, msccl_kernel_impl.h).
    """
    for index in range(step, len(lane.steps)):
        if lane.steps[index].told and lane.steps[index].kind != "nop":
            return index
    return -1


def walk(program: LaneProgram, room: Room) -> Walk:
    """Run every lane as far as it gets; the program's links and waits must match."""
    return _Walk(program, room).run()


class _Walk:
    def __init__(self, program: LaneProgram, room: Room) -> None:
        self.program, self.room = program, room
        self.senders, self.receivers = links(program)
        self.queued: dict[Link, int] = dict.fromkeys(self.senders, 0)
        self.at: dict[At, list[int]] = {
            (rank, lane): [0, 0]
            for rank, own in enumerate(program.ranks)
            for lane in range(len(own.lanes))
        }
        self.order: list[Unit] = []
        self.asleep: dict[At, list[At]] = {}

    def run(self) -> Walk:
        ready = deque(self.at)
        while ready:
            here = ready.popleft()
            other = self._advance(here, ready)
            if other is not None:
                self.asleep.setdefault(other, []).append(here)
        stuck, waits = {}, {}
        for other, sleepers in self.asleep.items():
            for here in sleepers:
                stuck[here], waits[here] = self.at[here][0], other
        return Walk(self.order, stuck, waits)

    def _advance(self, here: At, ready: deque[At]) -> At | None:
        """Run a lane; return the lane it has to wait for, or nothing once it is done."""
        (rank, index), place = here, self.at[here]
        lane = self.program.ranks[rank].lanes[index]
        while place[0] < len(lane.steps):
            number, first = place
            other = self._needs(rank, lane, number, first)
            if other is not None:
                return other
            step = lane.steps[number]
            if step.kind in RECEIVING:
                self.queued[lane.receive, rank, lane.channel] -= 1
            if step.kind in SENDING:
                self.queued[rank, lane.send, lane.channel] += 1
            length = min(self.room.at_once, step.count - first)
            self.order.append(Unit(rank, index, number, first, length))
            last = first + length >= step.count
            place[:] = (number + 1, 0) if last else (number, first + length)
            # Whoever sleeps on this lane looks again; most are let go by this very piece.
            ready.extend(self.asleep.pop(here, ()))
        return None

    def _needs(self, rank: int, lane: Lane, number: int, first: int) -> At | None:
        step = lane.steps[number]
        if step.wait is not None and first == 0:
            other = rank, step.wait.lane
            told = announced(self.program.ranks[rank].lanes[step.wait.lane], step.wait.step)
            if self.at[other][0] <= told:
                return other
        if step.kind in RECEIVING:
            link = lane.receive, rank, lane.channel
            if not self.queued[link]:
                return self.senders[link]
        if step.kind in SENDING:
            link = rank, lane.send, lane.channel
            if self.queued[link] >= self.room.in_flight:
                return self.receivers[link]
        return None


def deadlock(program: LaneProgram, walked: Walk, room: Room) -> Problem | None:
    """Return the shortest circle of lanes that wait for each other."""
    if not walked.stuck:
        return None
    circle = _shortest_circle(walked.waits)
    lines = []
    for rank, index in circle:
        number = walked.stuck[rank, index]
        lane = program.ranks[rank].lanes[index]
        other, theirs = walked.waits[rank, index]
        at = walked.stuck[other, theirs]
        did = described(lane, lane.steps[number])
        lines.append(
            f"{step_name(rank, index, number)} ({did}) waits for {step_name(other, theirs, at)}"
        )
    rank, index = circle[0]
    how = f"{room.in_flight} pieces of {room.at_once} chunks in flight"
    what = f"deadlock with {how}: " + "; ".join(lines)
    fix = ""
    if not walk(program, ENDLESS).stuck:
        fix = "send fewer chunks at once, or send and receive in different lanes"
    return Problem(step_name(rank, index, walked.stuck[rank, index]), what, fix)


def _shortest_circle(waits: dict[At, At]) -> list[At]:
    """Every lane waits for one other, so following the waits from anywhere ends in a circle."""
    best: list[At] = []
    seen: set[At] = set()
    for start in waits:
        path: dict[At, int] = {}
        here = start
        while here in waits and here not in seen and here not in path:
            path[here] = len(path)
            here = waits[here]
        if here in path:
            circle = list(path)[path[here] :]
            if not best or len(circle) < len(best):
                best = circle
        seen.update(path)
    return best
