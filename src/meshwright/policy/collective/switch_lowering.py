"""`lower_switches`: a collective with switches, carried out by its ranks alone.

Every slot of a switch that is used gets a host, a rank among those that write to it, and becomes a
slot of that rank. What a switch adds up at once, its host adds up one after the other. So a
reduction in the network turns into a direct one, which any library of sends and receives can run.
"""

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.collective import (
    ADDS,
    COUNT,
    DST,
    DST_SLOT,
    PHASE,
    SRC,
    SRC_SLOT,
    ChunkMoves,
    Collective,
    Ints,
    Sweep,
)

Cell = tuple[int, int]
"""A place and a slot of it."""


def lower_switches(collective: Collective) -> Collective:
    """Return the same collective over ranks only; without switches, the collective itself."""
    if not collective.switches:
        return collective
    homes = _Homes(collective)
    sweeps: list[Sweep] = []
    for _, moves in collective.iterate_steps():
        sweeps += [Sweep(moves=ChunkMoves(table)) for table in homes.rounds(moves.split_by_slot())]
    return msgspec.structs.replace(
        collective,
        switches=(),
        sweeps=tuple(sweeps),
        slots=collective.slots + max(homes.load.values(), default=0),
    )


class _Homes:
    """Finds hosts as switches are first written to, and says who holds something by now."""

    def __init__(self, collective: Collective) -> None:
        self.ranks, self.slots = collective.ranks, collective.slots
        self.home: dict[Cell, Cell] = {}
        self.load: Counter[int] = Counter()

    def rounds(self, moves: ChunkMoves) -> list[Ints]:
        """Return a step as steps between ranks."""
        table = moves.table.copy()
        table[:, PHASE] = 0
        leaving = np.flatnonzero(moves.src >= self.ranks)
        for row in leaving.tolist():
            table[row, [SRC, SRC_SLOT]] = self.home[int(moves.src[row]), int(moves.src_slot[row])]
        arriving: dict[Cell, list[int]] = {}
        for row in np.flatnonzero(moves.dst >= self.ranks).tolist():
            cell = int(moves.dst[row]), int(moves.dst_slot[row])
            arriving.setdefault(cell, []).append(row)
        turn = np.zeros(len(table), dtype=np.int32)
        for cell, rows in arriving.items():
            self._receive(cell, rows, table, turn)
        return [_joined(table[turn == now]) for now in range(int(turn.max(initial=0)) + 1)]

    def _receive(self, cell: Cell, rows: list[int], table: Ints, turn: NDArray[np.int32]) -> None:
        fresh = cell not in self.home
        if fresh:
            # The writer with the fewest cells so far: the work spreads over all of them.
            host = min(table[rows, SRC].tolist(), key=lambda rank: (self.load[rank], rank))
            self.home[cell] = host, self.slots + self.load[host]
            self.load[host] += 1
        host = self.home[cell][0]
        # Each host begins with itself and goes around, so that hosts do not all wait for one rank.
        rows = sorted(rows, key=lambda row: (int(table[row, SRC]) - host) % self.ranks)
        for now, row in enumerate(rows):
            table[row, [DST, DST_SLOT]] = self.home[cell]
            turn[row] = now
        if fresh:
            table[rows[0], ADDS] = 0


def _joined(table: Ints) -> Ints:
    """Join moves of neighbouring slots that are alike in all else."""
    table = table[np.lexsort((table[:, SRC_SLOT], table[:, DST], table[:, SRC]))]
    same = [column for column in range(table.shape[1]) if column not in (SRC_SLOT, DST_SLOT, COUNT)]
    before, after = table[:-1], table[1:]
    joins = (before[:, same] == after[:, same]).all(axis=1)
    for column in (SRC_SLOT, DST_SLOT):
        joins &= before[:, column] + 1 == after[:, column]
    begins = np.flatnonzero(np.concatenate(([True], ~joins))) if len(table) else np.zeros(0, int)
    merged: Ints = table[begins].copy()
    merged[:, COUNT] = np.diff(np.append(begins, len(table)))
    return merged
