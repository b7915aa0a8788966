"""Rings: every rank sends to the next one only. Fewest bytes, most steps.

Reduce-scatter and all-gather each take n − 1 steps in which every rank sends 1/n of the message;
all-reduce is one after the other (Patarasuk and Yuan, 2009). Broadcast and reduce stream pieces
along the ring, cut open at the root.
"""

from meshwright.policy.collective.algorithms.algorithm_shape import (
    AlgorithmShape,
    list_ring_orders,
    rotate,
)
from meshwright.policy.collective.algorithms.tree import (
    ParentList,
    build_chain_tree,
    build_tree_stream,
)
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective

PIECES = 16
"""Pieces of a streamed chain: with many more pieces than hops the last rank ends little later."""


def build_all_reduce(shape: AlgorithmShape) -> Collective:
    """Reduce around the ring, then pass the sums around it.

    Chunk c of a ring is the one that the rank at position c sends first; no rank has a part of its
    own, so chunks are numbered along the ring.
    """
    n, pieces = shape.ranks, shape.get_pieces(1)
    ring = CollectiveBuilder("ring", "all_reduce", ranks=n, chunks=n * shape.channels * pieces)
    for reducing in (True, False):
        with ring.sweep(n - 1, shift=-1, wrap=n):
            for channel, order in enumerate(list_ring_orders(shape)):
                for place, rank in enumerate(order):
                    for piece in range(pieces):
                        block = (channel * pieces + piece) * n
                        target = order[(place + 1) % n]
                        if reducing:
                            ring.add(rank, target, chunk=block + place, channel=channel)
                        else:
                            chunk = block + (place + 1) % n
                            ring.copy(rank, target, chunk=chunk, channel=channel)
    return ring.build()


def build_reduce_scatter(shape: AlgorithmShape) -> Collective:
    """Reduce around the ring; the chunk of each rank arrives there last."""
    n, pieces = shape.ranks, shape.get_pieces(1)
    part = shape.channels * pieces
    ring = CollectiveBuilder("ring", "reduce_scatter", ranks=n, chunks=n * part)
    with ring.sweep(n - 1, shift=-1, wrap=n, order=_along(shape, pieces)):
        for channel, order in enumerate(list_ring_orders(shape)):
            for place, rank in enumerate(order):
                for lane in range(channel * pieces, (channel + 1) * pieces):
                    chunk = lane * n + (place - 1) % n
                    ring.add(rank, order[(place + 1) % n], chunk=chunk, channel=channel)
    return ring.build()


def build_all_gather(shape: AlgorithmShape) -> Collective:
    """Pass every rank's chunk around the ring."""
    n, pieces = shape.ranks, shape.get_pieces(1)
    part = shape.channels * pieces
    ring = CollectiveBuilder("ring", "all_gather", ranks=n, chunks=n * part)
    with ring.sweep(n - 1, shift=-1, wrap=n, order=_along(shape, pieces)):
        for channel, order in enumerate(list_ring_orders(shape)):
            for place, rank in enumerate(order):
                for lane in range(channel * pieces, (channel + 1) * pieces):
                    chunk = lane * n + place
                    ring.copy(rank, order[(place + 1) % n], chunk=chunk, channel=channel)
    return ring.build()


def build_broadcast(shape: AlgorithmShape) -> Collective:
    """Stream pieces from the root along each ring."""
    return build_tree_stream("ring", "broadcast", shape, _open_rings(shape, 0), PIECES)


def build_reduce(shape: AlgorithmShape) -> Collective:
    """Stream pieces along each ring to the root, adding on the way."""
    return build_tree_stream("ring", "reduce", shape, _open_rings(shape, 1), PIECES)


def _along(shape: AlgorithmShape, pieces: int) -> list[int]:
    """Return the slots in the order in which the lanes pass them: lane by lane, along its ring."""
    part = shape.channels * pieces
    slots = []
    for channel, order in enumerate(list_ring_orders(shape)):
        for lane in range(channel * pieces, (channel + 1) * pieces):
            slots += [rank * part + lane for rank in order]
    return slots


def _open_rings(shape: AlgorithmShape, behind_root: int) -> list[ParentList]:
    """Return each ring as a chain from the root, and against the ring where `behind_root` is 1."""
    chains = []
    for order in list_ring_orders(shape):
        from_root = rotate(order, order.index(shape.root))
        if behind_root:
            from_root = [from_root[0], *reversed(from_root[1:])]
        chains.append(build_chain_tree(from_root))
    return chains
