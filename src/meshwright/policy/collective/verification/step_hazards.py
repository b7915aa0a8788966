"""What can go wrong inside one step: slots outside the buffer, moves that disturb each other."""

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.collective.collective import ChunkMoves, Collective
from meshwright.policy.collective.sweep_ranges import is_within_bounds
from meshwright.policy.collective.verification.slot_access import SlotAccess


def find_out_of_bounds(collective: Collective, step: int, moves: ChunkMoves) -> Problem | None:
    """Return the first move that leaves the places or their slots."""
    places, slots = collective.num_endpoints, collective.slots
    for what, place, slot in (
        ("reads", moves.src, moves.src_slot),
        ("writes", moves.dst, moves.dst_slot),
    ):
        if place.min() < 0 or place.max() >= places:
            row = int(np.argmax((place < 0) | (place >= places)))
            return Problem(
                f"step {step}",
                f"a move {what} place {place[row]}, but there are {places}",
                f"use 0 to {places - 1}",
            )
        end = slot + moves.count.astype(np.int64)
        if slot.min() < 0 or end.max() > slots:
            row = int(np.argmax((slot < 0) | (end > slots)))
            beyond = slot[row] if slot[row] < 0 else max(int(slot[row]), slots)
            return Problem(
                f"{collective.format_endpoint(int(place[row]))}, step {step}",
                f"{what} slot {beyond} of a buffer of {slots}",
                f"use 0 to {slots - 1}",
            )
    return None


def find_first_out_of_bounds(collective: Collective) -> Problem | None:
    """Return the first move of all that leaves the places or their slots."""
    if is_within_bounds(collective):
        return None
    steps = ((step, moves) for step, moves in collective.iterate_steps() if len(moves))
    found = (find_out_of_bounds(collective, step, moves) for step, moves in steps)
    return next((problem for problem in found if problem is not None), None)


class StepHazards:
    """Looks at the steps of a collective."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        # Who wrote a cell last. Entries of earlier steps are never mistaken for new ones, because
        # what an entry says is held against the writes of the step.
        self._writer = np.zeros(collective.num_endpoints * collective.slots, dtype=np.int32)

    def find_race(self, step: int, cells: SlotAccess) -> Problem | None:
        """Return the first pair of moves that touch the same slot, one of them writing."""
        reads, writes, writer = cells.reads, cells.writes, self._writer
        entries = np.arange(len(writes), dtype=np.int32)
        writer[writes] = entries
        last = writer[writes]
        if (last != entries).any():
            problem = self._two_writers(step, cells, last)
            if problem is not None:
                return problem
        suspect = np.minimum(writer[reads], len(writes) - 1)
        both = writes[suspect] == reads
        if both.any():
            reader = int(np.argmax(both))
            return self._read_and_written(step, cells, reader, int(suspect[reader]))
        return None

    def _two_writers(self, step: int, cells: SlotAccess, last: np.ndarray) -> Problem | None:
        """A switch adds up whatever arrives together; a rank has to take one after the other."""
        moves = cells.moves
        entries = np.arange(len(last), dtype=np.int32)
        alone = (moves.dst < self.collective.ranks) | (moves.adds == 0)
        strict = np.repeat(alone, moves.count)
        # Two of them clash if either of the two is not an addition in a switch.
        twice = (last != entries) & (strict | strict[last])
        if not twice.any():
            return None
        entry = int(np.argmax(twice))
        row, offset = cells.get_origin(entry)
        other, _ = cells.get_origin(int(last[entry]))
        first, second = self._name(moves.src[row]), self._name(moves.src[other])
        slot = moves.dst_slot[row] + offset
        what = f"slot {slot} is written by {first} and by {second} in the same step"
        where = f"{self._name(moves.dst[row])}, step {step}"
        return Problem(where, what, "put one of them into a later step")

    def _read_and_written(self, step: int, cells: SlotAccess, reader: int, writer: int) -> Problem:
        moves = cells.moves
        row, offset = cells.get_origin(reader)
        other, _ = cells.get_origin(writer)
        taker, giver = self._name(moves.dst[row]), self._name(moves.src[other])
        what = (
            f"slot {moves.src_slot[row] + offset} is sent to {taker} and overwritten by {giver} in "
            "the same step, so it can be overwritten before it is read"
        )
        fix = "write to another slot, or in a later step"
        return Problem(f"{self._name(moves.src[row])}, step {step}", what, fix)

    def _name(self, place: int) -> str:
        return self.collective.format_endpoint(int(place))
