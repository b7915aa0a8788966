"""`ResidualGraph`: maximum flow between vertices of a small network, changed in place.

What each pair can still carry is a matrix, and which pairs can carry anything is a row of bits, so
that a breadth-first search is a handful of integer operations. Numbers may be integers (exact) or
floats (with a tolerance). It knows no GPUs and no links.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

Matrix = list[list[float]]


class ResidualGraph:
    """What can still be carried between every two vertices, once some flow runs."""

    __slots__ = ("predecessors", "residual_capacity", "successors", "tolerance")

    def __init__(self, capacity: Sequence[Sequence[float]], tolerance: float = 0) -> None:
        self.residual_capacity: Matrix = [list(row) for row in capacity]
        self.tolerance = tolerance
        size = len(self.residual_capacity)
        self.successors = [0] * size
        """For each vertex, a bit for every vertex that it can still send to."""
        self.predecessors = [0] * size
        for u, row in enumerate(self.residual_capacity):
            for t, value in enumerate(row):
                if value > tolerance:
                    self.successors[u] |= 1 << t
                    self.predecessors[t] |= 1 << u

    def copy(self) -> "ResidualGraph":
        """Return an independent copy."""
        twin = ResidualGraph.__new__(ResidualGraph)
        twin.residual_capacity = [row[:] for row in self.residual_capacity]
        twin.successors, twin.predecessors, twin.tolerance = (
            self.successors[:],
            self.predecessors[:],
            self.tolerance,
        )
        return twin

    def add_vertices(self, more: int) -> "ResidualGraph":
        """Return a copy with so many more vertices, which nothing leads to yet."""
        twin = ResidualGraph.__new__(ResidualGraph)
        size = len(self.residual_capacity) + more
        twin.residual_capacity = [[*row, *([0] * more)] for row in self.residual_capacity]
        twin.residual_capacity += [[0] * size for _ in range(more)]
        twin.successors, twin.predecessors = (
            [*self.successors, *([0] * more)],
            [*self.predecessors, *([0] * more)],
        )
        twin.tolerance = self.tolerance
        return twin

    def add_edges(self, u: int, ends: Iterable[int], amount: float) -> None:
        """Give a vertex that leads nowhere as much to each of several others."""
        row, mark = self.residual_capacity[u], 1 << u
        for t in ends:
            row[t] = amount
            self.successors[u] |= 1 << t
            self.predecessors[t] |= mark

    def adjust_capacity(self, u: int, t: int, by: float) -> None:
        """Give a pair more, or less, to carry."""
        value = self.residual_capacity[u][t] + by
        self.residual_capacity[u][t] = value
        if value > self.tolerance:
            self.successors[u] |= 1 << t
            self.predecessors[t] |= 1 << u
        else:
            self.successors[u] &= ~(1 << t)
            self.predecessors[t] &= ~(1 << u)

    def push(self, u: int, t: int, amount: float) -> None:
        """Send an amount from one vertex to the next."""
        self.adjust_capacity(u, t, -amount)
        self.adjust_capacity(t, u, amount)

    def send_flow(self, source: int, sink: int, most: float) -> float:
        """Send up to `most` from source to sink along shortest ways; return what got through."""
        sent: float = 0
        while most - sent > self.tolerance:
            levels = self._levels(source, sink)
            if levels is None:
                break
            while most - sent > self.tolerance:
                way = self._way(levels, sink)
                if way is None:
                    break
                amount = most - sent
                for u, t in way:
                    amount = min(amount, self.residual_capacity[u][t])
                for u, t in way:
                    self.push(u, t, amount)
                sent += amount
        return sent

    def source_side(self, source: int) -> int:
        """Return, as bits, the vertices that the source can still send to, and itself."""
        seen = frontier = 1 << source
        while frontier:
            frontier = self._next(frontier) & ~seen
            seen |= frontier
        return seen

    def sink_side(self, sink: int) -> int:
        """Return, as bits, the vertices that can still send to the sink, and itself."""
        seen = frontier = 1 << sink
        while frontier:
            step = 0
            for vertex in list_set_bits(frontier):
                step |= self.predecessors[vertex]
            frontier = step & ~seen
            seen |= frontier
        return seen

    def _next(self, frontier: int) -> int:
        step = 0
        while frontier:
            low = frontier & -frontier
            step |= self.successors[low.bit_length() - 1]
            frontier ^= low
        return step

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Return, as bits, what is met after each number of hops, up to where the sink is met."""
        target = 1 << sink
        seen = frontier = 1 << source
        levels = [frontier]
        while not frontier & target:
            frontier = self._next(frontier) & ~seen
            if not frontier:
                return None
            seen |= frontier
            levels.append(frontier)
        return levels

    def _way(self, levels: list[int], sink: int) -> list[tuple[int, int]] | None:
        """Return a way through levels, from its end; vertices that turn out dead ends leave them.

        All ways of one length are used up before levels are made anew (Dinic 1970).
        """
        met = [sink]
        depth = len(levels) - 1
        while depth > 0:
            before = self.predecessors[met[-1]] & levels[depth - 1]
            if before:
                met.append(before.bit_length() - 1)
                depth -= 1
                continue
            levels[depth] &= ~(1 << met.pop())
            depth += 1
            if not met:
                return None
        return [(u, t) for t, u in pairwise(met)]


def list_set_bits(mask: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
