"""Bruck's algorithms: ⌈log₂ n⌉ steps for any n (Bruck, Ho, Kipnis, Upfal and Weathersby, 1997).

All-gather sends all that was gathered so far to ranks at doubling distances. In all-to-all the
chunk for the rank i further on travels along the bits of i, together with all others that share
a bit; it crosses the network once per bit and not just once, which pays for small messages.
"""

from collections.abc import Iterator

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective


def build_all_gather(shape: AlgorithmShape) -> Collective:
    """Rank r holds chunks r, r + 1, … and sends them to ranks at doubling distances before it."""
    n, part = shape.ranks, shape.slots_per_share
    flow = CollectiveBuilder("bruck", "all_gather", ranks=n, chunks=n * part)
    distance = 1
    while distance < n:
        with flow.step():
            for rank in range(n):
                for begin, held in _around(rank, min(distance, n - distance), n):
                    for channel, first, count in shape.split_over_channels(held * part):
                        chunk, to = begin * part + first, (rank - distance) % n
                        flow.copy(rank, to, chunk=chunk, count=count, channel=channel)
        distance *= 2
    return flow.build()


def build_all_to_all(shape: AlgorithmShape) -> Collective:
    """Turn, so that chunk i is for the rank i further on; send along its bits; turn back.

    A chunk changes between two rows of slots with every hop, because a rank sends and receives
    the chunks of a bit in the same step.
    """
    n, part = shape.ranks, shape.slots_per_share
    flow = CollectiveBuilder("bruck", "all_to_all", ranks=n, chunks=n * part)
    rows = flow.allocate_scratch(n * part), flow.allocate_scratch(n * part)
    with flow.step():
        for rank in range(n):
            moved = 0
            for begin, count in _around(rank, n, n):
                to = rows[0] + moved * part
                flow.copy(rank, rank, chunk=begin * part, to=to, count=count * part)
                moved += count
    distance = 1
    while distance < n:
        _along_bit(flow, shape, rows, distance)
        distance *= 2
    order = list(range(flow.output))
    order += _slots([n - 1 - i for i in range(n)], flow.output, part)
    at = [_hops(i, n) % 2 for i in range(n)]
    order += [slot for i in range(n) for slot in _slots([i], rows[at[i]], part)]
    with flow.step_in_order(order):
        for rank in range(n):
            # Chunk i came from rank − i: with the output numbered backwards, two runs.
            back = flow.output + (n - 1 - rank) * part
            flow.copy(rank, rank, chunk=rows[0], to=back, count=(rank + 1) * part)
            rest = rows[0] + (rank + 1) * part
            flow.copy(rank, rank, chunk=rest, to=flow.output, count=(n - 1 - rank) * part)
    return flow.build()


def _along_bit(
    flow: CollectiveBuilder, shape: AlgorithmShape, rows: tuple[int, int], distance: int
) -> None:
    """Send all chunks with a bit set that far, numbered so that they are two runs."""
    n, part = shape.ranks, shape.slots_per_share
    going = [i for i in range(n) if i & distance]
    runs = [[i for i in going if _hops(i, distance) % 2 == row] for row in (0, 1)]
    chunks = [*runs[0], *runs[1], *(i for i in range(n) if not i & distance)]
    order = [*range(rows[0]), *_slots(chunks, rows[0], part), *_slots(chunks, rows[1], part)]
    with flow.step_in_order(order):
        for rank in range(n):
            begin = 0
            for row, run in enumerate(runs):
                for channel, first, count in shape.split_over_channels(len(run) * part):
                    at = begin * part + first
                    flow.copy(
                        rank,
                        (rank + distance) % n,
                        chunk=rows[row] + at,
                        to=rows[1 - row] + at,
                        count=count,
                        channel=channel,
                    )
                begin += len(run)


def _hops(i: int, below: int) -> int:
    """Return how often chunk i was sent along the bits below a power of two (or all of them)."""
    return bin(i if i < below else i & (below - 1)).count("1")


def _slots(chunks: list[int], first: int, part: int) -> list[int]:
    return [first + chunk * part + index for chunk in chunks for index in range(part)]


def _around(begin: int, count: int, n: int) -> Iterator[tuple[int, int]]:
    """Cut a run that goes around the end of n chunks into runs that do not."""
    yield begin, min(count, n - begin)
    if count > n - begin:
        yield 0, count - (n - begin)
