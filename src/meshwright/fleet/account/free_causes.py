"""Why GPUs were free: who waited meanwhile, and whether there was a place for them.

Time is cut into short bins. In each, the free GPUs of a pool are given, as far as they go, to the
jobs that waited: first to those that the free GPUs together would have held but no placement did,
then to those that had a place, then to those whom a limit held back, then to those who asked for
more than was free. What is left over had no demand.
"""

from typing import Final, NamedTuple

import numpy as np

from meshwright.fleet.account.attempts import WAIT_FOR_LIMIT, WAIT_NOT_ELIGIBLE, JobAttempts
from meshwright.fleet.account.inventory import UP, NodeStateSpans
from meshwright.fleet.account.segments import AllocationSegments
from meshwright.fleet.account.ticks import (
    PARTS_PER_GPU,
    UNKNOWN_TIME,
    Floats,
    Ints,
    TickWindow,
    choose_bin_ms,
    sum_rates_per_bin,
)

FREE_CAUSES: Final = (
    "fragmented",
    "queue_order",
    "queue_order?",
    "quota",
    "insufficient_gpus",
    "no_demand",
    "no_demand?",
)
"""`queue_order?` is where nobody tells how free GPUs lay on nodes, so that a place may have been
free; `no_demand?` is where nobody tells since when jobs waited, so that some may have."""
_CHUNK = 4_000_000


class PendingShape(NamedTuple):
    """A shape that waiting jobs ask for."""

    gpu_parts: int
    num_nodes: int
    gpus_per_node: int
    is_limited: bool


class FreePool(NamedTuple):
    """One pool in a window."""

    pool_index: int
    bin_ms: int
    num_bins: int
    free_part_ms: Floats
    """Parts times ms in each bin."""
    nodes_by_free_gpus: Floats | None
    """For 0, 1, 2 … GPUs, how many nodes had so many free in each bin; None where nobody tells."""
    gpus_per_node: int


def attribute_free_gpus(
    found: JobAttempts, pool_of: Ints, pool: FreePool, window: TickWindow
) -> Floats:
    """Return how much of a pool's free GPUs is due to each of CAUSES."""
    asks = (
        (pool_of == pool.pool_index) & (found.gpu_parts > 0)
        & (found.wait_reason != WAIT_NOT_ELIGIBLE)
        & (found.pending_start_ms != UNKNOWN_TIME) & (found.pending_start_ms < window.until_ms)
        & (found.pending_end_ms > window.since_ms)
    )  # fmt: skip
    at = np.flatnonzero(asks)
    start = np.maximum(found.pending_start_ms[at], window.since_ms) - window.since_ms
    end = np.minimum(found.pending_end_ms[at], window.until_ms) - window.since_ms
    shape, requests = _requests(found, at, pool.gpus_per_node)
    wanted = np.zeros((FREE_CAUSES.index("no_demand"), pool.num_bins))
    for number, request in enumerate(requests):
        mine = shape == number
        rate = np.full(int(mine.sum()), float(request.gpu_parts))
        sums = sum_rates_per_bin(start[mine], end[mine], rate, pool.bin_ms, pool.num_bins)[0]
        if request.is_limited:
            wanted[3] += sums
            continue
        fits = pool.free_part_ms >= request.gpu_parts * pool.bin_ms * (1 - 1e-9)
        wanted[4] += np.where(fits, 0.0, sums)
        if pool.nodes_by_free_gpus is None:
            wanted[2] += np.where(fits, sums, 0.0)
            continue
        placed = pool.nodes_by_free_gpus[
            min(request.gpus_per_node, len(pool.nodes_by_free_gpus) - 1) :
        ].sum(axis=0)
        enough = (placed >= request.num_nodes) & (
            request.gpus_per_node < len(pool.nodes_by_free_gpus)
        )
        wanted[0] += np.where(fits & ~enough, sums, 0.0)
        wanted[1] += np.where(fits & enough, sums, 0.0)
    given, left = np.zeros(len(FREE_CAUSES)), pool.free_part_ms.copy()
    for number, amount in enumerate(wanted):
        taken = np.minimum(left, amount)
        given[number] = taken.sum()
        left -= taken
    here = (pool_of == pool.pool_index) & (found.gpu_parts > 0)
    told = not here.any() or bool((found.pending_start_ms[here] != UNKNOWN_TIME).any())
    given[FREE_CAUSES.index("no_demand" if told else "no_demand?")] = left.sum()
    return given


def _requests(found: JobAttempts, at: Ints, node_gpus: int) -> tuple[Ints, list[PendingShape]]:
    """Return the shape of each waiting job, and the shapes there are."""
    parts = found.gpu_parts[at]
    gpus = -(-parts // PARTS_PER_GPU)
    nodes = np.where(found.num_nodes[at] > 0, found.num_nodes[at], -(-gpus // max(1, node_gpus)))
    nodes = np.clip(nodes, 1, np.maximum(1, gpus))
    rows = np.stack(
        [parts, nodes, -(-gpus // nodes), found.wait_reason[at] == WAIT_FOR_LIMIT], axis=1
    )
    distinct, shape = np.unique(rows, axis=0, return_inverse=True)
    return shape.reshape(-1), [
        PendingShape(int(p), int(n), int(each), bool(limited)) for p, n, each, limited in distinct
    ]


def build_free_pool(
    number: int, stretches: NodeStateSpans, segments: AllocationSegments, *, kept: Ints,
    pool: Ints, window: TickWindow
) -> FreePool:  # fmt: skip
    """Describe the free GPUs of a pool; `stretches` and `held` are those of the window."""
    up = np.flatnonzero((stretches.pool == number) & (stretches.state == UP))
    nodes, row = np.unique(stretches.node[up], return_inverse=True)
    width = choose_bin_ms(window.duration_ms, len(nodes))
    bins = -(-window.duration_ms // width)
    is_up = np.zeros(len(stretches.node) + 1, np.bool_)
    is_up[up] = True
    mine = np.flatnonzero((pool == number) & (is_up[segments.span] | (segments.node < 0)))
    part = segments.select(mine)
    rate = kept[mine] / np.maximum(1, part.end_ms - part.start_ms)
    size = stretches.gpu_parts[up].astype(float)
    there = sum_rates_per_bin(stretches.since_ms[up], stretches.until_ms[up], size, width, bins)[0]
    free = np.clip(
        there - sum_rates_per_bin(part.start_ms, part.end_ms, rate, width, bins)[0], 0.0, None
    )
    node_gpus = int(stretches.gpu_parts[up].max() // PARTS_PER_GPU) if len(up) else 0
    told = part.node >= 0
    if not told.all() or node_gpus == 0:
        return FreePool(number, width, bins, free, None, node_gpus)
    place = np.searchsorted(nodes, part.node)
    with_free = np.zeros((node_gpus + 1, bins))
    step = max(1, _CHUNK // bins)
    for first in range(0, len(nodes), step):
        last = min(first + step, len(nodes))
        of_nodes = (row >= first) & (row < last)
        of_pieces = (place >= first) & (place < last)
        room = sum_rates_per_bin(
            stretches.since_ms[up][of_nodes],
            stretches.until_ms[up][of_nodes],
            size[of_nodes],
            width,
            bins,
            row=row[of_nodes] - first,
            rows=last - first,
        )
        room -= sum_rates_per_bin(
            part.start_ms[of_pieces], part.end_ms[of_pieces], rate[of_pieces], width, bins,
            row=place[of_pieces] - first, rows=last - first,
        )  # fmt: skip
        whole = np.clip(
            np.floor(room / (width * PARTS_PER_GPU) + 1e-6).astype(np.int64), 0, node_gpus
        )
        cells = whole * bins + np.arange(bins)
        with_free += np.bincount(cells.ravel(), minlength=(node_gpus + 1) * bins).reshape(-1, bins)
    return FreePool(number, width, bins, free, with_free, node_gpus)
