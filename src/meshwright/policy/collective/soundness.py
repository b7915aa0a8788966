"""`verify`: does a collective do what it promises? It answers with a proof or a counter-example.

Every value that ever lies in a slot gets a number: inputs first, then one for each sum. A copy
keeps the number, and the same two values added on two ranks are one value. So the whole run is a
graph of sums over inputs, whose size does not depend on the data. The proof then walks from each
final value down to its inputs and counts on how many ways it meets each of them: once is right,
never is a contribution lost, twice is one counted double. It is exact for any collective; nothing
is sampled.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.errors import Problem
from meshwright.policy.collective.collective import Collective, Ints, Moves
from meshwright.policy.collective.contract import SUM, Contract, contract, shape_problems
from meshwright.policy.collective.hazards import Hazards

EMPTY = -1


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was shown about a collective."""

    sound: bool
    """Whether all that follows holds: every output is right, each contribution is counted once,
    nothing is overwritten before it is read, no slot lies outside its buffer, and every move waits
    only for earlier steps, so that none can wait in a circle."""
    problems: tuple[Problem, ...]
    """The shortest counter-example found, or nothing."""
    steps: int
    moves: int
    same_everywhere: bool
    """Whether all ranks that get a sum get the very same one, added in the same order."""


class _Sums(NamedTuple):
    """The sums of one step: value = left + right."""

    first: int
    left: Ints
    right: Ints


def verify(collective: Collective) -> Proof:
    """Return the proof that a collective is sound, or what refutes it."""
    problems = shape_problems(collective)
    if problems:
        return _refuted(collective, tuple(problems))
    promise = contract(collective)
    run = _Run(collective, promise)
    for step, moves in collective.walk():
        problem = run.step(step, moves.one_slot_each())
        if problem is not None:
            return _refuted(collective, (problem,))
    problem, same = run.outcome()
    if problem is not None:
        return _refuted(collective, (problem,))
    return Proof(
        sound=True,
        problems=(),
        steps=collective.steps,
        moves=collective.moves,
        same_everywhere=same,
    )


def _refuted(collective: Collective, problems: tuple[Problem, ...]) -> Proof:
    return Proof(
        sound=False,
        problems=problems,
        steps=collective.steps,
        moves=collective.moves,
        same_everywhere=False,
    )


class _Run:
    """The values in every slot, and the sums that made them."""

    def __init__(self, collective: Collective, promise: Contract) -> None:
        self.collective, self.promise = collective, promise
        self.slots = collective.slots
        cells = collective.places * self.slots
        self.held = np.full(cells, EMPTY, dtype=np.int32)
        given = promise.given
        inputs = collective.ranks * promise.width
        self.held[given[:, 0] * self.slots + given[:, 1]] = (
            given[:, 0] * promise.width + given[:, 2]
        )
        self.inputs = inputs
        self.values = inputs
        # Which part of the message a cell holds: parts must not be added to each other.
        self.part = np.full(cells, EMPTY, dtype=np.int32)
        self.part[given[:, 0] * self.slots + given[:, 1]] = given[:, 3]
        self.sums: list[_Sums] = []
        self.hazards = Hazards(collective)

    def step(self, step: int, moves: Moves) -> Problem | None:
        """Carry out one step, or say why it cannot be."""
        problem = self.hazards.find(step, moves)
        if problem is not None:
            return problem
        reads = moves.src * self.slots + moves.src_slot
        writes = moves.dst * self.slots + moves.dst_slot
        adding = moves.adds != 0
        incoming = self.held[reads]
        resting = self.held[writes[adding]]
        if incoming.size and incoming.min() < 0:
            row = int(np.argmin(incoming))
            what = (
                f"sends slot {moves.src_slot[row]} to {self._name(moves.dst[row])}, but the slot "
            )
            return Problem(self._at(step, moves.src[row]), what + "holds nothing yet")
        if resting.size and resting.min() < 0:
            row = int(np.flatnonzero(adding)[int(np.argmin(resting))])
            if not self._is_switch(moves.dst[row]):
                what = f"adds to slot {moves.dst_slot[row]}, which holds nothing yet"
                return Problem(self._at(step, moves.dst[row]), what, "copy there first")
        parts = self.part[reads]
        if adding.any():
            there = self.part[writes[adding]]
            mixed = (there != EMPTY) & (there != parts[adding])
            if mixed.any():
                row = int(np.flatnonzero(adding)[int(np.argmax(mixed))])
                what = f"adds chunk {parts[row]} of {self._name(moves.src[row])} to chunk "
                return Problem(self._at(step, moves.dst[row]), f"{what}{self.part[writes[row]]}")
            self._reduce(writes[adding], incoming[adding])
        self.held[writes[~adding]] = incoming[~adding]
        self.part[writes] = parts
        return None

    def _reduce(self, cells: Ints, incoming: Ints) -> None:
        """Add values to cells; a switch may take several into one cell in the same step."""
        order = np.argsort(cells, kind="stable")
        cells, incoming = cells[order], incoming[order]
        while len(cells):
            first = np.concatenate(([True], cells[1:] != cells[:-1]))
            now, values = cells[first], incoming[first]
            resting = self.held[now]
            empty = resting == EMPTY
            self.held[now[empty]] = values[empty]
            if not empty.all():
                self._sum(now[~empty], resting[~empty], values[~empty])
            cells, incoming = cells[~first], incoming[~first]

    def _sum(self, cells: Ints, resting: Ints, incoming: Ints) -> None:
        low, high = np.minimum(resting, incoming), np.maximum(resting, incoming)
        keys = low.astype(np.int64) << 32 | high
        distinct, index = np.unique(keys, return_inverse=True)
        self.held[cells] = self.values + index.astype(np.int32)
        left, right = (distinct >> 32).astype(np.int32), (distinct & 0xFFFFFFFF).astype(np.int32)
        self.sums.append(_Sums(self.values, left, right))
        self.values += len(distinct)

    def outcome(self) -> tuple[Problem | None, bool]:
        """Compare what lies in the slots with what was promised."""
        wanted = self.promise.wanted
        held = self.held[wanted[:, 0] * self.slots + wanted[:, 1]]
        if len(held) and held.min() < 0:
            row = wanted[int(np.argmin(held))]
            return Problem(self._end(row), "the slot holds nothing at the end"), False
        exact = wanted[:, 2] != SUM
        wrong = exact & (held != wanted[:, 2])
        if wrong.any():
            row = int(np.argmax(wrong))
            return self._explain(wanted[row], int(held[row])), False
        if exact.all():
            return None, True
        return self._sums_right(wanted[~exact], held[~exact])

    def _sums_right(self, wanted: Ints, held: Ints) -> tuple[Problem | None, bool]:
        """Check sums: one final value per part of the message at a time.

        Parts are never mixed (`step` refuses that), so the final values of different parts have
        no input in common and are followed together.
        """
        strange = self.part[wanted[:, 0] * self.slots + wanted[:, 1]] != wanted[:, 3]
        if strange.any():
            row = int(np.argmax(strange))
            return self._explain(wanted[row], int(held[row])), False
        pairs, index = np.unique(wanted[:, 3].astype(np.int64) << 32 | held, return_index=True)
        parts, values = (pairs >> 32).astype(np.int32), (pairs & 0xFFFFFFFF).astype(np.int32)
        turn = np.arange(len(parts)) - np.searchsorted(parts, parts)
        given = self.promise.given
        numbers = given[:, 0] * self.promise.width + given[:, 2]
        turns = int(turn.max()) + 1
        for now in range(turns):
            chosen = turn == now
            right = np.zeros(self.inputs, dtype=np.int32)
            needed = np.zeros(self.collective.chunks, dtype=bool)
            needed[parts[chosen]] = True
            right[numbers[needed[given[:, 3]]]] = 1
            wrong = np.flatnonzero(self.ways(values[chosen]) != right)
            if len(wrong):
                part = given[np.flatnonzero(numbers == wrong[0])[0], 3]
                row = int(np.flatnonzero(chosen & (parts == part))[0])
                return self._explain(wanted[index[row]], int(values[row])), False
        return None, turns == 1

    def ways(self, values: Ints) -> Ints:
        """Return on how many ways sums lead from values to each input; 2 stands for more."""
        counts = np.zeros(self.values, dtype=np.int32)
        counts[values] = 1
        for first, left, right in reversed(self.sums):
            here = counts[first : first + len(left)].copy()  # numpy copies all of it otherwise
            if here.any():
                for side in (left.astype(np.intp), right.astype(np.intp)):
                    np.add.at(counts, side, here)
                    counts[side] = np.minimum(counts[side], 2)
        return counts[: self.inputs]

    def _explain(self, row: Ints, value: int) -> Problem:
        """Say which contributions a slot lacks or holds twice."""
        found = self.ways(np.array([value], dtype=np.int32))
        width, given = self.promise.width, self.promise.given
        right = np.array([row[2]])
        if row[2] == SUM:
            of_part = given[given[:, 3] == row[3]]
            right = of_part[:, 0] * width + of_part[:, 2]
        lacking = [int(number) for number in right if found[number] == 0]
        double = [int(number) for number in np.flatnonzero(found > 1)]
        foreign = np.setdiff1d(np.flatnonzero(found), right)
        said = []
        if double:
            said.append(f"counts {self._input(double[0], width)} more than once")
        if lacking:
            said.append(f"lacks {self._input(lacking[0], width)}")
        if len(foreign):
            said.append(f"holds {self._input(int(foreign[0]), width)}, which belongs elsewhere")
        return Problem(self._end(row), f"slot {row[1]} " + "; ".join(said or ["is wrong"]))

    def _input(self, number: int, width: int) -> str:
        return f"chunk {number % width} of rank {number // width}"

    def _end(self, row: Ints) -> str:
        return f"rank {row[0]}, after step {self.collective.steps - 1}, chunk {row[3]}"

    def _at(self, step: int, place: int) -> str:
        return f"{self._name(place)}, step {step}"

    def _name(self, place: int) -> str:
        return self.collective.place_name(int(place))

    def _is_switch(self, place: int) -> bool:
        return int(place) >= self.collective.ranks
