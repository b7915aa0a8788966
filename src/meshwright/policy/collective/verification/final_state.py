"""Does each rank hold in the end what it was promised? Which contribution is missing or double?"""

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.collective.collective import Collective, Ints
from meshwright.policy.collective.contract import SUM, ExpectedOutput, build_expected_output
from meshwright.policy.collective.verification.symbolic_values import SymbolicValues


def check_final_state(values: SymbolicValues) -> tuple[Problem | None, bool]:
    """Return what is wrong in the end, and whether all that get a sum get the same one."""
    collective, slots = values.collective, values.collective.slots
    sums = _FinalSums(collective.chunks)
    for rank in range(collective.ranks):
        wanted = build_expected_output(collective, rank)
        held = values.slot_values[rank * slots + wanted.slots]
        if not len(held):
            continue
        if held.min() < 0:
            entry = int(np.argmin(held))
            where = _end(collective, rank, int(wanted.chunk_ids[entry]))
            return Problem(where, f"slot {wanted.slots[entry]} holds nothing"), False
        if wanted.input_ids[0] == SUM:
            # Where nothing was added, every value is an input.
            parts = (
                values.chunk_of_value[held] if len(values.chunk_of_value) else held % values.width
            )
            strange = parts != wanted.chunk_ids
            if strange.any():
                return _explain(values, rank, wanted, int(np.argmax(strange))), False
            sums.hold(rank, wanted.chunk_ids, held)
        elif not np.array_equal(held, wanted.input_ids):
            return _explain(values, rank, wanted, int(np.argmax(held != wanted.input_ids))), False
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


def _sums_right(values: SymbolicValues, sums: _FinalSums) -> tuple[Problem | None, bool]:
    """Check sums, one value of each part of the message at a time.

    Parts are never added to each other, so the values of different parts have no input in common
    and are followed together.
    """
    collective = values.collective
    for final, holder in zip(sums.rounds, sums.holders, strict=True):
        parts = np.flatnonzero(final >= 0)
        found = values.count_contributions(final[parts]).reshape(collective.ranks, values.width)
        right = np.zeros(values.width, dtype=np.int32)
        right[parts] = 1
        wrong = (found != right).any(axis=0)
        if wrong.any():
            part = int(np.argmax(wrong))
            rank = int(holder[part])
            wanted = build_expected_output(collective, rank)
            entry = int(np.flatnonzero(wanted.chunk_ids == part)[0])
            return _explain(values, rank, wanted, entry), False
    return None, len(sums.rounds) == 1


def _explain(values: SymbolicValues, rank: int, wanted: ExpectedOutput, entry: int) -> Problem:
    """Say which contributions a slot lacks, holds twice, or holds though they belong elsewhere."""
    collective = values.collective
    slot, number, part = (int(column[entry]) for column in wanted)
    found = values.count_contributions(values.slot_values[[rank * collective.slots + slot]])
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


def _input(values: SymbolicValues, number: int) -> str:
    return f"chunk {number % values.width} of rank {number // values.width}"


def _end(collective: Collective, rank: int, part: int) -> str:
    return f"rank {rank}, after step {collective.steps - 1}, chunk {part}"
