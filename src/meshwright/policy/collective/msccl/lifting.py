"""`lift_program`: the collective of a thread-block program, so that an imported one can be used.

Messages become moves, as early as the data they need and the slots they write allow. Lanes, waits
and fused steps are gone: a sum that was only passed on gets a slot, and so does a message whose
source is overwritten before it is taken.
"""

from collections import Counter, deque
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.errors import InputError
from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.collective import ChunkMoves, Collective, Sweep
from meshwright.policy.collective.contract import list_input_slots, list_output_slots
from meshwright.policy.collective.msccl.program_verification import verify_program
from meshwright.policy.collective.msccl.program_walk import (
    UNLIMITED_BUFFER,
    ConnectionKey,
    StepPiece,
    walk_program,
)
from meshwright.policy.collective.msccl.thread_block_program import (
    RECEIVING_KINDS,
    SENDING_KINDS,
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
)

Cell = tuple[int, int]
"""A rank and a slot."""
Row = tuple[int, int, int, int, int, int, int, int]


class _Message(NamedTuple):
    number: int
    slot: int
    """Where it lies: at the sender, or at the receiver once it was put aside."""
    version: tuple[int, ...]
    """How often the slots had been written when it was sent."""


def lift_program(program: ThreadBlockProgram) -> Collective:
    """Return a program as a collective; one that is not sound is refused with its proof."""
    proof = verify_program(program)
    if not proof.is_correct:
        raise InputError(proof.problems)
    order = walk_program(program, UNLIMITED_BUFFER).order
    first = _Lift(program, frozenset())
    for unit in order:
        first.take(unit)
    second = _Lift(program, frozenset(first.overtaken))
    for unit in order:
        second.take(unit)
    return second.done()


class _Lift:
    def __init__(self, program: ThreadBlockProgram, aside: frozenset[int]) -> None:
        self.program, self.task, self.aside = program, program.specification, aside
        self.overtaken: set[int] = set()
        """Messages whose source was written again before they were taken."""
        self.shared = program.in_place
        output = 0 if self.shared else self.task.chunks
        scratch = max((own.scratch_chunks for own in program.ranks), default=0)
        self._scratch = self.task.slots + (0 if self.task.op == "all_to_all" else output)
        self._next = [self._scratch + scratch] * len(program.ranks)
        self._messages = 0
        self._queues: dict[ConnectionKey, deque[_Message]] = {}
        self._versions: Counter[Cell] = Counter()
        self._read: dict[Cell, int] = {}
        self._written: dict[Cell, int] = {}
        self._levels: list[list[Row]] = []

    def slot(self, rank: int, spot: BufferChunk) -> int:
        """Return the slot that a chunk of a buffer is."""
        task = self.task
        if spot.buffer == "scratch":
            return self._scratch + spot.chunk
        given, wanted = list_input_slots(task, rank), list_output_slots(task, rank)
        if self.shared:
            # Both buffers are the same slots, except that all-to-all promises slots of its own.
            inner = wanted if spot.buffer == "output" else given
            return spot.chunk + (0 if task.op == "all_to_all" else inner.start)
        if spot.buffer == "input":
            return given.start + spot.chunk
        return task.chunks + spot.chunk

    def take(self, unit: StepPiece) -> None:
        """Carry out one step."""
        lane = self.program.ranks[unit.rank].thread_blocks[unit.thread_block]
        step = lane.steps[unit.step]
        if step.kind == "nop":
            return
        lies = self._receive(unit.rank, lane, step)
        if step.kind in ("cpy", "re") and step.src is not None and step.dst is not None:
            source, target = self.slot(unit.rank, step.src), self.slot(unit.rank, step.dst)
            if source != target:
                here, there = (unit.rank, source), (unit.rank, target)
                self._move(here, there, step.count, adds=step.kind == "re")
        if step.kind == "s" and step.src is not None:
            lies = self.slot(unit.rank, step.src)
        if step.kind in SENDING_KINDS:
            self._send(unit.rank, lane, step, lies)

    def _receive(self, rank: int, lane: ThreadBlock, step: ThreadBlockStep) -> int:
        """Take a message, if the step does; return where the result lies."""
        if step.kind not in RECEIVING_KINDS:
            return -1
        message = self._queues[lane.recv_peer, rank, lane.channel].popleft()
        target = self._fresh(rank, step) if step.dst is None else self.slot(rank, step.dst)
        if step.src is not None:
            base = self.slot(rank, step.src)
            if base != target:
                self._move((rank, base), (rank, target), step.count)
        origin = rank if message.number in self.aside else lane.recv_peer
        if self._version(origin, message.slot, step.count) != message.version:
            self.overtaken.add(message.number)
        source, adds = (origin, message.slot), step.src is not None
        self._move(source, (rank, target), step.count, adds=adds, channel=lane.channel)
        return target

    def _send(self, rank: int, lane: ThreadBlock, step: ThreadBlockStep, lies: int) -> None:
        number, there = self._messages, rank
        self._messages += 1
        if number in self.aside:
            slot = self._fresh(lane.send_peer, step)
            self._move((rank, lies), (lane.send_peer, slot), step.count, channel=lane.channel)
            there, lies = lane.send_peer, slot
        message = _Message(number, lies, self._version(there, lies, step.count))
        self._queues.setdefault((rank, lane.send_peer, lane.channel), deque()).append(message)

    def _fresh(self, rank: int, step: ThreadBlockStep) -> int:
        self._next[rank] += step.count
        return self._next[rank] - step.count

    def _version(self, rank: int, slot: int, count: int) -> tuple[int, ...]:
        return tuple(self._versions[rank, slot + index] for index in range(count))

    def _move(
        self, source: Cell, target: Cell, count: int, *, adds: bool = False, channel: int = 0
    ) -> None:
        reads = [(source[0], source[1] + index) for index in range(count)]
        writes = [(target[0], target[1] + index) for index in range(count)]
        level = 0
        for cell in reads:
            level = max(level, self._written.get(cell, -1) + 1)
        for cell in writes:
            level = max(level, self._written.get(cell, -1) + 1, self._read.get(cell, -1) + 1)
        for cell in reads:
            self._read[cell] = max(level, self._read.get(cell, -1))
        for cell in writes:
            self._written[cell] = level
            self._versions[cell] += 1
        while len(self._levels) <= level:
            self._levels.append([])
        row = (source[0], target[0], source[1], target[1], count, int(adds), channel, 0)
        self._levels[level].append(row)

    def done(self) -> Collective:
        """Return the collective, with the results brought to where they were promised."""
        for rank in range(len(self.program.ranks)):
            wanted = list_output_slots(self.task, rank)
            for index, slot in enumerate(wanted):
                lies = self.slot(rank, BufferChunk("output", index))
                if lies != slot:
                    self._move((rank, lies), (rank, slot), 1)
        sweeps = tuple(
            Sweep(moves=ChunkMoves(np.array(rows, dtype=np.int32).reshape(-1, 8)))
            for rows in self._levels
        )
        return msgspec.structs.replace(self.task, sweeps=sweeps, slots=max(self._next))
