"""Failures: what ran best before a part failed, what runs best now, and how much longer it takes.

`spec.cluster.failed_components` takes the parts away and refuses a graph in which a GPU is cut off.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective import CollectiveOp
from meshwright.policy.collective.synthesis import SUPPORTED_OPS, synthesize
from meshwright.predict.collective.algorithm_ranking import RankedAlgorithm, rank_algorithms
from meshwright.predict.collective.graph_network import build_graph_network, list_gpu_names
from meshwright.predict.collective.message_costs import MessageCosts
from meshwright.predict.collective.sim_network import NO_LINK, SimNetwork
from meshwright.predict.collective.simulation import simulate_collective
from meshwright.spec.cluster import Cluster, LinkGraph
from meshwright.spec.cluster.failed_components import remove_components


class FailureImpact(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A collective before and after a failure."""

    failed: tuple[str, ...]
    """What failed."""
    before: RankedAlgorithm
    after: RankedAlgorithm
    rerouted: RankedAlgorithm | None
    """The algorithm from before on what is left, its ways led around the failure; None where it
    cannot run there."""
    surviving_ranks: tuple[int, ...]
    """The old numbers of the ranks that are left, by their new ones."""
    surviving_graph: LinkGraph
    """What is left."""

    @property
    def slowdown(self) -> float:
        """How much longer the collective takes than before, as a part of that."""
        return self.after.seconds / self.before.seconds - 1 if self.before.seconds else 0.0


def replan_after_failure(
    system: Cluster | LinkGraph,
    op: CollectiveOp,
    nbytes: float,
    dead: Sequence[str],
    *,
    costs: MessageCosts | None = None,
) -> FailureImpact:
    """Return the best algorithm before and after parts fail, and what the failure costs."""
    if not dead:
        raise InputError([Problem("dead", "nothing failed", "name a vertex or a link")])
    graph = system.build_link_graph() if isinstance(system, Cluster) else system
    left = remove_components(graph, dead)
    names, alive = list(list_gpu_names(graph)), set(list_gpu_names(left))
    ranks = tuple(index for index, name in enumerate(names) if name in alive)
    before = min(_options(graph, build_graph_network(graph), op, nbytes, costs), key=_seconds)
    network = build_graph_network(left)
    options = _options(left, network, op, nbytes, costs)
    kept = None
    if len(ranks) == len(names):
        result = simulate_collective(before.collective, network, nbytes, costs=costs)
        kept = msgspec.structs.replace(before, result=result)
        options.append(kept)
    after = min(options, key=_seconds)
    return FailureImpact(
        failed=tuple(dead),
        before=before,
        after=after,
        rerouted=kept,
        surviving_ranks=ranks,
        surviving_graph=left,
    )


def _seconds(ranked: RankedAlgorithm) -> float:
    return ranked.seconds


def _options(
    graph: LinkGraph,
    network: SimNetwork,
    op: CollectiveOp,
    nbytes: float,
    costs: MessageCosts | None,
) -> list[RankedAlgorithm]:
    """Return the library's algorithms, rings led around narrow ways, and a schedule made for this.

    Before and after a failure have the same choice, so that the loss is that of the failure alone.
    """
    order = find_ring_order(network)
    found = rank_algorithms(network, op, nbytes, costs=costs, orders=[order, order[::-1]])
    return found + _synthesized(graph, network, op, nbytes, costs)


def _synthesized(
    graph: LinkGraph,
    network: SimNetwork,
    op: CollectiveOp,
    nbytes: float,
    costs: MessageCosts | None,
) -> list[RankedAlgorithm]:
    """Return a schedule made for this very graph, where the operation is made of trees."""
    if op not in SUPPORTED_OPS or network.gpus < 2:
        return []
    collective = synthesize(graph, op).collective
    result = simulate_collective(collective, network, nbytes, costs=costs)
    return [
        RankedAlgorithm(
            name=collective.name, channels=1, message_parts=1, result=result, collective=collective
        )
    ]


def find_ring_order(network: SimNetwork) -> list[int]:
    """Return an order of all GPUs around a ring that avoids narrow ways.

    A way costs the inverse of its narrowest link, and a little for each link. Starting from the
    nearest neighbours one after the other, parts of the ring are reversed as long as that helps.
    """
    n = network.gpus
    source, target = np.repeat(np.arange(n), n), np.tile(np.arange(n), n)
    routes = network.find_routes(source, target)
    rates = np.append(network.link_bytes_per_s, np.inf)[routes.links]
    narrow = (rates if routes.shares is None else rates / routes.shares).min(axis=1, initial=np.inf)
    many = (routes.links != NO_LINK).sum(axis=1)
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
