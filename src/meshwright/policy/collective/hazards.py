"""What can go wrong inside one step: slots outside the buffer, and moves that disturb each other."""

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.collective.collective import Collective, Ints, Moves


class Hazards:
    """Looks at steps in order; remembers which step wrote a cell last."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        cells = collective.places * collective.slots
        self._step_of = np.full(cells, -1, dtype=np.int32)
        self._row_of = np.zeros(cells, dtype=np.int32)

    def find(self, step: int, moves: Moves) -> Problem | None:
        """Return the first fault of a step."""
        return self._outside(step, moves) or self._clash(step, moves)

    def _outside(self, step: int, moves: Moves) -> Problem | None:
        places, slots = self.collective.places, self.collective.slots
        for what, place, slot in (
            ("reads", moves.src, moves.src_slot),
            ("writes", moves.dst, moves.dst_slot),
        ):
            strange = (place < 0) | (place >= places)
            if strange.any():
                row = int(np.argmax(strange))
                return Problem(
                    f"step {step}",
                    f"a move {what} place {place[row]}, but there are {places}",
                    f"use 0 to {places - 1}",
                )
            beyond = (slot < 0) | (slot >= slots)
            if beyond.any():
                row = int(np.argmax(beyond))
                return Problem(
                    self._at(step, place[row]),
                    f"{what} slot {slot[row]} of a buffer of {slots}",
                    f"use 0 to {slots - 1}",
                )
        return None

    def _clash(self, step: int, moves: Moves) -> Problem | None:
        slots = self.collective.slots
        reads = moves.src * slots + moves.src_slot
        writes = moves.dst * slots + moves.dst_slot
        rows = np.arange(len(moves), dtype=np.int32)
        self._row_of[writes] = rows
        twice = self._row_of[writes] != rows
        # A switch adds up whatever arrives together; a rank has to take one after the other.
        twice &= (moves.dst < self.collective.ranks) | (moves.adds == 0)
        if twice.any():
            row = int(np.argmax(twice))
            other = int(self._row_of[writes[row]])
            return self._two_writers(step, moves, row, other)
        self._step_of[writes] = step
        read_too = self._step_of[reads] == step
        if read_too.any():
            row = int(np.argmax(read_too))
            return self._read_and_written(step, moves, row, int(self._row_of[reads[row]]))
        return None

    def _two_writers(self, step: int, moves: Moves, row: int, other: int) -> Problem:
        first, second = self._name(moves.src[row]), self._name(moves.src[other])
        what = f"slot {moves.dst_slot[row]} is written by {first} and by {second} in the same step"
        return Problem(self._at(step, moves.dst[row]), what, "put one of them into a later step")

    def _read_and_written(self, step: int, moves: Moves, row: int, other: int) -> Problem:
        reader, writer = self._name(moves.dst[row]), self._name(moves.src[other])
        what = (
            f"slot {moves.src_slot[row]} is sent to {reader} and overwritten by {writer} in the "
            "same step, so it can be overwritten before it is read"
        )
        fix = "write to another slot, or in a later step"
        return Problem(self._at(step, moves.src[row]), what, fix)

    def _at(self, step: int, place: Ints) -> str:
        return f"{self._name(place)}, step {step}"

    def _name(self, place: Ints) -> str:
        return self.collective.place_name(int(place))
