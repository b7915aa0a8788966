"""`Network`: what a collective can count on between its GPUs, as capacities of numbered vertices.

Only links on the way of some pair of GPUs count (`spec.cluster.ways`): a library that has NVLink
does not send beside it through the CPUs. GPUs that take no part are left out, for a GPU that runs
no program of the collective relays nothing.
"""

from collections.abc import Iterable
from itertools import permutations

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.synthesis.flow import bits
from meshwright.spec.cluster.damage import refuse_cut_off
from meshwright.spec.cluster.links import LinkGraph
from meshwright.spec.cluster.ways import Arc, Ways
from meshwright.spec.names import unknown_name


class Network:
    """Capacities between vertices; the GPUs that take part are the first."""

    def __init__(
        self,
        ways: Ways,
        names: list[str],
        capacity: dict[Arc, float],
        uses: dict[Arc, int],
        returns: dict[Arc, Arc] | None = None,
    ) -> None:
        self.ways = ways
        self.gpus = ways.gpus
        self.names = tuple(names)
        self.capacity = capacity
        """Bytes per second from one vertex to the next."""
        self._uses = uses
        self._returns = returns or {}

    @classmethod
    def of_pairs(cls, ways: Ways, pairs: Iterable[Arc]) -> "Network":
        """Draw what the best ways between some pairs of GPUs give."""
        uses: dict[Arc, int] = {}
        for a, b in sorted(pairs):
            way = ways.way(a, b)
            for arc in way.arcs if way is not None else ():
                uses[arc] = uses.get(arc, 0) | 1 << a * ways.gpus + b
        met = {end for arc in uses for end in arc} - set(range(ways.gpus))
        kept = [*range(ways.gpus), *sorted(met)]
        place = {old: new for new, old in enumerate(kept)}
        renamed = {(place[u], place[t]): pairs for (u, t), pairs in uses.items()}
        capacity = {(place[u], place[t]): ways.bandwidth[u, t] for u, t in uses}
        return cls(ways, [ways.names[old] for old in kept], capacity, renamed)

    @property
    def size(self) -> int:
        """Vertices."""
        return len(self.names)

    def back(self, arc: Arc) -> Arc:
        """Return the other direction of a link."""
        return self._returns.get(arc, (arc[1], arc[0]))

    def rate_back(self, arc: Arc) -> float:
        """Return what the other direction of a link carries."""
        return self.capacity.get(self.back(arc), 0.0)

    def matrix(
        self, rates: dict[Arc, float] | None = None, backwards: bool = False
    ) -> list[list[float]]:
        """Return rates (the capacities, where None) as rows of senders; backwards, of receivers."""
        rows = [[0.0] * self.size for _ in range(self.size)]
        for (u, t), rate in (self.capacity if rates is None else rates).items():
            rows[t if backwards else u][u if backwards else t] = rate
        return rows

    def uses(self, backwards: bool = False) -> dict[Arc, int]:
        """Return for each link, as bits, the pairs of GPUs whose best way it is on.

        The pair of the sender a and the receiver b is bit `a · gpus + b`; backwards, links and
        pairs are the other way round.
        """
        if not backwards:
            return self._uses
        return {
            (t, u): sum(1 << bit % self.gpus * self.gpus + bit // self.gpus for bit in bits(pairs))
            for (u, t), pairs in self._uses.items()
        }

    def named(self, inside: int) -> tuple[str, ...]:
        """Return the names of a set of vertices, given as bits."""
        return tuple(self.names[index] for index in bits(inside))

    def cut_off(self) -> int:
        """Return, as bits, the smaller side of a cut that nothing crosses one way; 0 if none."""
        every = (1 << self.gpus) - 1
        after = [0] * self.size
        before = [0] * self.size
        for u, t in self.capacity:
            after[u] |= 1 << t
            before[t] |= 1 << u
        for beside in (after, before):
            for gpu in range(self.gpus):
                inside = _closure(gpu, beside) & every
                if inside != every:
                    return min(inside, every & ~inside, key=int.bit_count)
        return 0


def _closure(start: int, beside: list[int]) -> int:
    seen = frontier = 1 << start
    while frontier:
        step = 0
        for vertex in bits(frontier):
            step |= beside[vertex]
        frontier = step & ~seen
        seen |= frontier
    return seen


def chosen_gpus(graph: LinkGraph, gpus: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the GPUs that take part, in rank order, checked."""
    known = [vertex.name for vertex in graph.of_kind("gpu")]
    members = tuple(known) if gpus is None else tuple(gpus)
    problems = [unknown_name("GPU", name, known, "gpus") for name in members if name not in known]
    twice = sorted({name for name in members if members.count(name) > 1})
    if twice:
        problems.append(Problem("gpus", f"named more than once: {', '.join(twice)}"))
    if not problems and len(members) < 2:
        what = f"a collective joins 2 or more GPUs, and this names {len(members)}"
        problems.append(Problem("gpus", what, "name the GPUs that take part"))
    if problems:
        raise InputError(problems)
    return members


def joined(graph: LinkGraph, gpus: tuple[str, ...]) -> Network:
    """Return the network of some GPUs, refusing one where data cannot get everywhere."""
    refuse_cut_off(graph, gpus)
    return Network.of_pairs(Ways(graph, gpus), permutations(range(len(gpus)), 2))
