"""Any `LinkGraph` as a `SimNetwork`: the ways of `spec.cluster.routing_table`, numbered and cached.

Those are the ways that `policy.collective.synthesis` plans with, so a schedule made for a graph
finds here what it was promised. `build_cluster_network` computes the same ways of regular clusters.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.algorithms.in_network import FABRIC
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.policy.collective.synthesis.bandwidth_bound import (
    SUPPORTED_OPS,
    find_bandwidth_bound,
)
from meshwright.predict.collective import cut_bound
from meshwright.predict.collective.sim_network import (
    NO_LINK,
    CollectiveCall,
    Floats,
    Longs,
    RouteTable,
    SimNetwork,
)
from meshwright.spec.cluster.failed_components import require_connected
from meshwright.spec.cluster.link_graph import LinkGraph
from meshwright.spec.cluster.routing_table import RoutingTable, TransferPath

MAX_ALL_CUTS_GPUS = 64
"""GPUs up to which the bound is looked for in all cuts, not only around GPUs and nodes."""

_HOLDS = ("nvswitch", "switch")


def build_graph_network(
    graph: LinkGraph, name: str = "the graph", *, members: Sequence[int] | None = None
) -> SimNetwork:
    """Return the links of a graph and the ways between its GPUs and switches.

    GPUs are numbered in the order of the graph's vertices. Where `members` are named, the other
    GPUs pass nothing on. GPUs that cannot all reach each other are refused.
    """
    names = list_gpu_names(graph)
    chosen = range(len(names)) if members is None else members
    outside = [gpu for gpu in chosen if not 0 <= gpu < len(names)]
    if outside:
        what, fix = f"{name} has no GPU {outside[0]}", f"use 0 to {len(names) - 1}"
        raise InputError([Problem("members", what, fix)])
    gpus = tuple(dict.fromkeys(names[gpu] for gpu in chosen))
    require_connected(graph, gpus)
    return _Graph(graph, gpus).network(name)


class _Graph:
    """A graph by numbers, and the ways found in it so far."""

    def __init__(self, graph: LinkGraph, gpus: tuple[str, ...]) -> None:
        self.graph, self.names = graph, list_gpu_names(graph)
        self.ways = RoutingTable(graph, gpus)
        self.arcs = list(self.ways.arc_bytes_per_s)
        self.link_of = {arc: index for index, arc in enumerate(self.arcs)}
        self.switches = [vertex.name for vertex in graph.vertices if vertex.kind in _HOLDS]
        self.vertices = [*self.names, *self.switches]
        """The vertex of each end."""
        top = _top(graph)
        if top is not None and FABRIC not in self.switches:
            self.switches.append(FABRIC)
            self.vertices.append(top)
        self._rate = cache(self._find_rate)
        self._known = cache(self._find_known)

    def network(self, name: str) -> SimNetwork:
        """Return the finished value."""
        node_of = {vertex.name: vertex.node for vertex in self.graph.vertices}
        nodes = sorted({node for node in node_of.values() if node})
        place = {node: index for index, node in enumerate(nodes)}
        return SimNetwork(
            name=name,
            gpus=len(self.names),
            switches=self.switches,
            domains=np.array([place.get(node_of[vertex], -1) for vertex in self.vertices]),
            link_bytes_per_s=np.array([self.ways.arc_bytes_per_s[arc] for arc in self.arcs]),
            latency_s=np.array([self.ways.arc_latency_s[arc] for arc in self.arcs]),
            link_name=self.link_name,
            routes=self.routes,
            bound_s=self.bound_s,
        )

    def link_name(self, link: int) -> str:
        """Return what a link joins."""
        u, t = self.arcs[link]
        return f"{self.ways.names[u]}→{self.ways.names[t]}"

    def routes(self, source: Longs, target: Longs) -> RouteTable:
        """Return the links of each way and what goes over them."""
        ends = len(self.vertices)
        distinct, which = np.unique(source * ends + target, return_inverse=True)
        found = [self._known(pair) for pair in distinct.tolist()]
        longest = max((len(links) for links, _ in found), default=0)
        table = np.full((len(found), longest), NO_LINK, dtype=np.int64)
        for row, (links, _) in enumerate(found):
            table[row, : len(links)] = links
        if all(shares is None for _, shares in found):
            return RouteTable(table[which])
        parts = np.ones(table.shape)
        for row, (_, shares) in enumerate(found):
            if shares is not None:
                parts[row, : len(shares)] = shares
        return RouteTable(table[which], parts[which])

    def _find_known(self, pair: int) -> tuple[Longs, Floats | None]:
        way = self._way(*divmod(pair, len(self.vertices)))
        links = np.array([self.link_of[arc] for arc in way.arcs], dtype=np.int64)
        shares = np.array([share for _, share in way.arc_shares])
        return links, shares if shares.min(initial=1.0) < 1 else None

    def _way(self, a: int, b: int) -> TransferPath:
        source, target = self.vertices[a], self.vertices[b]
        number = self.ways.vertex_index
        met = source in number and target in number
        way = self.ways.find_path(number[source], number[target]) if met else None
        if way is None:
            what = f"no way leads from {source} to {target}"
            raise InputError([Problem("links", what, "add a link, or leave one of them out")])
        return way

    def bound_s(self, ask: CollectiveCall) -> float:
        """Return the least time: over all cuts, or for large groups around GPUs and nodes.

        The first is the bound that `synthesize` reports.
        """
        if ask.op in SUPPORTED_OPS and not ask.reduces and len(ask.members) <= MAX_ALL_CUTS_GPUS:
            return ask.nbytes / self._rate(ask.op, ask.members, ask.members.index(ask.root))
        singles = [self._cut({self.names[gpu]}, ask) for gpu in ask.members]
        nodes: dict[str, set[str]] = defaultdict(set)
        for vertex in self.graph.vertices:
            if vertex.node:
                nodes[vertex.node].add(vertex.name)
        n = len(ask.members)
        least = cut_bound.cut_bound_s(ask.op, n, ask.nbytes, singles, reduces=ask.reduces)
        held = [cut for inside in nodes.values() if (cut := self._cut(inside, ask)).num_ranks]
        if len(held) > 1:
            between = cut_bound.cut_bound_s(ask.op, n, ask.nbytes, held, reduces=ask.reduces)
            least = max(least, between)
        return least

    def _find_rate(self, op: CollectiveOp, members: tuple[int, ...], root: int) -> float:
        gpus = tuple(self.names[gpu] for gpu in members)
        return find_bandwidth_bound(self.graph, op, gpus, root=root).rate_bytes_per_s

    def _cut(self, inside: set[str], ask: CollectiveCall) -> cut_bound.NetworkCut:
        members = {self.names[gpu] for gpu in ask.members}
        out = back = 0.0
        for link in self.graph.links:
            if (link.source in inside) != (link.target in inside):
                out += link.link_bytes_per_s if link.source in inside else 0.0
                back += link.link_bytes_per_s if link.target in inside else 0.0
        root = self.names[ask.root] in inside
        return cut_bound.NetworkCut(
            len(members & inside), out or float("inf"), back or float("inf"), root
        )


def _top(graph: LinkGraph) -> str | None:
    """Return the network switch farthest from the network cards: the one that all nodes share."""
    after: dict[str, list[str]] = defaultdict(list)
    for link in graph.links:
        after[link.source].append(link.target)
    switches = [vertex.name for vertex in graph.vertices_of_kind("switch")]
    far = {vertex.name: 0 for vertex in graph.vertices if vertex.kind != "switch"}
    frontier = list(far)
    while frontier:
        nearest = [t for here in frontier for t in after[here] if t not in far]
        far |= dict.fromkeys(nearest, far[frontier[0]] + 1)
        frontier = list(dict.fromkeys(nearest))
    return max(switches, key=lambda name: far.get(name, 0), default=None)


def list_gpu_names(graph: LinkGraph) -> list[str]:
    """Return the GPUs in the order in which a network numbers them."""
    return [vertex.name for vertex in graph.vertices_of_kind("gpu")]
