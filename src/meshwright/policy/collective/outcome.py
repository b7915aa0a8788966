"""Does each rank hold in the end what it was promised? Which contribution is missing or double?"""

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.collective.collective import Collective, Ints
from meshwright.policy.collective.contract import SUM, Wanted, wanted_of
from meshwright.policy.collective.values import Values


def outcome(values: Values) -> tuple[Problem | None, bool]:
    """Return what is wrong in the end, and whether all that get a sum get the same one."""
    collective, slots = values.collective, values.collective.slots
    sums = _FinalSums(collective.chunks)
    for rank in range(collective.ranks):
        wanted = wanted_of(collective, rank)
        held = values.held[rank * slots + wanted.slots]
        if not len(held):
            continue
        if held.min() < 0:
            entry = int(np.argmin(held))
            where = _end(collective, rank, int(wanted.parts[entry]))
            return Problem(where, f"slot {wanted.slots[entry]} holds nothing"), False
        if wanted.numbers[0] == SUM:
            # Where nothing was added, every value is an input.
            parts = values.part[held] if len(values.part) else held % values.width
            strange = parts != wanted.parts
            if strange.any():
                return _explain(values, rank, wanted, int(np.argmax(strange))), False
            sums.hold(rank, wanted.parts, held)
        elif not np.array_equal(held, wanted.numbers):
            return _explain(values, rank, wanted, int(np.argmax(held != wanted.numbers))), False
    return _sums_right(values, sums)


class _FinalSums:
    """The values that end as the sum of a part of the message, and a rank that holds each."""

    def __init__(self, parts: int) -> None:
        self.rounds = [np.full(parts, -1, dtype=np.int32)]
        """One value of each part at a time; -1 where a part has no further one."""
        self.holders = [np.full(parts, -1, dtype=np.int32)]

    def hold(self, rank: int, parts: Ints, values: Ints) -> None:
        """Remember the values of a rank."""
        for final, holder in zip(self.rounds, self.holders, strict=True):
            known = final[parts]
            free = known < 0
            if free.any():
                final[parts[free]] = values[free]
                holder[parts[free]] = rank
            other = ~free & (known != values)
            if not other.any():
                return
            parts, values = parts[other], values[other]
        size = len(self.rounds[0])
        self.rounds.append(np.full(size, -1, dtype=np.int32))
        self.holders.append(np.full(size, -1, dtype=np.int32))
        self.rounds[-1][parts] = values
        self.holders[-1][parts] = rank


def _sums_right(values: Values, sums: _FinalSums) -> tuple[Problem | None, bool]:
    """Check sums, one value of each part of the message at a time.

    Parts are never added to each other, so the values of different parts have no input in common
    and are followed together.
    """
    collective = values.collective
    for final, holder in zip(sums.rounds, sums.holders, strict=True):
        parts = np.flatnonzero(final >= 0)
        found = values.ways(final[parts]).reshape(collective.ranks, values.width)
        right = np.zeros(values.width, dtype=np.int32)
        right[parts] = 1
        wrong = (found != right).any(axis=0)
        if wrong.any():
            part = int(np.argmax(wrong))
            rank = int(holder[part])
            wanted = wanted_of(collective, rank)
            entry = int(np.flatnonzero(wanted.parts == part)[0])
            return _explain(values, rank, wanted, entry), False
    return None, len(sums.rounds) == 1


def _explain(values: Values, rank: int, wanted: Wanted, entry: int) -> Problem:
    """Say which contributions a slot lacks, holds twice, or holds though they belong elsewhere."""
    collective = values.collective
    slot, number, part = (int(column[entry]) for column in wanted)
    found = values.ways(values.held[[rank * collective.slots + slot]])
    right = np.array([number])
    if number == SUM:
        right = np.arange(collective.ranks) * values.width + part
    lacking = right[found[right] == 0]
    double = np.flatnonzero(found > 1)
    foreign = np.setdiff1d(np.flatnonzero(found), right)
    said = []
    if len(double):
        said.append(f"counts {_input(values, double[0])} more than once")
    if len(lacking):
        said.append(f"lacks {_input(values, lacking[0])}")
    if len(foreign):
        said.append(f"holds {_input(values, foreign[0])}, which belongs elsewhere")
    return Problem(_end(collective, rank, part), f"slot {slot} " + "; ".join(said))


def _input(values: Values, number: int) -> str:
    return f"chunk {number % values.width} of rank {number // values.width}"


def _end(collective: Collective, rank: int, part: int) -> str:
    return f"rank {rank}, after step {collective.steps - 1}, chunk {part}"
