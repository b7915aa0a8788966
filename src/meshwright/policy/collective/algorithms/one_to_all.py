"""One rank gives to all, or takes from all: weight distribution, gathering, scattering.

Binomial: the ranks that have it send it on at halving distances, log₂ n steps. Scatter and
all-gather (van de Geijn): the root scatters, a ring gathers; twice the bytes of one copy instead of
log₂ n times. Over rails: every node gets one copy over the network, spread over all its cards.
"""

from collections.abc import Iterator

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp

PIECES = 16
"""Pieces that stream from node to node one after the other."""


def build_binomial(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Send down (broadcast, scatter) or up (reduce, gather) a binomial tree."""
    n, part = shape.ranks, shape.slots_per_share
    shares = n if op in ("scatter", "gather") else 1
    flow = CollectiveBuilder("binomial", op, ranks=n, chunks=shares * part, root=shape.root)
    down = op in ("broadcast", "scatter")
    hops = list(_binomial(n))
    for distance in hops if down else reversed(hops):
        with flow.step():
            for giver in range(0, n - distance, 2 * distance):
                upper, lower = _seat(shape, giver), _seat(shape, giver + distance)
                for begin, held in _below(shape, giver + distance, distance, shares):
                    for channel, first, count in shape.split_over_channels(held * part):
                        chunk = begin * part + first
                        src, dst = (upper, lower) if down else (lower, upper)
                        send = flow.add if op == "reduce" else flow.copy
                        send(src, dst, chunk=chunk, count=count, channel=channel)
    return flow.build()


def build_scatter_all_gather(shape: AlgorithmShape) -> Collective:
    """Scatter down a binomial tree, then pass the shares around a ring.

    Share i belongs to the rank i behind the root; nothing is sent to the root, which has all.
    """
    n, part = shape.ranks, shape.slots_per_share
    flow = CollectiveBuilder(
        "scatter_all_gather", "broadcast", ranks=n, chunks=n * part, root=shape.root
    )
    for distance in _binomial(n):
        with flow.step():
            for giver in range(0, n - distance, 2 * distance):
                taker = giver + distance
                run = min(distance, n - taker) * part
                for channel, first, count in shape.split_over_channels(run):
                    src, dst = _seat(shape, giver), _seat(shape, taker)
                    chunk = taker * part + first
                    flow.copy(src, dst, chunk=chunk, count=count, channel=channel)
    with flow.sweep(n - 1, shift=-part):
        for giver in range(n - 1):
            for channel, first, count in shape.split_over_channels(part):
                src, dst = _seat(shape, giver), _seat(shape, giver + 1)
                flow.copy(src, dst, chunk=giver * part + first, count=count, channel=channel)
    return flow.build()


def build_rail_broadcast(shape: AlgorithmShape) -> Collective:
    """Spread the message over the root's node; stream each share along its rail; spread again.

    GPU l of a node gets share l from GPU l of the node before, and gives it to its neighbours.
    """
    n, width, pieces = shape.ranks, shape.ranks_per_node, shape.get_pieces(PIECES)
    nodes, home = n // width, shape.root // width
    chunks = width * shape.channels * pieces
    flow = CollectiveBuilder("over_rails", "broadcast", ranks=n, chunks=chunks, root=shape.root)
    with flow.sweep(pieces, shift=1, wrap=0):
        for rail in range(width):
            for channel in range(shape.channels):
                chunk = (rail * shape.channels + channel) * pieces
                before = shape.root
                for hop in range(nodes):
                    door = (home + hop) % nodes * width + rail
                    if door != shape.root:
                        flow.copy(before, door, chunk=chunk, channel=channel, phase=hop)
                    before = door
                    for ahead in range(1, width):
                        mate = door - rail + (rail + ahead) % width
                        if mate != shape.root:
                            phase = hop + ahead
                            flow.copy(door, mate, chunk=chunk, channel=channel, phase=phase)
    return flow.build()


def _binomial(n: int) -> Iterator[int]:
    """Go through the distances, the longest first."""
    distance = 1 << max(0, (n - 1).bit_length()) >> 1
    while distance:
        yield distance
        distance //= 2


def _seat(shape: AlgorithmShape, number: int) -> int:
    """Return the rank that stands so far behind the root."""
    return (shape.root + number) % shape.ranks


def _below(
    shape: AlgorithmShape, number: int, reach: int, shares: int
) -> Iterator[tuple[int, int]]:
    """Go through the shares of a rank and those below it, as runs of (first, how many)."""
    if shares == 1:
        yield 0, 1
        return
    count = min(reach, shape.ranks - number)
    begin = _seat(shape, number)
    yield begin, min(count, shape.ranks - begin)
    if count > shape.ranks - begin:
        yield 0, count - (shape.ranks - begin)
