"""`SlotAccess`: the moves of a step, slot by slot. A cell is one slot of one place."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.policy.collective.collective import ChunkMoves

Numbers = NDArray[np.int64]


class SlotAccess(NamedTuple):
    """Which cell is read and which written, for every slot that moves: `place · slots + slot`."""

    moves: ChunkMoves
    reads: Numbers
    writes: Numbers

    def get_origin(self, index: int) -> tuple[int, int]:
        """Return the move that an entry belongs to, and which of its slots it is."""
        ends = np.cumsum(self.moves.count)
        row = int(np.searchsorted(ends, index, side="right"))
        return row, index - int(ends[row]) + int(self.moves.count[row])

    def list_reductions(self) -> Numbers | None:
        """Return the entries that add to what lies there; nothing where all of them do."""
        adds = self.moves.adds
        if adds.all():
            return None
        if not adds.any():
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(np.repeat(adds, self.moves.count))


def list_slot_access(moves: ChunkMoves, slots: int) -> SlotAccess:
    """Return the cells that moves read and write."""
    reads = moves.src * np.int64(slots) + moves.src_slot
    writes = moves.dst * np.int64(slots) + moves.dst_slot
    counts = moves.count
    if (counts == 1).all():
        return SlotAccess(moves, reads, writes)
    before = np.cumsum(counts) - counts
    index = np.arange(int(counts.sum()), dtype=np.int64)
    reads = np.repeat(reads - before, counts) + index
    writes = np.repeat(writes - before, counts) + index
    return SlotAccess(moves, reads, writes)
