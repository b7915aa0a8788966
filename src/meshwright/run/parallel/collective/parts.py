"""Which chunk of the message every action carries: slots say where, not what.

Only chunks have a size, and both ends of a message must agree on it; what passes through scratch
slots is followed from step to step here.
"""

import numpy as np

from meshwright.policy.collective.collective import Collective, Ints
from meshwright.policy.collective.contract import contract
from meshwright.policy.collective.lanes import Program, slots_of


def parts_carried(collective: Collective, program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each action of a program, in the order of the message."""
    held = _held(collective)
    carried: list[tuple[int, ...]] = []
    waiting = iter(enumerate(program.actions))
    number, action = next(waiting, (None, None))
    for step, moves in collective.walk():
        if action is None:
            break
        before = held[program.rank].copy() if action.step == step else None
        flat = moves.one_slot_each()
        held[flat.dst, flat.dst_slot] = held[flat.src, flat.src_slot]
        while action is not None and action.step == step:
            assert before is not None
            after = held[program.rank]
            row, spans = (before, action.reads) if action.reads else (after, action.writes)
            carried.append(tuple(int(row[slot]) for slot in slots_of(spans)))
            number, action = next(waiting, (None, None))
    assert number is None, "the program has steps that the collective has not"
    return tuple(carried)


def _held(collective: Collective) -> Ints:
    """Return the chunk that lies in each slot at the start; 0 where none does."""
    held = np.zeros((collective.places, collective.slots), dtype=np.int32)
    given = contract(collective).given
    held[given[:, 0], given[:, 1]] = given[:, 3]
    return held
