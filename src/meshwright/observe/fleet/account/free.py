"""What became of GPUs that no job held: down, draining, reserved, or free for a cause."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.fleet.account.attempts import Attempts
from meshwright.observe.fleet.account.buckets import FREE_CELLS, Cell
from meshwright.observe.fleet.account.causes import CAUSES, pool_in, weights
from meshwright.observe.fleet.account.pieces import Pieces
from meshwright.observe.fleet.account.places import (
    DOWN,
    DRAINING,
    RESERVED,
    UNKNOWN,
    UP,
    Stretches,
)
from meshwright.observe.fleet.account.ticks import Longs, Window, spread

Totals = dict[Cell, int]
_STATE_CELLS = {
    DOWN: Cell("down", "nodes"),
    DRAINING: Cell("draining", "nodes"),
    RESERVED: Cell("reserved", "nodes"),
    UNKNOWN: Cell("unknown", "unknown"),
}
_CAUSE_CELLS = tuple(
    Cell(cause.rstrip("?"), "unknown") if cause.endswith("?")
    else Cell(cause, "accounting" if cause == "limits" else "nodes")
    for cause in CAUSES
)  # fmt: skip


class Kept(NamedTuple):
    """What pieces keep within a part of the window."""

    pieces: Pieces
    amount: Longs
    inferred: Longs
    pool: Longs
    stretches: Stretches


def within_pools(held: Kept) -> Kept:
    """Take back the last ticks that rounding gave to claims without a node."""
    kept, told = held.amount, held.amount - held.inferred
    loose = np.flatnonzero((held.pieces.node < 0) & (kept > 0))
    for one in np.unique(held.pool[loose]):
        room = sum(_left(held, int(one)).values())
        mine = loose[held.pool[loose] == one]
        mine = mine[np.argsort(-kept[mine], kind="stable")]
        over = int(told[mine].sum()) - room
        if over > 0:
            kept[mine] -= np.diff(np.minimum(np.cumsum(told[mine]), over), prepend=0)
    return held._replace(amount=kept, inferred=np.minimum(held.inferred, kept))


def _left(held: Kept, one: int) -> dict[int, int]:
    """What jobs on told nodes leave of a pool that jobs without a node may have been on."""
    left, stretches = {}, held.stretches
    placed = held.pieces.stretch >= 0
    for state in (UP, RESERVED, UNKNOWN):
        there = (stretches.pool == one) & (stretches.state == state)
        inside = np.zeros(held.pieces.size, np.bool_)
        inside[placed] = there[held.pieces.stretch[placed]]
        whole = (stretches.parts * (stretches.until - stretches.since))[there].sum()
        left[state] = int(whole) - int(held.amount[inside].sum())
    return left


def free(found: Attempts, pool_of: Longs, held: Kept, part: Window) -> Totals:
    """Say what became of all that no job kept; `pool_of` is the pool of each attempt."""
    cells = dict.fromkeys(FREE_CELLS, 0)
    stretches = held.stretches
    size = stretches.parts * (stretches.until - stretches.since)
    taken = np.zeros(len(size), np.int64)
    placed = held.pieces.stretch >= 0
    np.add.at(taken, held.pieces.stretch[placed], held.amount[placed])
    for state in (DOWN, DRAINING):
        cells[_STATE_CELLS[state]] += int((size - taken)[stretches.state == state].sum())
    for one in np.unique(stretches.pool):
        left = _left(held, int(one))
        loose = (held.pieces.node < 0) & (held.pool == one)
        used = int((held.amount - held.inferred)[loose].sum())
        for state in left:
            own = min(left[state], used)
            left[state], used = left[state] - own, used - own
        for state in (RESERVED, UNKNOWN):
            cells[_STATE_CELLS[state]] += left[state]
        if left[UP]:
            shape = pool_in(
                int(one), stretches, held.pieces, kept=held.amount, pool=held.pool, window=part
            )
            due = weights(found, pool_of, shape, part)
            for cell, amount in zip(_CAUSE_CELLS, spread(left[UP], due), strict=True):
                cells[cell] += amount
    return cells
