"""`Routes`: the ways that transfers between GPUs take over a `LinkGraph`.

A transfer takes the widest path and, among those, the one with the fewest links, as
`LinkGraph.widest_path` does, and then the one with the least latency. Where several paths still tie
(four network cards beside one GPU), it is spread over them in proportion to their links. GPUs end
paths; they pass data on only where a schedule says so.
"""

import heapq
import math
from functools import cache

from meshwright.spec.cluster.links import LinkGraph

Arc = tuple[int, int]
_SAME_S = 1e-12


class Routes:
    """Best ways between the vertices of a graph, which are numbered with the GPUs first."""

    def __init__(self, graph: LinkGraph, gpus: tuple[str, ...]) -> None:
        relays = [vertex.name for vertex in graph.vertices if vertex.kind != "gpu"]
        self.gpus = len(gpus)
        self.names = (*gpus, *relays)
        number = {name: index for index, name in enumerate(self.names)}
        self.bandwidth: dict[Arc, float] = {}
        """Bytes per second from one vertex to the next, wires of all kinds together."""
        self.latency_s: dict[Arc, float] = {}
        for link in graph.links:
            if link.source in number and link.target in number:
                arc = number[link.source], number[link.target]
                self.bandwidth[arc] = self.bandwidth.get(arc, 0.0) + link.link_bytes_per_s
                self.latency_s[arc] = min(self.latency_s.get(arc, math.inf), link.latency_s)
        self._after: list[list[int]] = [[] for _ in self.names]
        self._before: list[list[int]] = [[] for _ in self.names]
        for u, t in self.bandwidth:
            self._after[u].append(t)
            self._before[t].append(u)
        self._widths = cache(self._find_widths)
        self._hops = cache(self._find_hops)
        self.way = cache(self._find_way)

    def width(self, a: int, b: int) -> float:
        """Return what the widest path carries; 0 where there is none."""
        return self._widths(a).get(b, 0.0)

    def arcs(self, a: int, b: int) -> list[Arc]:
        """Return the links of all best ways between two GPUs, those nearest to `a` first."""
        width = self.width(a, b)
        if not width:
            return []
        ahead, behind = self._hops(a, width, True), self._hops(b, width, False)
        whole = ahead[b]
        found = []
        for u, far in ahead.items():
            if u != a and u < self.gpus:
                continue
            for t in self._after[u]:
                arc = u, t
                if self.bandwidth[arc] < width or (t != b and t < self.gpus) or t not in behind:
                    continue
                hops = far[0] + 1 + behind[t][0]
                late_s = far[1] + self.latency_s[arc] + behind[t][1]
                if hops == whole[0] and late_s <= whole[1] + _SAME_S:
                    found.append(arc)
        return sorted(found, key=lambda arc: ahead[arc[0]][0])

    def hops(self, a: int, b: int) -> int:
        """Return how many links the best ways between two GPUs have."""
        return self._hops(a, self.width(a, b), True)[b][0]

    def latency(self, a: int, b: int) -> float:
        """Return the latency of the best way between two GPUs; the longest where several tie."""
        late = {a: 0.0}
        for u, t in self.arcs(a, b):
            late[t] = max(late.get(t, 0.0), late[u] + self.latency_s[u, t])
        return late.get(b, math.inf)

    def _find_way(self, a: int, b: int) -> tuple[tuple[Arc, float], ...]:
        """Return each link of the best ways between two GPUs and the share that it carries."""
        arcs = self.arcs(a, b)
        leaving: dict[int, float] = {}
        for arc in arcs:
            leaving[arc[0]] = leaving.get(arc[0], 0.0) + self.bandwidth[arc]
        held = {a: 1.0}
        shares = []
        for arc in arcs:
            share = held[arc[0]] * self.bandwidth[arc] / leaving[arc[0]]
            held[arc[1]] = held.get(arc[1], 0.0) + share
            shares.append((arc, share))
        return tuple(shares)

    def _find_widths(self, a: int) -> dict[int, float]:
        done: dict[int, float] = {}
        queue = [(-math.inf, a)]
        while queue:
            width, here = heapq.heappop(queue)
            if here in done:
                continue
            done[here] = -width
            if here >= self.gpus or here == a:
                for t in self._after[here]:
                    if t not in done:
                        heapq.heappush(queue, (max(width, -self.bandwidth[here, t]), t))
        return done

    def _find_hops(self, end: int, width: float, forward: bool) -> dict[int, tuple[int, float]]:
        """Return the links of this width, and their latency, between a GPU and every vertex."""
        found = {end: (0, 0.0)}
        frontier = [end]
        while frontier:
            nearest: dict[int, tuple[int, float]] = {}
            for here in frontier:
                if here < self.gpus and here != end:
                    continue
                for other in self._after[here] if forward else self._before[here]:
                    arc = (here, other) if forward else (other, here)
                    if other not in found and self.bandwidth[arc] >= width:
                        way = found[here][0] + 1, found[here][1] + self.latency_s[arc]
                        nearest[other] = min(nearest.get(other, way), way)
            found.update(nearest)
            frontier = list(nearest)
        return found
