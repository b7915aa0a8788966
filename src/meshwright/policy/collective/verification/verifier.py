"""`verify_collective`: prove that a collective meets its contract, or give a counter-example.

Every value that ever lies in a slot gets a number: inputs first, then one for each sum. A copy
keeps the number, and the same two values added on two ranks in a step are one value. So the whole
run is a graph of sums over inputs, whose size does not depend on the data. The proof then walks
from each final value down to its inputs and counts on how many ways it meets each of them: once is
right, never is a contribution lost, twice is one counted double. It is exact for any collective;
nothing is sampled.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.contract import find_shape_problems
from meshwright.policy.collective.verification.final_state import check_final_state
from meshwright.policy.collective.verification.slot_access import list_slot_access
from meshwright.policy.collective.verification.step_hazards import StepHazards, find_out_of_bounds
from meshwright.policy.collective.verification.symbolic_values import (
    SymbolicValues,
    find_value_count_problems,
)


class CollectiveProof(msgspec.Struct, frozen=True, kw_only=True):
    """What was shown about a collective."""

    is_correct: bool
    """Whether all that follows holds: every output is right, each contribution is counted once,
    nothing is overwritten before it is read, no slot lies outside its buffer, and every move waits
    only for earlier steps, so that none can wait in a circle."""
    problems: tuple[Problem, ...]
    """The shortest counter-example found, or nothing."""
    steps: int
    moves: int
    same_on_all_ranks: bool
    """Whether all ranks that get a sum get the very same one, added in the same order. `False`
    says that this was not shown: sums made in different steps are taken for different ones, and
    so are those of two switches that each add three values or more at once, in whatever order."""


def verify_collective(collective: Collective) -> CollectiveProof:
    """Return the proof that a collective is sound, or what refutes it.

    One with more slots or sums than can be numbered is neither: it raises an error.
    """
    problems = find_shape_problems(collective)
    if problems:
        return _refuted(collective, *problems)
    large = find_value_count_problems(collective)
    if large:
        raise InputError(large)
    values, hazards = SymbolicValues(collective), StepHazards(collective)
    for step, moves in collective.iterate_steps():
        if not len(moves):
            continue
        problem = find_out_of_bounds(collective, step, moves)
        if problem is None:
            cells = list_slot_access(moves, collective.slots)
            problem = hazards.find_race(step, cells) or values.apply_step(step, cells)
        if problem is not None:
            return _refuted(collective, problem)
    problem, same = check_final_state(values)
    if problem is not None:
        return _refuted(collective, problem)
    return CollectiveProof(
        is_correct=True,
        problems=(),
        steps=collective.steps,
        moves=collective.moves,
        same_on_all_ranks=same,
    )


def _refuted(collective: Collective, *problems: Problem) -> CollectiveProof:
    return CollectiveProof(
        is_correct=False,
        problems=problems,
        steps=collective.steps,
        moves=collective.moves,
        same_on_all_ranks=False,
    )
