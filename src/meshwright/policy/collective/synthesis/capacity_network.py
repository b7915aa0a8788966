"""`CapacityNetwork`: bandwidth between the GPUs of a collective, as a graph with capacities.

Only links on the way of some pair of GPUs count (`spec.cluster.routing_table`): a library that has
NVLink does not send beside it through the CPUs. GPUs that take no part are left out, for a GPU that
runs no program of the collective relays nothing.
"""

from collections.abc import Iterable
from itertools import permutations

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.synthesis.max_flow import list_set_bits
from meshwright.spec.cluster.failed_components import require_connected
from meshwright.spec.cluster.link_graph import LinkGraph
from meshwright.spec.cluster.routing_table import Arc, RoutingTable
from meshwright.spec.name_suggestions import build_unknown_name_problem


class CapacityNetwork:
    """Capacities between vertices; the GPUs that take part are the first."""

    def __init__(
        self,
        routing_table: RoutingTable,
        names: list[str],
        capacity: dict[Arc, float],
        uses: dict[Arc, int],
        returns: dict[Arc, Arc] | None = None,
    ) -> None:
        self.routing_table = routing_table
        self.gpus = routing_table.gpus
        self.names = tuple(names)
        self.capacity = capacity
        """Bytes per second from one vertex to the next."""
        self._uses = uses
        self._returns = returns or {}

    @classmethod
    def from_pairs(cls, ways: RoutingTable, pairs: Iterable[Arc]) -> "CapacityNetwork":
        """Draw what the best ways between some pairs of GPUs give."""
        uses: dict[Arc, int] = {}
        for a, b in sorted(pairs):
            way = ways.find_path(a, b)
            for arc in way.arcs if way is not None else ():
                uses[arc] = uses.get(arc, 0) | 1 << a * ways.gpus + b
        met = {end for arc in uses for end in arc} - set(range(ways.gpus))
        kept = [*range(ways.gpus), *sorted(met)]
        place = {old: new for new, old in enumerate(kept)}
        renamed = {(place[u], place[t]): pairs for (u, t), pairs in uses.items()}
        capacity = {(place[u], place[t]): ways.arc_bytes_per_s[u, t] for u, t in uses}
        return cls(ways, [ways.names[old] for old in kept], capacity, renamed)

    @property
    def size(self) -> int:
        """Vertices."""
        return len(self.names)

    def reverse_arc(self, arc: Arc) -> Arc:
        """Return the other direction of a link."""
        return self._returns.get(arc, (arc[1], arc[0]))

    def get_reverse_rate(self, arc: Arc) -> float:
        """Return what the other direction of a link carries."""
        return self.capacity.get(self.reverse_arc(arc), 0.0)

    def to_matrix(
        self, rates: dict[Arc, float] | None = None, backwards: bool = False
    ) -> list[list[float]]:
        """Return rates (the capacities, where None) as rows of senders; backwards, of receivers."""
        rows = [[0.0] * self.size for _ in range(self.size)]
        for (u, t), rate in (self.capacity if rates is None else rates).items():
            rows[t if backwards else u][u if backwards else t] = rate
        return rows

    def list_pairs_by_arc(self, backwards: bool = False) -> dict[Arc, int]:
        """Return for each link, as bits, the pairs of GPUs whose best way it is on.

        The pair of the sender a and the receiver b is bit `a · gpus + b`; backwards, links and
        pairs are the other way round.
        """
        if not backwards:
            return self._uses
        return {
            (t, u): sum(
                1 << bit % self.gpus * self.gpus + bit // self.gpus for bit in list_set_bits(pairs)
            )
            for (u, t), pairs in self._uses.items()
        }

    def get_names(self, inside: int) -> tuple[str, ...]:
        """Return the names of a set of vertices, given as bits."""
        return tuple(self.names[index] for index in list_set_bits(inside))

    def find_disconnected_side(self) -> int:
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
        for vertex in list_set_bits(frontier):
            step |= beside[vertex]
        frontier = step & ~seen
        seen |= frontier
    return seen


def select_gpus(graph: LinkGraph, gpus: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the GPUs that take part, in rank order, checked."""
    known = [vertex.name for vertex in graph.vertices_of_kind("gpu")]
    members = tuple(known) if gpus is None else tuple(gpus)
    problems = [
        build_unknown_name_problem("GPU", name, known, "gpus")
        for name in members
        if name not in known
    ]
    twice = sorted({name for name in members if members.count(name) > 1})
    if twice:
        problems.append(Problem("gpus", f"named more than once: {', '.join(twice)}"))
    if not problems and len(members) < 2:
        what = f"a collective joins 2 or more GPUs, and this names {len(members)}"
        problems.append(Problem("gpus", what, "name the GPUs that take part"))
    if problems:
        raise InputError(problems)
    return members


def build_capacity_network(graph: LinkGraph, gpus: tuple[str, ...]) -> CapacityNetwork:
    """Return the network of some GPUs, refusing one where data cannot get everywhere."""
    require_connected(graph, gpus)
    return CapacityNetwork.from_pairs(RoutingTable(graph, gpus), permutations(range(len(gpus)), 2))
