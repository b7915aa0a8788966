"""`RoutingTable`: the ways that transfers take over a `LinkGraph`. Whoever routes asks here.

Of all ways a transfer takes those through the fewest CPUs, then through the fewest network
switches, then through the fewest other GPUs, much as NCCL ranks its paths; of those the widest, of
those the ones with the fewest links, and of those the ones with the least latency. Where several
still tie (four network cards beside one GPU), the transfer is spread over them in proportion to
their links.

A GPU passes data on where it came over a fast link: to a neighbour that the sender has no link to,
or to its own network card (NCCL's NVB and PXN). Only GPUs that take part do so, for the others run
no program that would; and of several that tie one does, the next after the sender, since a transfer
is handed to one neighbour.
"""

import heapq
import math
from functools import cache
from typing import NamedTuple

from meshwright.spec.cluster.link_graph import LinkGraph, LinkKind

Arc = tuple[int, int]
"""A link by the numbers of its ends."""

_FAST: tuple[LinkKind, ...] = ("nvlink", "xgmi")
_SAME_S = 1e-12
# What passing through a vertex counts: one CPU is worse than any number of switches, and one
# switch than any number of GPUs.
_CPU, _SWITCH, _GPU = 1 << 40, 1 << 20, 1


class TransferPath(NamedTuple):
    """How a transfer gets from one vertex to another."""

    arc_shares: tuple[tuple[Arc, float], ...]
    """Its links and the part of the transfer on each, those nearest to the sender first."""
    cpus: int
    switches: int
    """Network switches that it goes through."""
    relay_gpus: int
    """Other GPUs that it goes through."""
    bottleneck_bytes_per_s: float
    """What the narrowest link of one of its paths carries."""
    hops: int
    """Links of one of its paths."""
    latency_s: float

    @property
    def sort_key(self) -> tuple[float, ...]:
        """What ways are compared by; less is better."""
        return self.cpus, self.switches, self.relay_gpus, -self.bottleneck_bytes_per_s, self.hops

    @property
    def arcs(self) -> list[Arc]:
        """Return its links, those nearest to the sender first."""
        return [arc for arc, _ in self.arc_shares]


class RoutingTable:
    """The best ways between the vertices of a graph, which are numbered with the GPUs first."""

    def __init__(self, graph: LinkGraph, gpus: tuple[str, ...] | None = None) -> None:
        """Number a graph; `gpus` take part, in this order (all, where None), others are not met."""
        every = tuple(vertex.name for vertex in graph.vertices_of_kind("gpu"))
        chosen = every if gpus is None else tuple(gpus)
        kinds = {vertex.name: vertex.kind for vertex in graph.vertices}
        self.gpus = len(chosen)
        self.names = (*chosen, *(name for name, kind in kinds.items() if kind != "gpu"))
        self.vertex_index = {name: index for index, name in enumerate(self.names)}
        price = {"cpu": _CPU, "switch": _SWITCH, "gpu": _GPU}
        self._price = [price.get(kinds[name], 0) for name in self.names]
        self.arc_bytes_per_s: dict[Arc, float] = {}
        """Bytes per second from one vertex to the next, wires of all kinds together."""
        self.arc_latency_s: dict[Arc, float] = {}
        fast: set[Arc] = set()
        for link in graph.links:
            if link.source in self.vertex_index and link.target in self.vertex_index:
                arc = self.vertex_index[link.source], self.vertex_index[link.target]
                self.arc_bytes_per_s[arc] = (
                    self.arc_bytes_per_s.get(arc, 0.0) + link.link_bytes_per_s
                )
                self.arc_latency_s[arc] = min(self.arc_latency_s.get(arc, math.inf), link.latency_s)
                fast |= {arc} if link.kind in _FAST else set()
        self._after: list[list[int]] = [[] for _ in self.names]
        """Where each vertex sends to; a GPU only where it could pass data on."""
        self._before: list[list[int]] = [[] for _ in self.names]
        self._ends: list[list[int]] = [[] for _ in self.names]
        """From where each vertex is reached as the end of a way."""
        for u, t in self.arc_bytes_per_s:
            self._ends[t].append(u)
            if t >= self.gpus or (u, t) in fast:
                self._after[u].append(t)
                self._before[t].append(u)
        self.find_path = cache(self._find)
        self._to_go = cache(self._find_to_go)

    def find_direct_path(self, a: int, b: int) -> TransferPath | None:
        """Return the way between two GPUs where no other GPU passes data on.

        The ways where some do are made of such legs, which a schedule may as well ask for one by
        one.
        """
        way = self.find_path(a, b) if a != b else None
        return None if way is None or way.relay_gpus else way

    def _find(self, a: int, b: int) -> TransferPath | None:
        """Return the way from one vertex to another; None where there is none."""
        if a == b:
            return TransferPath((), 0, 0, 0, math.inf, 0, 0.0)
        to_go = self._to_go(b)
        if a not in to_go:
            return None
        tight = self._tight(a, b, to_go)
        width = self._width(a, b, tight)
        late, levels = self._levels(a, b, tight, width)
        shares = self._spread(a, levels)
        cpus, rest = divmod(to_go[a], _CPU)
        switches, relays = divmod(rest, _SWITCH)
        return TransferPath(shares, cpus, switches, relays, width, len(levels), late)

    def _find_to_go(self, b: int) -> dict[int, int]:
        """Return what the best ways to a vertex pass through, from everywhere (Dijkstra)."""
        done = {b: 0}
        queue = [(0, u) for u in self._ends[b]]
        heapq.heapify(queue)
        while queue:
            cost, here = heapq.heappop(queue)
            if here in done:
                continue
            done[here] = cost
            further = cost + self._price[here]
            for u in self._before[here]:
                if u not in done:
                    heapq.heappush(queue, (further, u))
        return done

    def _tight(self, a: int, b: int, to_go: dict[int, int]) -> dict[int, list[int]]:
        """Return where each vertex sends to on ways that pass through no more than needed."""
        found: dict[int, list[int]] = {}
        straight = set(self._ends[b])
        left = [a]
        while left:
            here = left.pop()
            if here in found or here == b:
                continue
            found[here] = [
                t
                for t in self._after[here]
                if t != b and t in to_go and to_go[here] == self._price[t] + to_go[t]
            ]
            left += found[here]
            if here in straight:
                found[here].append(b)
        return found

    def _width(self, a: int, b: int, after: dict[int, list[int]]) -> float:
        """Return what the widest path carries."""
        done: set[int] = set()
        queue = [(-math.inf, a)]
        while True:
            width, here = heapq.heappop(queue)
            if here == b:
                return -width
            if here not in done:
                done.add(here)
                for t in after[here]:
                    heapq.heappush(queue, (max(width, -self.arc_bytes_per_s[here, t]), t))

    def _levels(
        self, a: int, b: int, after: dict[int, list[int]], width: float
    ) -> tuple[float, list[list[Arc]]]:
        """Return the latency of the shortest paths of a width, and their links hop by hop."""
        late = {a: 0.0}
        senders: dict[int, list[int]] = {}
        frontier = [a]
        while b not in late:
            met: dict[int, list[int]] = {}
            for u in frontier:
                for t in after[u]:
                    if t not in late and self.arc_bytes_per_s[u, t] >= width:
                        met.setdefault(t, []).append(u)
            for t, through in met.items():
                times = [late[u] + self.arc_latency_s[u, t] for u in through]
                late[t] = min(times)
                senders[t] = [
                    u
                    for u, time_s in zip(through, times, strict=True)
                    if time_s <= late[t] + _SAME_S
                ]
            frontier = list(met)
        levels: list[list[Arc]] = []
        ends = [b]
        while ends != [a]:
            arcs = [(u, t) for t in ends for u in senders[t]]
            ends = list(dict.fromkeys(u for u, _ in arcs))
            relays = [u for u in ends if u < self.gpus and u != a]
            if relays:
                ends = [min(relays, key=lambda u: (u - a) % self.gpus)]
            levels.append([arc for arc in arcs if arc[0] in ends])
        return late[b], levels[::-1]

    def _spread(self, a: int, levels: list[list[Arc]]) -> tuple[tuple[Arc, float], ...]:
        """Divide a transfer over the links that it takes."""
        held = {a: 1.0}
        shares = []
        for arcs in levels:
            # What led on from a GPU that does not pass the transfer on is not met.
            met = [arc for arc in arcs if arc[0] in held]
            leaving: dict[int, float] = {}
            for arc in met:
                leaving[arc[0]] = leaving.get(arc[0], 0.0) + self.arc_bytes_per_s[arc]
            for arc in met:
                share = held[arc[0]] * self.arc_bytes_per_s[arc] / leaving[arc[0]]
                held[arc[1]] = held.get(arc[1], 0.0) + share
                shares.append((arc, share))
        return tuple(shares)
