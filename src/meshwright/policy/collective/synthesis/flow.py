"""`Residual`: maximum flow between the vertices of a small network, augmented and changed in place.

What each pair can still carry is a matrix, and which pairs can carry anything is a row of bits, so
that a breadth-first search is a handful of integer operations. Numbers may be integers (exact) or
floats (with a tolerance). It knows no GPUs and no links.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

Matrix = list[list[float]]


class Residual:
    """What can still be carried between every two vertices, once some flow runs."""

    __slots__ = ("into", "out", "rest", "tolerance")

    def __init__(self, capacity: Sequence[Sequence[float]], tolerance: float = 0) -> None:
        self.rest: Matrix = [list(row) for row in capacity]
        self.tolerance = tolerance
        size = len(self.rest)
        self.out = [0] * size
        """For each vertex, a bit for every vertex that it can still send to."""
        self.into = [0] * size
        for u, row in enumerate(self.rest):
            for t, value in enumerate(row):
                if value > tolerance:
                    self.out[u] |= 1 << t
                    self.into[t] |= 1 << u

    def copy(self) -> "Residual":
        """Return an independent copy."""
        twin = Residual.__new__(Residual)
        twin.rest = [row[:] for row in self.rest]
        twin.out, twin.into, twin.tolerance = self.out[:], self.into[:], self.tolerance
        return twin

    def widened(self, more: int) -> "Residual":
        """Return a copy with so many more vertices, which nothing leads to yet."""
        twin = Residual.__new__(Residual)
        size = len(self.rest) + more
        twin.rest = [[*row, *([0] * more)] for row in self.rest]
        twin.rest += [[0] * size for _ in range(more)]
        twin.out, twin.into = [*self.out, *([0] * more)], [*self.into, *([0] * more)]
        twin.tolerance = self.tolerance
        return twin

    def lead(self, u: int, ends: Iterable[int], amount: float) -> None:
        """Give a vertex that leads nowhere as much to each of several others."""
        row, mark = self.rest[u], 1 << u
        for t in ends:
            row[t] = amount
            self.out[u] |= 1 << t
            self.into[t] |= mark

    def change(self, u: int, t: int, by: float) -> None:
        """Give a pair more, or less, to carry."""
        value = self.rest[u][t] + by
        self.rest[u][t] = value
        if value > self.tolerance:
            self.out[u] |= 1 << t
            self.into[t] |= 1 << u
        else:
            self.out[u] &= ~(1 << t)
            self.into[t] &= ~(1 << u)

    def push(self, u: int, t: int, amount: float) -> None:
        """Send an amount from one vertex to the next."""
        self.change(u, t, -amount)
        self.change(t, u, amount)

    def flow(self, source: int, sink: int, most: float) -> float:
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
                    amount = min(amount, self.rest[u][t])
                for u, t in way:
                    self.push(u, t, amount)
                sent += amount
        return sent

    def reached(self, source: int) -> int:
        """Return, as bits, the vertices that the source can still send to, and itself."""
        seen = frontier = 1 << source
        while frontier:
            frontier = self._next(frontier) & ~seen
            seen |= frontier
        return seen

    def reaching(self, sink: int) -> int:
        """Return, as bits, the vertices that can still send to the sink, and itself."""
        seen = frontier = 1 << sink
        while frontier:
            step = 0
            for vertex in bits(frontier):
                step |= self.into[vertex]
            frontier = step & ~seen
            seen |= frontier
        return seen

    def _next(self, frontier: int) -> int:
        step = 0
        while frontier:
            low = frontier & -frontier
            step |= self.out[low.bit_length() - 1]
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
            before = self.into[met[-1]] & levels[depth - 1]
            if before:
                met.append(before.bit_length() - 1)
                depth -= 1
                continue
            levels[depth] &= ~(1 << met.pop())
            depth += 1
            if not met:
                return None
        return [(u, t) for t, u in pairwise(met)]


def bits(mask: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
