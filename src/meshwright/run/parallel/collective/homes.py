"""`Homes`: in which tensor, and where in it, each slot of a rank lies.

0 is the input, 1 the output, 2 the workspace; in place, all of the message is number 0.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.policy.collective.collective import EXCHANGED, Collective
from meshwright.policy.collective.contract import contract, input_slots
from meshwright.run.parallel.collective.cuts import Cuts

INPUT, OUTPUT, WORKSPACE = range(3)


class Run(NamedTuple):
    """Elements in a row of one tensor."""

    tensor: int
    start: int
    length: int


class Homes:
    """Says in which tensor a slot is read and written.

    Out of place a slot that was not written yet is read from the input; what is written goes to
    the output where it is wanted there, and to the workspace otherwise.
    """

    def __init__(self, collective: Collective, rank: int, cuts: Cuts, *, in_place: bool) -> None:
        self._cuts, self._in_place = cuts, in_place
        self._exchange = collective.op in EXCHANGED
        self._message = 0 if self._exchange else collective.chunks
        promise = contract(collective)
        _, output = input_slots(collective)
        own = rank * cuts.part_elements
        sizes = cuts.sizes(rank)
        given, wanted = (table[table[:, 0] == rank] for table in (promise.given, promise.wanted))
        skipped = own if sizes.given == cuts.part_elements != cuts.elements else 0
        self._given = {
            int(slot): (cuts.start(int(slot)) - skipped, cuts.length(int(slot)))
            for slot in given[:, 1]
        }
        skipped = own if sizes.wanted == cuts.part_elements != cuts.elements else 0
        self._wanted = {
            int(slot): (
                cuts.start(int(slot) - output) - skipped,
                cuts.length(int(slot) - output),
            )
            for slot in wanted[:, 1]
        }
        lengths = [cuts.length(chunk) for chunk in range(max(1, collective.chunks))]
        self._capacity = max(lengths)
        self._spare: dict[int, int] = {}
        self._written: dict[int, int] = {}
        """The step in which each slot was written first."""

    @property
    def workspace(self) -> int:
        """Elements of the slots that lie in no tensor of the user."""
        return len(self._spare) * self._capacity

    def read(self, slot: int, step: int, begin: int, end: int) -> Run:
        """Return where a piece of a slot lies before a step."""
        if self._written.get(slot, step) < step or self._in_place_slot(slot):
            return self._home(slot, begin, end)
        start, _ = self._given[slot]
        return Run(INPUT, start + begin, end - begin)

    def write(self, slot: int, step: int, begin: int, end: int) -> Run:
        """Return where a piece of a slot is put."""
        self._written.setdefault(slot, step)
        return self._home(slot, begin, end)

    def _in_place_slot(self, slot: int) -> bool:
        return self._in_place and slot < self._message

    def _home(self, slot: int, begin: int, end: int) -> Run:
        if self._in_place_slot(slot):
            return Run(INPUT, self._cuts.start(slot) + begin, end - begin)
        if slot in self._wanted:
            return Run(OUTPUT, self._wanted[slot][0] + begin, end - begin)
        spare = self._spare.setdefault(slot, len(self._spare)) * self._capacity
        return Run(WORKSPACE, spare + begin, end - begin)

    def kept(self) -> Iterator[tuple[int, Run, Run]]:
        """Return slots that a rank gave and keeps, where nothing wrote them to the output."""
        if self._in_place:
            return
        for slot, (start, length) in self._wanted.items():
            if slot not in self._written and length and slot in self._given:
                source = Run(INPUT, self._given[slot][0], length)
                yield slot, source, Run(OUTPUT, start, length)
