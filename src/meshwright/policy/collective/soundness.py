"""`verify`: does a collective do what it promises? It answers with a proof or a counter-example.

Every value that ever lies in a slot gets a number: inputs first, then one for each sum. A copy
keeps the number, and the same two values added on two ranks in a step are one value. So the whole
run is a graph of sums over inputs, whose size does not depend on the data. The proof then walks
from each final value down to its inputs and counts on how many ways it meets each of them: once is
right, never is a contribution lost, twice is one counted double. It is exact for any collective;
nothing is sampled.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.cells import cells_of
from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.contract import shape_problems
from meshwright.policy.collective.hazards import Hazards, outside
from meshwright.policy.collective.outcome import outcome
from meshwright.policy.collective.values import Values, too_many_values


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
    """Whether all ranks that get a sum get the very same one, added in the same order. `False`
    says that this was not shown: sums made in different steps are taken for different ones, and
    so are those of two switches that each add three values or more at once, in whatever order."""


def verify(collective: Collective) -> Proof:
    """Return the proof that a collective is sound, or what refutes it.

    One with more slots or sums than can be numbered is neither: it raises an error.
    """
    problems = shape_problems(collective)
    if problems:
        return _refuted(collective, *problems)
    large = too_many_values(collective)
    if large:
        raise InputError(large)
    values, hazards = Values(collective), Hazards(collective)
    for step, moves in collective.walk():
        if not len(moves):
            continue
        problem = outside(collective, step, moves)
        if problem is None:
            cells = cells_of(moves, collective.slots)
            problem = hazards.clash(step, cells) or values.step(step, cells)
        if problem is not None:
            return _refuted(collective, problem)
    problem, same = outcome(values)
    if problem is not None:
        return _refuted(collective, problem)
    return Proof(
        sound=True,
        problems=(),
        steps=collective.steps,
        moves=collective.moves,
        same_everywhere=same,
    )


def _refuted(collective: Collective, *problems: Problem) -> Proof:
    return Proof(
        sound=False,
        problems=problems,
        steps=collective.steps,
        moves=collective.moves,
        same_everywhere=False,
    )
