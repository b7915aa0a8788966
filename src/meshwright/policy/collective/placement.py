"""Where the slots of a rank lie when input and output are buffers of their own.

A slot that nobody has written yet is read from the input; from its first write on it lies in the
output where the operation promises it there, and in scratch memory otherwise. Slots that are
promised but never written are copied over. Executed in place, where input and output share memory,
the same actions come out right too, for all collectives whose slots are the chunks of the message.
"""

from typing import Literal, NamedTuple

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.contract import given_slots, wanted_slots

Buffer = Literal["input", "output", "scratch"]


class Spot(NamedTuple):
    """One chunk of a buffer."""

    buffer: Buffer
    chunk: int


class Places:
    """Follows where each slot of one rank lies as actions write to it."""

    def __init__(self, collective: Collective, rank: int, written: set[int]) -> None:
        self.given = given_slots(collective, rank)
        self.wanted = wanted_slots(collective, rank)
        passing = sorted(slot for slot in written if slot not in self.wanted)
        self.scratch = {slot: index for index, slot in enumerate(passing)}
        self.never_written = [
            slot for slot in self.wanted if slot in self.given and slot not in written
        ]
        self._moved: set[int] = set()

    def now(self, slot: int) -> Spot:
        """Return where a slot is read."""
        if slot in self._moved or slot not in self.given:
            return self.later(slot)
        return Spot("input", slot - self.given.start)

    def later(self, slot: int) -> Spot:
        """Return where a slot is written."""
        if slot in self.wanted:
            return Spot("output", slot - self.wanted.start)
        # A slot that is read and never written anywhere holds nothing; the proof says so.
        return Spot("scratch", self.scratch.get(slot, len(self.scratch)))

    def write(self, slot: int) -> None:
        """Note that a slot was written."""
        self._moved.add(slot)

    def copies(self) -> tuple[tuple[Spot, Spot], ...]:
        """Return what must be copied from input to output besides."""
        return tuple(
            (Spot("input", slot - self.given.start), self.later(slot))
            for slot in self.never_written
        )
