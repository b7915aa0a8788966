"""`pipeline_phases`: cut a collective into chunks so that its phases overlap.

An algorithm of several phases (add up inside nodes, exchange between them, spread inside) keeps
one kind of link busy at a time. Cut into parts, one part is between nodes while the next is still
inside. Every part has lanes of its own and begins one step after the part before it.
"""

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import (
    CHANNEL,
    DST_SLOT,
    PHASE,
    SRC_SLOT,
    ChunkMoves,
    Collective,
    Ints,
    Sweep,
)

UNPARTITIONED_OPS = ("all_reduce", "broadcast", "reduce")
"""Operations whose chunks belong to nobody, so that any part of the message is one as well."""


def pipeline_phases(collective: Collective, parts: int) -> Collective:
    """Return the same algorithm on `parts` parts of the message, one behind the other."""
    if collective.op not in UNPARTITIONED_OPS:
        what = f"{collective.op} has chunks that belong to ranks"
        raise InputError([Problem("parts", what, f"use {', '.join(UNPARTITIONED_OPS)}, or 1 part")])
    if parts <= 1:
        return collective
    steps = [moves.table for _, moves in collective.iterate_steps()]
    sweeps = []
    for now in range(len(steps) + parts - 1):
        tables = [
            _part(collective, steps[now - part], part, parts)
            for part in range(parts)
            if 0 <= now - part < len(steps)
        ]
        sweeps.append(Sweep(moves=ChunkMoves(np.concatenate(tables))))
    return msgspec.structs.replace(
        collective,
        chunks=collective.chunks * parts,
        slots=collective.slots * parts,
        sweeps=tuple(sweeps),
    )


def _part(collective: Collective, table: Ints, part: int, parts: int) -> Ints:
    table = table.copy()
    chunks, beside = collective.chunks, collective.slots - collective.chunks
    for column in (SRC_SLOT, DST_SLOT):
        slot = table[:, column]
        table[:, column] = np.where(
            slot < chunks, part * chunks + slot, parts * chunks + part * beside + slot - chunks
        )
    table[:, CHANNEL] += part * collective.channels
    table[:, PHASE] = 0
    return table
