"""Where the slots of a rank lie when input and output are buffers of their own.

A slot that nobody has written yet is read from the input; from its first write on it lies in the
output where the operation promises it there, and in scratch memory otherwise. Slots that are
promised but never written are copied over. Executed in place, where input and output share memory,
the same actions come out right too, for all collectives whose slots are the chunks of the message.
"""

from typing import Literal, NamedTuple

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.contract import list_input_slots, list_output_slots

BufferKind = Literal["input", "output", "scratch"]


class BufferChunk(NamedTuple):
    """One chunk of a buffer."""

    buffer: BufferKind
    chunk: int


class BufferPlacement:
    """Follows where each slot of one rank lies as actions write to it."""

    def __init__(self, collective: Collective, rank: int, written: set[int]) -> None:
        self.input_slots = list_input_slots(collective, rank)
        self.output_slots = list_output_slots(collective, rank)
        passing = sorted(slot for slot in written if slot not in self.output_slots)
        self.scratch_index = {slot: index for index, slot in enumerate(passing)}
        self.unwritten_outputs = [
            slot for slot in self.output_slots if slot in self.input_slots and slot not in written
        ]
        self._moved: set[int] = set()

    def get_read_location(self, slot: int) -> BufferChunk:
        """Return where a slot is read."""
        if slot in self._moved or slot not in self.input_slots:
            return self.get_write_location(slot)
        return BufferChunk("input", slot - self.input_slots.start)

    def get_write_location(self, slot: int) -> BufferChunk:
        """Return where a slot is written."""
        if slot in self.output_slots:
            return BufferChunk("output", slot - self.output_slots.start)
        # A slot that is read and never written anywhere holds nothing; the proof says so.
        return BufferChunk("scratch", self.scratch_index.get(slot, len(self.scratch_index)))

    def record_write(self, slot: int) -> None:
        """Note that a slot was written."""
        self._moved.add(slot)

    def list_copies(self) -> tuple[tuple[BufferChunk, BufferChunk], ...]:
        """Return what must be copied from input to output besides."""
        return tuple(
            (BufferChunk("input", slot - self.input_slots.start), self.get_write_location(slot))
            for slot in self.unwritten_outputs
        )
