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
from meshwright.policy.collective.contract import SUM, contract, given_slots, wanted_slots
from meshwright.policy.collective.placement import Spot
from meshwright.policy.collective.threadblocks.program import (
    READS_SRC,
    RECEIVING,
    SENDING,
    WRITES_DST,
    LaneProgram,
    Step,
    step_name,
)
from meshwright.policy.collective.threadblocks.shape import memory_of
from meshwright.policy.collective.threadblocks.walk import Link, Unit, announced

Clock = NDArray[np.int32]
Cell = tuple[int, str, int]
"""A rank, a buffer of it and a chunk there."""


class Value(NamedTuple):
    """What one chunk of a buffer holds."""

    chunk: int
    """Which chunk of the message."""
    ranks: int
    """Whose contributions it holds, one bit each."""
    double: int = 0
    """Whose contributions it holds more than once."""


class _Access(NamedTuple):
    unit: Unit
    lane: int
    tick: int


class LaneRun:
    """Carries out a program, one piece of one step at a time."""

    def __init__(self, program: LaneProgram, *, shared: bool) -> None:
        self.program, self.task = program, program.task
        self.shared = shared
        """Whether input and output lie in the same memory."""
        self.values: dict[Cell, Value] = {}
        self._give()
        self._numbers = {
            (rank, lane): number
            for number, (rank, lane) in enumerate(
                (rank, lane)
                for rank, own in enumerate(program.ranks)
                for lane in range(len(own.lanes))
            )
        }
        lanes = len(self._numbers)
        self._clocks = np.zeros((lanes, lanes), dtype=np.int32)
        self._told: dict[tuple[int, int], dict[int, Clock]] = {key: {} for key in self._numbers}
        self._queues: dict[Link, deque[tuple[Clock, list[Value]]]] = {}
        self._writer: dict[Cell, _Access] = {}
        self._readers: dict[Cell, dict[int, _Access]] = {}

    def _give(self) -> None:
        promise = contract(self.task)
        for rank, slot, index, _ in promise.given.tolist():
            first = given_slots(self.task, rank).start
            cell = self.cell(rank, Spot("input", slot - first))
            self.values[cell] = Value(index, 1 << rank)

    def cell(self, rank: int, spot: Spot, offset: int = 0) -> Cell:
        """Return the memory behind a chunk of a buffer."""
        memory, chunk = memory_of(self.program, rank, spot, shared=self.shared)
        return rank, memory, chunk + offset

    def step(self, unit: Unit) -> Problem | None:
        """Carry out one piece of a step, or say why it must not be."""
        lane = self.program.ranks[unit.rank].lanes[unit.lane]
        step = lane.steps[unit.step]
        here = self._numbers[unit.rank, unit.lane]
        clock = self._clocks[here]
        if step.wait is not None and unit.first == 0:
            other = self.program.ranks[unit.rank].lanes[step.wait.lane]
            told = self._told[unit.rank, step.wait.lane]
            np.maximum(clock, told[announced(other, step.wait.step)], out=clock)
        arrived: list[Value] = []
        if step.kind in RECEIVING:
            sent, arrived = self._queues[lane.receive, unit.rank, lane.channel].popleft()
            np.maximum(clock, sent, out=clock)
        clock[here] += 1
        leaving: list[Value] = []
        for index in range(unit.length if step.kind != "nop" else 0):
            value = arrived[index] if arrived else None
            chunk = unit.first + index
            result = self._race(unit, step, chunk, clock) or self._compute(unit, step, chunk, value)
            if isinstance(result, Problem):
                return result
            leaving.append(result)
        if step.kind in SENDING:
            link = unit.rank, lane.send, lane.channel
            self._queues.setdefault(link, deque()).append((clock.copy(), leaving))
        if step.told and unit.first + unit.length >= step.count:
            self._told[unit.rank, unit.lane][unit.step] = clock.copy()
        return None

    def _compute(
        self, unit: Unit, step: Step, chunk: int, arrived: Value | None
    ) -> Problem | Value:
        read = None
        if step.kind in READS_SRC and step.src is not None:
            read = self.values.get(self.cell(unit.rank, step.src, chunk))
            if read is None:
                return self._empty(unit, step.src, chunk)
        result, other = (read, None) if arrived is None else (arrived, read)
        if step.kind == "re" and step.dst is not None:
            other = self.values.get(self.cell(unit.rank, step.dst, chunk))
            if other is None:
                return self._empty(unit, step.dst, chunk)
        assert result is not None  # every kind but nop reads or receives
        if other is not None:
            if result.chunk != other.chunk:
                what = f"adds chunk {result.chunk} of the message to chunk {other.chunk}"
                return Problem(self._at(unit), what, "add equal chunks only")
            double = result.double | other.double | (result.ranks & other.ranks)
            result = Value(result.chunk, result.ranks | other.ranks, double)
        if step.kind in WRITES_DST and step.dst is not None:
            self.values[self.cell(unit.rank, step.dst, chunk)] = result
        return result

    def _race(self, unit: Unit, step: Step, chunk: int, clock: Clock) -> Problem | None:
        here = self._numbers[unit.rank, unit.lane]
        reads, writes = [], []
        if step.kind in READS_SRC and step.src is not None:
            reads.append(self.cell(unit.rank, step.src, chunk))
        if step.kind in WRITES_DST and step.dst is not None:
            writes.append(self.cell(unit.rank, step.dst, chunk))
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
            f"race on {cell[1]} chunk {cell[2]}{self._mode()}: {did} by lane {one.lane}, step "
            f"{one.step} and {does} by lane {two.lane}, step {two.step}, with nothing to say which "
            "comes first"
        )
        fix = f"let one step wait for the other: lane {two.lane}, step {two.step} for lane "
        return Problem(self._at(two), what, f"{fix}{one.lane}, step {one.step}")

    def outcome(self) -> Problem | None:
        """Compare what lies in the output with what was promised."""
        promise = contract(self.task)
        everyone = (1 << len(self.program.ranks)) - 1
        for rank, slot, number, part in promise.wanted.tolist():
            output = Spot("output", slot - wanted_slots(self.task, rank).start)
            value = self.values.get(self.cell(rank, output))
            where = f"rank {rank}, output chunk {output.chunk}{self._mode()}"
            if value is None:
                return Problem(where, "holds nothing at the end")
            if number == SUM:
                right = Value(part, everyone)
            else:
                right = Value(number % promise.width, 1 << (number // promise.width))
            if value != right:
                return Problem(where, _difference(value, right))
        return None

    def _empty(self, unit: Unit, spot: Spot, chunk: int) -> Problem:
        what = f"reads {spot.buffer} chunk {spot.chunk + chunk}, which holds nothing yet"
        return Problem(self._at(unit), f"{what}{self._mode()}", "write it first")

    def _at(self, unit: Unit) -> str:
        return step_name(unit.rank, unit.lane, unit.step)

    def _mode(self) -> str:
        return " (run in place)" if self.shared else ""


def _difference(value: Value, right: Value) -> str:
    """Say what a chunk lacks or holds too much of."""
    if value.chunk != right.chunk:
        return f"holds chunk {value.chunk} of the message, not chunk {right.chunk}"
    said = []
    if value.double:
        said.append(f"counts chunk {value.chunk} of rank {_lowest(value.double)} more than once")
    lacking, foreign = right.ranks & ~value.ranks, value.ranks & ~right.ranks
    if lacking:
        said.append(f"lacks chunk {right.chunk} of rank {_lowest(lacking)}")
    if foreign:
        what = f"chunk {value.chunk} of rank {_lowest(foreign)}"
        said.append(f"holds {what}, which belongs elsewhere")
    return "; ".join(said)


def _lowest(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1
