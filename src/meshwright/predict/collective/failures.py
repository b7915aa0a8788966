"""Failures: what ran best before a part failed, what runs best now, and how much longer it takes.

`spec.cluster.damage` takes the parts away and refuses a graph in which a GPU is cut off.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective import Op
from meshwright.policy.collective.synthesis import SUPPORTED, synthesize
from meshwright.predict.collective.costs import Costs
from meshwright.predict.collective.network import NONE, Network
from meshwright.predict.collective.of_graph import gpu_names, graph_network
from meshwright.predict.collective.ranking import Ranked, rank
from meshwright.predict.collective.simulation import simulate
from meshwright.spec.cluster import Cluster, LinkGraph
from meshwright.spec.cluster.damage import without


class Replanned(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A collective before and after a failure."""

    dead: tuple[str, ...]
    """What failed."""
    before: Ranked
    after: Ranked
    kept: Ranked | None
    """The algorithm from before on what is left, its ways led around the failure; None where it
    cannot run there."""
    ranks: tuple[int, ...]
    """The old numbers of the ranks that are left, by their new ones."""
    graph: LinkGraph
    """What is left."""

    @property
    def loss(self) -> float:
        """How much longer the collective takes than before, as a part of that."""
        return self.after.seconds / self.before.seconds - 1 if self.before.seconds else 0.0


def replan(
    system: Cluster | LinkGraph,
    op: Op,
    nbytes: float,
    dead: Sequence[str],
    *,
    costs: Costs | None = None,
) -> Replanned:
    """Return the best algorithm before and after parts fail, and what the failure costs."""
    if not dead:
        raise InputError([Problem("dead", "nothing failed", "name a vertex or a link")])
    graph = system.link_graph() if isinstance(system, Cluster) else system
    left = without(graph, dead)
    names, alive = list(gpu_names(graph)), set(gpu_names(left))
    ranks = tuple(index for index, name in enumerate(names) if name in alive)
    before = min(_options(graph, graph_network(graph), op, nbytes, costs), key=_seconds)
    network = graph_network(left)
    options = _options(left, network, op, nbytes, costs)
    kept = None
    if len(ranks) == len(names):
        result = simulate(before.collective, network, nbytes, costs=costs)
        kept = msgspec.structs.replace(before, result=result)
        options.append(kept)
    after = min(options, key=_seconds)
    return Replanned(
        dead=tuple(dead), before=before, after=after, kept=kept, ranks=ranks, graph=left
    )


def _seconds(ranked: Ranked) -> float:
    return ranked.seconds


def _options(
    graph: LinkGraph, network: Network, op: Op, nbytes: float, costs: Costs | None
) -> list[Ranked]:
    """Return the library's algorithms, rings led around narrow ways, and a schedule made for this.

    Before and after a failure have the same choice, so that the loss is that of the failure alone.
    """
    order = ring_around(network)
    found = rank(network, op, nbytes, costs=costs, orders=[order, order[::-1]])
    return found + _synthesized(graph, network, op, nbytes, costs)


def _synthesized(
    graph: LinkGraph, network: Network, op: Op, nbytes: float, costs: Costs | None
) -> list[Ranked]:
    """Return a schedule made for this very graph, where the operation is made of trees."""
    if op not in SUPPORTED or network.gpus < 2:
        return []
    collective = synthesize(graph, op).collective
    result = simulate(collective, network, nbytes, costs=costs)
    return [Ranked(name=collective.name, channels=1, parts=1, result=result, collective=collective)]


def ring_around(network: Network) -> list[int]:
    """Return an order of all GPUs around a ring that avoids narrow ways.

    A way costs the inverse of its narrowest link, and a little for each link. Starting from the
    nearest neighbours one after the other, parts of the ring are reversed as long as that helps.
    """
    n = network.gpus
    source, target = np.repeat(np.arange(n), n), np.tile(np.arange(n), n)
    routes = network.routes(source, target)
    rates = np.append(network.link_bytes_per_s, np.inf)[routes.links]
    narrow = (rates if routes.shares is None else rates / routes.shares).min(axis=1, initial=np.inf)
    many = (routes.links != NONE).sum(axis=1)
    cost = (1 / narrow * (1 + 0.01 * many)).reshape(n, n)
    # A narrow way holds up the whole ring, so wide ones cannot make up for it.
    cost = cost**2
    order, left = [0], set(range(1, n))
    while left:
        nearest = min(sorted(left), key=lambda gpu: float(cost[order[-1], gpu]))
        order.append(nearest)
        left.discard(nearest)
    return _improved(order, cost)


def _improved(order: list[int], cost: np.ndarray) -> list[int]:
    n, better = len(order), True
    while better and n > 3:
        better = False
        for first in range(n - 1):
            for last in range(first + 1, n):
                a, b = order[first - 1], order[first]
                c, d = order[last], order[(last + 1) % n]
                if d == b or a == c:
                    continue
                if cost[a, c] + cost[b, d] < (cost[a, b] + cost[c, d]) * (1 - 1e-9):
                    order[first : last + 1] = reversed(order[first : last + 1])
                    better = True
    return order
