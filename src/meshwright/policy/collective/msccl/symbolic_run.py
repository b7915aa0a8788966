"""Runs a lane program on symbols: finds races, and what lies in every buffer at the end.

A value is a chunk of the message and the set of ranks whose contributions it holds, with those it
holds more than once. Two accesses of one chunk, one of them a write, race where no chain of lane
order, waits and messages leads from one to the other. Where nothing races, any order of running
gives the same values, so one is enough.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Problem
from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.contract import (
    SUM,
    build_contract,
    list_input_slots,
    list_output_slots,
)
from meshwright.policy.collective.msccl.program_checks import get_memory_chunk
from meshwright.policy.collective.msccl.program_walk import (
    ConnectionKey,
    StepPiece,
    find_signalling_step,
)
from meshwright.policy.collective.msccl.thread_block_program import (
    DST_WRITING_KINDS,
    RECEIVING_KINDS,
    SENDING_KINDS,
    SRC_READING_KINDS,
    ThreadBlockProgram,
    ThreadBlockStep,
    format_step_name,
)

Clock = NDArray[np.int32]
Cell = tuple[int, str, int]
"""A rank, a buffer of it and a chunk there."""


class ChunkContributions(NamedTuple):
    """What one chunk of a buffer holds."""

    chunk: int
    """Which chunk of the message."""
    ranks: int
    """Whose contributions it holds, one bit each."""
    duplicate_ranks: int = 0
    """Whose contributions it holds more than once."""


class _Access(NamedTuple):
    unit: StepPiece
    lane: int
    tick: int


class SymbolicRun:
    """Carries out a program, one piece of one step at a time."""

    def __init__(self, program: ThreadBlockProgram, *, shared: bool) -> None:
        self.program, self.task = program, program.specification
        self.shared = shared
        """Whether input and output lie in the same memory."""
        self.values: dict[Cell, ChunkContributions] = {}
        self._give()
        self._numbers = {
            (rank, lane): number
            for number, (rank, lane) in enumerate(
                (rank, lane)
                for rank, own in enumerate(program.ranks)
                for lane in range(len(own.thread_blocks))
            )
        }
        lanes = len(self._numbers)
        self._clocks = np.zeros((lanes, lanes), dtype=np.int32)
        self._told: dict[tuple[int, int], dict[int, Clock]] = {key: {} for key in self._numbers}
        self._queues: dict[ConnectionKey, deque[tuple[Clock, list[ChunkContributions]]]] = {}
        self._writer: dict[Cell, _Access] = {}
        self._readers: dict[Cell, dict[int, _Access]] = {}

    def _give(self) -> None:
        promise = build_contract(self.task)
        for rank, slot, index, _ in promise.inputs.tolist():
            first = list_input_slots(self.task, rank).start
            cell = self.get_memory_cell(rank, BufferChunk("input", slot - first))
            self.values[cell] = ChunkContributions(index, 1 << rank)

    def get_memory_cell(self, rank: int, spot: BufferChunk, offset: int = 0) -> Cell:
        """Return the memory behind a chunk of a buffer."""
        memory, chunk = get_memory_chunk(self.program, rank, spot, shared=self.shared)
        return rank, memory, chunk + offset

    def run_piece(self, unit: StepPiece) -> Problem | None:
        """Carry out one piece of a step, or say why it must not be."""
        lane = self.program.ranks[unit.rank].thread_blocks[unit.thread_block]
        step = lane.steps[unit.step]
        here = self._numbers[unit.rank, unit.thread_block]
        clock = self._clocks[here]
        if step.dependency is not None and unit.first == 0:
            other = self.program.ranks[unit.rank].thread_blocks[step.dependency.thread_block]
            told = self._told[unit.rank, step.dependency.thread_block]
            np.maximum(clock, told[find_signalling_step(other, step.dependency.step)], out=clock)
        arrived: list[ChunkContributions] = []
        if step.kind in RECEIVING_KINDS:
            sent, arrived = self._queues[lane.recv_peer, unit.rank, lane.channel].popleft()
            np.maximum(clock, sent, out=clock)
        clock[here] += 1
        leaving: list[ChunkContributions] = []
        for index in range(unit.num_chunks if step.kind != "nop" else 0):
            value = arrived[index] if arrived else None
            chunk = unit.first + index
            result = self._race(unit, step, chunk, clock) or self._compute(unit, step, chunk, value)
            if isinstance(result, Problem):
                return result
            leaving.append(result)
        if step.kind in SENDING_KINDS:
            link = unit.rank, lane.send_peer, lane.channel
            self._queues.setdefault(link, deque()).append((clock.copy(), leaving))
        if step.has_dependents and unit.first + unit.num_chunks >= step.count:
            self._told[unit.rank, unit.thread_block][unit.step] = clock.copy()
        return None

    def _compute(
        self, unit: StepPiece, step: ThreadBlockStep, chunk: int, arrived: ChunkContributions | None
    ) -> Problem | ChunkContributions:
        read = None
        if step.kind in SRC_READING_KINDS and step.src is not None:
            read = self.values.get(self.get_memory_cell(unit.rank, step.src, chunk))
            if read is None:
                return self._empty(unit, step.src, chunk)
        result, other = (read, None) if arrived is None else (arrived, read)
        if step.kind == "re" and step.dst is not None:
            other = self.values.get(self.get_memory_cell(unit.rank, step.dst, chunk))
            if other is None:
                return self._empty(unit, step.dst, chunk)
        assert result is not None  # every kind but nop reads or receives
        if other is not None:
            if result.chunk != other.chunk:
                what = f"adds chunk {result.chunk} of the message to chunk {other.chunk}"
                return Problem(self._at(unit), what, "add equal chunks only")
            double = result.duplicate_ranks | other.duplicate_ranks | (result.ranks & other.ranks)
            result = ChunkContributions(result.chunk, result.ranks | other.ranks, double)
        if step.kind in DST_WRITING_KINDS and step.dst is not None:
            self.values[self.get_memory_cell(unit.rank, step.dst, chunk)] = result
        return result

    def _race(
        self, unit: StepPiece, step: ThreadBlockStep, chunk: int, clock: Clock
    ) -> Problem | None:
        here = self._numbers[unit.rank, unit.thread_block]
        reads, writes = [], []
        if step.kind in SRC_READING_KINDS and step.src is not None:
            reads.append(self.get_memory_cell(unit.rank, step.src, chunk))
        if step.kind in DST_WRITING_KINDS and step.dst is not None:
            writes.append(self.get_memory_cell(unit.rank, step.dst, chunk))
        if step.kind == "cpy" and reads == writes:
            return None  # copying a chunk onto itself changes nothing for anyone
        access = _Access(unit, here, int(clock[here]))
        for cell in reads:
            writer = self._writer.get(cell)
            if writer is not None and writer.tick > clock[writer.lane]:
                return self._conflict(cell, writer, access, "written", "read")
            self._readers.setdefault(cell, {})[here] = access
        for cell in writes:
            writer = self._writer.get(cell)
            if writer is not None and writer.tick > clock[writer.lane]:
                return self._conflict(cell, writer, access, "written", "written")
            for reader in self._readers.pop(cell, {}).values():
                if reader.tick > clock[reader.lane]:
                    return self._conflict(cell, reader, access, "read", "written")
            self._writer[cell] = access
        return None

    def _conflict(
        self, cell: Cell, first: _Access, second: _Access, did: str, does: str
    ) -> Problem:
        one, two = first.unit, second.unit
        what = (
            f"race on {cell[1]} chunk {cell[2]}{self._mode()}: {did} by lane {one.thread_block}, "
            f"step "
            f"{one.step} and {does} by lane {two.thread_block}, step {two.step}, with nothing to "
            f"say which "
            "comes first"
        )
        fix = f"let one step wait for the other: lane {two.thread_block}, step {two.step} for lane "
        return Problem(self._at(two), what, f"{fix}{one.thread_block}, step {one.step}")

    def check_output(self) -> Problem | None:
        """Compare what lies in the output with what was promised."""
        promise = build_contract(self.task)
        everyone = (1 << len(self.program.ranks)) - 1
        for rank, slot, number, part in promise.outputs.tolist():
            output = BufferChunk("output", slot - list_output_slots(self.task, rank).start)
            value = self.values.get(self.get_memory_cell(rank, output))
            where = f"rank {rank}, output chunk {output.chunk}{self._mode()}"
            if value is None:
                return Problem(where, "holds nothing at the end")
            if number == SUM:
                right = ChunkContributions(part, everyone)
            else:
                right = ChunkContributions(number % promise.width, 1 << (number // promise.width))
            if value != right:
                return Problem(where, _difference(value, right))
        return None

    def _empty(self, unit: StepPiece, spot: BufferChunk, chunk: int) -> Problem:
        what = f"reads {spot.buffer} chunk {spot.chunk + chunk}, which holds nothing yet"
        return Problem(self._at(unit), f"{what}{self._mode()}", "write it first")

    def _at(self, unit: StepPiece) -> str:
        return format_step_name(unit.rank, unit.thread_block, unit.step)

    def _mode(self) -> str:
        return " (run in place)" if self.shared else ""


def _difference(value: ChunkContributions, right: ChunkContributions) -> str:
    """Say what a chunk lacks or holds too much of."""
    if value.chunk != right.chunk:
        return f"holds chunk {value.chunk} of the message, not chunk {right.chunk}"
    said = []
    if value.duplicate_ranks:
        said.append(
            f"counts chunk {value.chunk} of rank {_lowest(value.duplicate_ranks)} more than once"
        )
    lacking, foreign = right.ranks & ~value.ranks, value.ranks & ~right.ranks
    if lacking:
        said.append(f"lacks chunk {right.chunk} of rank {_lowest(lacking)}")
    if foreign:
        what = f"chunk {value.chunk} of rank {_lowest(foreign)}"
        said.append(f"holds {what}, which belongs elsewhere")
    return "; ".join(said)


def _lowest(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1
