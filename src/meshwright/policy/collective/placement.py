"""Where the slots of a rank lie when input and output are buffers of their own.

A slot that nobody has written yet is read from the input; from its first write on it lies in the
output where the operation promises it there, and in scratch memory otherwise. Slots that are
promised but never written are copied over. Executed in place, where input and output share memory,
the same actions come out right too, for all collectives whose slots are the chunks of the message.
"""

from typing import Literal, NamedTuple

import msgspec

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.contract import input_slots
from meshwright.policy.collective.lanes import Action, Program, slots_of

Buffer = Literal["input", "output", "scratch"]


class Spot(NamedTuple):
    """One chunk of a buffer."""

    buffer: Buffer
    chunk: int


class Region(NamedTuple):
    """Chunks of a buffer in a row."""

    buffer: Buffer
    first: int
    length: int


class PlacedAction(msgspec.Struct, frozen=True, kw_only=True):
    """An action with its slots turned into regions of buffers."""

    action: Action
    reads: tuple[Region, ...]
    """Where the chunks that are sent, copied or added lie."""
    adds_to: tuple[Region, ...]
    """Where the other addend lies, for `receive_add` and `add`; same order as `writes`."""
    writes: tuple[Region, ...]
    """Where the result goes."""


class PlacedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does with separate buffers."""

    rank: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    copies: tuple[tuple[Region, Region], ...]
    """From input to output, at any time: promised slots that no action writes."""
    actions: tuple[PlacedAction, ...]


def given_slots(collective: Collective, rank: int) -> range:
    """Return the slots that hold the input of a rank."""
    op, chunks = collective.op, collective.chunks
    if op == "all_to_all_v":
        return range(sum(collective.counts[rank]))
    if op in ("all_gather", "gather"):
        part = chunks // collective.ranks
        return range(rank * part, (rank + 1) * part)
    if op in ("broadcast", "scatter") and rank != collective.root:
        return range(0)
    return range(chunks)


def wanted_slots(collective: Collective, rank: int) -> range:
    """Return the slots that must hold the output of a rank at the end."""
    op, chunks = collective.op, collective.chunks
    first = input_slots(collective)[1]
    if op == "all_to_all_v":
        return range(first, first + sum(row[rank] for row in collective.counts))
    if op == "all_to_all":
        return range(first, first + chunks)
    if op == "send_recv":
        return range(first, first + (chunks if rank in collective.peers else 0))
    if op in ("reduce_scatter", "scatter"):
        part = chunks // collective.ranks
        return range(rank * part, (rank + 1) * part)
    if op in ("reduce", "gather") and rank != collective.root:
        return range(0)
    return range(chunks)


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


def placed(collective: Collective, program: Program) -> PlacedProgram:
    """Return the program of a rank over separate input, output and scratch buffers."""
    written = {slot for action in program.actions for slot in slots_of(action.writes)}
    places = Places(collective, program.rank, written)
    actions = []
    for action in program.actions:
        adds = action.kind in ("receive_add", "add")
        reads = _regions([places.now(slot) for slot in slots_of(action.reads)])
        base = _regions([places.now(slot) for slot in slots_of(action.writes)]) if adds else ()
        for slot in slots_of(action.writes):
            places.write(slot)
        writes = _regions([places.later(slot) for slot in slots_of(action.writes)])
        actions.append(PlacedAction(action=action, reads=reads, adds_to=base, writes=writes))
    pairs = places.copies()
    copies = zip(_regions([a for a, _ in pairs]), _regions([b for _, b in pairs]), strict=True)
    return PlacedProgram(
        rank=program.rank,
        input_chunks=len(places.given),
        output_chunks=len(places.wanted),
        scratch_chunks=len(places.scratch),
        copies=tuple(copies),
        actions=tuple(actions),
    )


def _regions(spots: list[Spot]) -> tuple[Region, ...]:
    regions: list[Region] = []
    for buffer, chunk in spots:
        if regions:
            last = regions[-1]
            if last.buffer == buffer and last.first + last.length == chunk:
                regions[-1] = Region(buffer, last.first, last.length + 1)
                continue
        regions.append(Region(buffer, chunk, 1))
    return tuple(regions)
