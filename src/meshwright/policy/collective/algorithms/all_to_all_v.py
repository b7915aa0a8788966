"""All-to-all where every rank has another amount for every other: tokens for experts.

The same three ways as in `exchange`. How much goes where is known (`counts`), so every message has
its place: chunks lie in the order of their targets before, and of their sources afterwards.
"""

from itertools import accumulate

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective


class _Flow:
    """A builder that knows where the chunks of each pair of ranks lie."""

    def __init__(self, name: str, shape: AlgorithmShape) -> None:
        self.counts, self.n = shape.counts, shape.ranks
        self.channels, self.part = shape.channels, shape.slots_per_share
        columns = list(zip(*self.counts, strict=True))
        most = max(1, *map(sum, self.counts), *map(sum, columns))
        self.build = CollectiveBuilder(
            name, "all_to_all_v", ranks=self.n, chunks=most, counts=self.counts
        )
        self.leaves: list[list[int]] = [[0, *accumulate(row)] for row in self.counts]
        """Where the chunks for each target begin, for each source."""
        self.lands: list[list[int]] = [[0, *accumulate(column)] for column in columns]
        """Where the chunks of each source begin, for each target."""

    def out(self, source: int, target: int) -> int:
        """Return the slot in which the chunks of a source begin at its target."""
        return self.build.output + self.lands[target][source]

    def send(self, src: int, dst: int, *, chunk: int, to: int, count: int) -> None:
        """Send a run of chunks, cut as evenly as it goes into moves on all channels."""
        for lane in range(self.part):
            first, end = count * lane // self.part, count * (lane + 1) // self.part
            channel = lane * self.channels // self.part
            self.build.copy(
                src, dst, chunk=chunk + first, to=to + first, count=end - first, channel=channel
            )

    def straight(self, source: int, target: int) -> None:
        """Send what a rank has for another straight to it."""
        self.send(
            source,
            target,
            chunk=self.leaves[source][target],
            to=self.out(source, target),
            count=self.counts[source][target],
        )


def build_pairwise(shape: AlgorithmShape) -> Collective:
    """In step t, rank r sends to rank r + t."""
    flow = _Flow("pairwise", shape)
    for ahead in range(flow.n):
        with flow.build.step():
            for rank in range(flow.n):
                flow.straight(rank, (rank + ahead) % flow.n)
    return flow.build.build()


def build_cross_then_forward(shape: AlgorithmShape) -> Collective:
    """Cross to the same GPU of the target's node with all that is for that node; pass it on."""
    flow, width = _Flow("cross_forward", shape), shape.ranks_per_node
    n, build, leaves = flow.n, flow.build, flow.leaves
    _inside(flow, width)

    def crossing(rank: int, node: int) -> int:
        """Return how much of a rank is for a node."""
        return leaves[rank][(node + 1) * width] - leaves[rank][node * width]

    # What waits at rank (k, l) came from the ranks (·, l) of other nodes, in their order.
    waits: dict[tuple[int, int], int] = {}
    for rank in range(n):
        filled = 0
        for source in range(rank % width, n, width):
            if source != rank:
                waits[source, rank] = filled
                filled += crossing(source, rank // width)
        waits[rank, rank] = filled
    landing = build.allocate_scratch(max(waits[rank, rank] for rank in range(n)))
    for ahead in range(width, n, width):
        with build.step():
            for rank in range(n):
                door = (rank + ahead) % n
                node = door // width
                begin, to = leaves[rank][node * width], landing + waits[rank, door]
                flow.send(rank, door, chunk=begin, to=to, count=crossing(rank, node))
    for ahead in range(width):
        with build.step():
            for door in range(n):
                first = door - door % width
                target = first + (door + ahead) % width
                for source in range(door % width, n, width):
                    if source != door:
                        inside = leaves[source][target] - leaves[source][first]
                        flow.send(
                            door,
                            target,
                            chunk=landing + waits[source, door] + inside,
                            to=flow.out(source, target),
                            count=flow.counts[source][target],
                        )
    return build.build()


def build_forward_then_cross(shape: AlgorithmShape) -> Collective:
    """Collect inside the node what is for one target of another, at the GPU on its rail; cross."""
    flow, width = _Flow("forward_cross", shape), shape.ranks_per_node
    n, build, lands = flow.n, flow.build, flow.lands
    _inside(flow, width)

    def crossing(node: int, target: int) -> int:
        """Return how much of a node is for a target."""
        return lands[target][(node + 1) * width] - lands[target][node * width]

    # What waits at rank (k, l) is for the ranks (·, l) of other nodes, in their order.
    waits: dict[tuple[int, int], int] = {}
    for rank in range(n):
        filled = 0
        for target in range(rank % width, n, width):
            if target != rank:
                waits[rank, target] = filled
                filled += crossing(rank // width, target)
        waits[rank, rank] = filled
    leaving = build.allocate_scratch(max(waits[rank, rank] for rank in range(n)))
    for ahead in range(width):
        with build.step():
            for source in range(n):
                first = source - source % width
                door = first + (source + ahead) % width
                for target in range(door % width, n, width):
                    if target != door:
                        inside = lands[target][source] - lands[target][first]
                        flow.send(
                            source,
                            door,
                            chunk=flow.leaves[source][target],
                            to=leaving + waits[door, target] + inside,
                            count=flow.counts[source][target],
                        )
    for ahead in range(width, n, width):
        with build.step():
            for door in range(n):
                target, node = (door + ahead) % n, door // width
                begin, to = leaving + waits[door, target], flow.out(node * width, target)
                flow.send(door, target, chunk=begin, to=to, count=crossing(node, target))
    return build.build()


def _inside(flow: _Flow, width: int) -> None:
    """Exchange what stays inside the nodes."""
    for ahead in range(width):
        with flow.build.step():
            for rank in range(flow.n):
                flow.straight(rank, rank - rank % width + (rank + ahead) % width)
