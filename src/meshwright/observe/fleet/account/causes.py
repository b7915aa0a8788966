"""Why GPUs were free: who waited meanwhile, and whether there was a place for them.

Time is cut into short bins. In each, the free GPUs of a pool are given, as far as they go, to the
jobs that waited: first to those that the free GPUs together would have held but no placement did,
then to those that had a place, then to those whom a limit held back, then to those who asked for
more than was free. What is left over had no demand.
"""

from typing import Final, NamedTuple

import numpy as np

from meshwright.observe.fleet.account.attempts import LIMITED, NOT_ASKING, Attempts
from meshwright.observe.fleet.account.bins import binned, width_ms
from meshwright.observe.fleet.account.pieces import Pieces
from meshwright.observe.fleet.account.places import UP, Stretches
from meshwright.observe.fleet.account.ticks import (
    NEVER,
    PARTS,
    Floats,
    Longs,
    Window,
)

CAUSES: Final = ("fragmented", "order", "order?", "limits", "too_few", "no_demand", "no_demand?")
"""`order?` is where nobody tells how free GPUs lay on nodes, so that a place may have been free;
`no_demand?` is where nobody tells since when jobs waited, so that some may have."""
_CHUNK = 4_000_000


class Request(NamedTuple):
    """A shape that waiting jobs ask for."""

    parts: int
    nodes: int
    per_node: int
    limited: bool


class Pool(NamedTuple):
    """One pool in a window."""

    number: int
    width: int
    bins: int
    free: Floats
    """Parts times ms in each bin."""
    with_free: Floats | None
    """For 0, 1, 2 … GPUs, how many nodes had so many free in each bin; None where nobody tells."""
    node_gpus: int


def weights(found: Attempts, pool_of: Longs, pool: Pool, window: Window) -> Floats:
    """Return how much of a pool's free GPUs is due to each of CAUSES."""
    asks = (
        (pool_of == pool.number) & (found.parts > 0) & (found.reason != NOT_ASKING)
        & (found.waits != NEVER) & (found.waits < window.until) & (found.waited > window.since)
    )  # fmt: skip
    at = np.flatnonzero(asks)
    start = np.maximum(found.waits[at], window.since) - window.since
    end = np.minimum(found.waited[at], window.until) - window.since
    shape, requests = _requests(found, at, pool.node_gpus)
    wanted = np.zeros((CAUSES.index("no_demand"), pool.bins))
    for number, request in enumerate(requests):
        mine = shape == number
        rate = np.full(int(mine.sum()), float(request.parts))
        sums = binned(start[mine], end[mine], rate, pool.width, pool.bins)[0]
        if request.limited:
            wanted[3] += sums
            continue
        fits = pool.free >= request.parts * pool.width * (1 - 1e-9)
        wanted[4] += np.where(fits, 0.0, sums)
        if pool.with_free is None:
            wanted[2] += np.where(fits, sums, 0.0)
            continue
        placed = pool.with_free[min(request.per_node, len(pool.with_free) - 1) :].sum(axis=0)
        enough = (placed >= request.nodes) & (request.per_node < len(pool.with_free))
        wanted[0] += np.where(fits & ~enough, sums, 0.0)
        wanted[1] += np.where(fits & enough, sums, 0.0)
    given, left = np.zeros(len(CAUSES)), pool.free.copy()
    for number, amount in enumerate(wanted):
        taken = np.minimum(left, amount)
        given[number] = taken.sum()
        left -= taken
    here = (pool_of == pool.number) & (found.parts > 0)
    told = not here.any() or bool((found.waits[here] != NEVER).any())
    given[CAUSES.index("no_demand" if told else "no_demand?")] = left.sum()
    return given


def _requests(found: Attempts, at: Longs, node_gpus: int) -> tuple[Longs, list[Request]]:
    """Return the shape of each waiting job, and the shapes there are."""
    parts = found.parts[at]
    gpus = -(-parts // PARTS)
    nodes = np.where(found.num_nodes[at] > 0, found.num_nodes[at], -(-gpus // max(1, node_gpus)))
    nodes = np.clip(nodes, 1, np.maximum(1, gpus))
    rows = np.stack([parts, nodes, -(-gpus // nodes), found.reason[at] == LIMITED], axis=1)
    distinct, shape = np.unique(rows, axis=0, return_inverse=True)
    return shape.reshape(-1), [
        Request(int(p), int(n), int(each), bool(limited)) for p, n, each, limited in distinct
    ]


def pool_in(
    number: int, stretches: Stretches, held: Pieces, *, kept: Longs, pool: Longs, window: Window
) -> Pool:  # fmt: skip
    """Describe the free GPUs of a pool; `stretches` and `held` are those of the window."""
    up = np.flatnonzero((stretches.pool == number) & (stretches.state == UP))
    nodes, row = np.unique(stretches.node[up], return_inverse=True)
    width = width_ms(window.span, len(nodes))
    bins = -(-window.span // width)
    is_up = np.zeros(len(stretches.node) + 1, np.bool_)
    is_up[up] = True
    mine = np.flatnonzero((pool == number) & (is_up[held.stretch] | (held.node < 0)))
    part = held.where(mine)
    rate = kept[mine] / np.maximum(1, part.end - part.start)
    size = stretches.parts[up].astype(float)
    there = binned(stretches.since[up], stretches.until[up], size, width, bins)[0]
    free = np.clip(there - binned(part.start, part.end, rate, width, bins)[0], 0.0, None)
    node_gpus = int(stretches.parts[up].max() // PARTS) if len(up) else 0
    told = part.node >= 0
    if not told.all() or node_gpus == 0:
        return Pool(number, width, bins, free, None, node_gpus)
    place = np.searchsorted(nodes, part.node)
    with_free = np.zeros((node_gpus + 1, bins))
    step = max(1, _CHUNK // bins)
    for first in range(0, len(nodes), step):
        last = min(first + step, len(nodes))
        of_nodes = (row >= first) & (row < last)
        of_pieces = (place >= first) & (place < last)
        room = binned(
            stretches.since[up][of_nodes], stretches.until[up][of_nodes], size[of_nodes], width,
            bins, row=row[of_nodes] - first, rows=last - first,
        )  # fmt: skip
        room -= binned(
            part.start[of_pieces], part.end[of_pieces], rate[of_pieces], width, bins,
            row=place[of_pieces] - first, rows=last - first,
        )  # fmt: skip
        whole = np.clip(np.floor(room / (width * PARTS) + 1e-6).astype(np.int64), 0, node_gpus)
        cells = whole * bins + np.arange(bins)
        with_free += np.bincount(cells.ravel(), minlength=(node_gpus + 1) * bins).reshape(-1, bins)
    return Pool(number, width, bins, free, with_free, node_gpus)
