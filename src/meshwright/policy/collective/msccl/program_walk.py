"""Lets the lanes of a program run, each waiting for what it needs, until all are done or none can.

There is no time here, only what comes before what. A message of several chunks travels in pieces
that the buffers between two ranks can hold, and only a few pieces fit in between. Lanes that wait
for each other under these rules do so whatever their speed: a network of lists with bounded queues
cannot both hang and not hang.
"""

from collections import deque
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.policy.collective.msccl.thread_block_program import (
    RECEIVING_KINDS,
    SENDING_KINDS,
    ThreadBlock,
    ThreadBlockProgram,
    describe_step,
    format_step_name,
)

ConnectionKey = tuple[int, int, int]
"""Who sends, who receives, and the channel."""
ThreadBlockPosition = tuple[int, int]
"""A rank and a lane of it."""


class StepPiece(NamedTuple):
    """What of a step happens at once."""

    rank: int
    thread_block: int
    step: int
    first: int
    """The first of the chunks of the step that it is about."""
    num_chunks: int
    """How many."""


class ConnectionBuffer(NamedTuple):
    """How messages travel between two ranks."""

    pieces_in_flight: int
    """Pieces that fit in between."""
    chunks_per_piece: int
    """Chunks that travel as one piece."""


UNLIMITED_BUFFER = ConnectionBuffer(1 << 30, 1 << 30)


class ProgramWalk(NamedTuple):
    """How far the lanes came."""

    order: list[StepPiece]
    """All that ran, in an order that respects every dependency."""
    blocked: dict[ThreadBlockPosition, int]
    """The step at which each lane that could not finish waits."""
    waits_for: dict[ThreadBlockPosition, ThreadBlockPosition]
    """The lane that each of them waits for."""


def find_connections(
    program: ThreadBlockProgram,
) -> tuple[dict[ConnectionKey, ThreadBlockPosition], dict[ConnectionKey, ThreadBlockPosition]]:
    """Return the lane that sends on each link, and the one that receives."""
    senders: dict[ConnectionKey, ThreadBlockPosition] = {}
    receivers: dict[ConnectionKey, ThreadBlockPosition] = {}
    for rank, own in enumerate(program.ranks):
        for index, lane in enumerate(own.thread_blocks):
            if lane.send_peer >= 0:
                senders[rank, lane.send_peer, lane.channel] = rank, index
            if lane.recv_peer >= 0:
                receivers[lane.recv_peer, rank, lane.channel] = rank, index
    return senders, receivers


def find_signalling_step(lane: ThreadBlock, step: int) -> int:
    """Return the step whose end lets a wait for `step` pass: the next that is told, or -1.

    MSCCL's lanes publish how far they are, and only at steps marked so (RCCL, msccl_kernel_impl.h).
    """
    for index in range(step, len(lane.steps)):
        if lane.steps[index].has_dependents and lane.steps[index].kind != "nop":
            return index
    return -1


def walk_program(program: ThreadBlockProgram, room: ConnectionBuffer) -> ProgramWalk:
    """Run every lane as far as it gets; the program's links and waits must match."""
    return _Walk(program, room).run()


class _Walk:
    def __init__(self, program: ThreadBlockProgram, room: ConnectionBuffer) -> None:
        self.program, self.room = program, room
        self.senders, self.receivers = find_connections(program)
        self.queued: dict[ConnectionKey, int] = dict.fromkeys(self.senders, 0)
        self.at: dict[ThreadBlockPosition, list[int]] = {
            (rank, lane): [0, 0]
            for rank, own in enumerate(program.ranks)
            for lane in range(len(own.thread_blocks))
        }
        self.order: list[StepPiece] = []
        self.asleep: dict[ThreadBlockPosition, list[ThreadBlockPosition]] = {}

    def run(self) -> ProgramWalk:
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
        return ProgramWalk(self.order, stuck, waits)

    def _advance(
        self, here: ThreadBlockPosition, ready: deque[ThreadBlockPosition]
    ) -> ThreadBlockPosition | None:
        """Run a lane; return the lane it has to wait for, or nothing once it is done."""
        (rank, index), place = here, self.at[here]
        lane = self.program.ranks[rank].thread_blocks[index]
        while place[0] < len(lane.steps):
            number, first = place
            other = self._needs(rank, lane, number, first)
            if other is not None:
                return other
            step = lane.steps[number]
            if step.kind in RECEIVING_KINDS:
                self.queued[lane.recv_peer, rank, lane.channel] -= 1
            if step.kind in SENDING_KINDS:
                self.queued[rank, lane.send_peer, lane.channel] += 1
            length = min(self.room.chunks_per_piece, step.count - first)
            self.order.append(StepPiece(rank, index, number, first, length))
            last = first + length >= step.count
            place[:] = (number + 1, 0) if last else (number, first + length)
            # Whoever sleeps on this lane looks again; most are let go by this very piece.
            ready.extend(self.asleep.pop(here, ()))
        return None

    def _needs(
        self, rank: int, lane: ThreadBlock, number: int, first: int
    ) -> ThreadBlockPosition | None:
        step = lane.steps[number]
        if step.dependency is not None and first == 0:
            other = rank, step.dependency.thread_block
            told = find_signalling_step(
                self.program.ranks[rank].thread_blocks[step.dependency.thread_block],
                step.dependency.step,
            )
            if self.at[other][0] <= told:
                return other
        if step.kind in RECEIVING_KINDS:
            link = lane.recv_peer, rank, lane.channel
            if not self.queued[link]:
                return self.senders[link]
        if step.kind in SENDING_KINDS:
            link = rank, lane.send_peer, lane.channel
            if self.queued[link] >= self.room.pieces_in_flight:
                return self.receivers[link]
        return None


def find_deadlock(
    program: ThreadBlockProgram, walked: ProgramWalk, room: ConnectionBuffer
) -> Problem | None:
    """Return the shortest circle of lanes that wait for each other."""
    if not walked.blocked:
        return None
    circle = _shortest_circle(walked.waits_for)
    lines = []
    for rank, index in circle:
        number = walked.blocked[rank, index]
        lane = program.ranks[rank].thread_blocks[index]
        other, theirs = walked.waits_for[rank, index]
        at = walked.blocked[other, theirs]
        did = describe_step(lane, lane.steps[number])
        lines.append(
            f"{format_step_name(rank, index, number)} ({did}) waits for "
            f"{format_step_name(other, theirs, at)}"
        )
    rank, index = circle[0]
    how = f"{room.pieces_in_flight} pieces of {room.chunks_per_piece} chunks in flight"
    what = f"deadlock with {how}: " + "; ".join(lines)
    fix = ""
    if not walk_program(program, UNLIMITED_BUFFER).blocked:
        fix = "send fewer chunks at once, or send and receive in different lanes"
    return Problem(format_step_name(rank, index, walked.blocked[rank, index]), what, fix)


def _shortest_circle(
    waits: dict[ThreadBlockPosition, ThreadBlockPosition],
) -> list[ThreadBlockPosition]:
    """Every lane waits for one other, so following the waits from anywhere ends in a circle."""
    best: list[ThreadBlockPosition] = []
    seen: set[ThreadBlockPosition] = set()
    for start in waits:
        path: dict[ThreadBlockPosition, int] = {}
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
