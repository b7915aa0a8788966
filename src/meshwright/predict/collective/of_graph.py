"""Any `LinkGraph` as a `Network`: ways by search, remembered.

Of two ways the one through fewer CPUs is taken, then through fewer network switches, then through
fewer other GPUs, then the wider one. A GPU passes data on where it came over a fast link: to a
neighbour that the sender has no link to, or to its own network card (NCCL's NVB and PXN).
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.predict.collective import cuts
from meshwright.predict.collective.network import NONE, Ask, Longs, Network
from meshwright.spec.cluster.links import LinkGraph

_FAST = ("nvlink", "xgmi")
_HOLDS = ("nvswitch", "switch")
FABRIC = "fabric"


def graph_network(graph: LinkGraph, name: str = "the graph") -> Network:
    """Return the links of a graph and the ways between its GPUs and switches.

    GPUs are numbered in the order of the graph's vertices. A graph whose GPUs cannot all reach
    each other is refused.
    """
    refuse_isolated(graph)
    return _Ways(graph).network(name)


def refuse_isolated(graph: LinkGraph) -> None:
    """Raise if some GPU cannot reach, or be reached from, the others; name it and the cut."""
    ways = _Ways(graph)
    if len(ways.gpus) < 2:
        if not ways.gpus:
            raise InputError([Problem("vertices", "the graph has no GPU", "add at least one")])
        return
    first, problems = ways.gpus[0], []
    for links, verb in ((ways.leaving, "be reached from"), (ways.arriving, "reach")):
        reached = _reached(first, links)
        lost = [gpu for gpu in ways.gpus if gpu not in reached]
        if len(lost) > len(ways.gpus) // 2:
            # The first GPU is the one cut off: say so rather than naming all the others.
            problems.append(ways.isolated(first, "reach" if verb != "reach" else "be reached from"))
        else:
            problems += [ways.isolated(gpu, verb) for gpu in lost[:4]]
    if problems:
        raise InputError(list({problem.where: problem for problem in problems}.values()))


class _Edge(NamedTuple):
    link: int
    other: int
    fast: bool


class _Ways:
    """A graph by numbers, and the ways found in it so far."""

    def __init__(self, graph: LinkGraph) -> None:
        self.graph = graph
        self.number = {vertex.name: index for index, vertex in enumerate(graph.vertices)}
        self.kind = [vertex.kind for vertex in graph.vertices]
        self.gpus = [index for index, kind in enumerate(self.kind) if kind == "gpu"]
        self.leaving: dict[int, list[_Edge]] = defaultdict(list)
        self.arriving: dict[int, list[_Edge]] = defaultdict(list)
        for index, link in enumerate(graph.links):
            source, target = self.number[link.source], self.number[link.target]
            fast = link.kind in _FAST
            self.leaving[source].append(_Edge(index, target, fast))
            self.arriving[target].append(_Edge(index, source, fast))
        self.rate = [link.link_bytes_per_s for link in graph.links]
        self.holders = [index for index, kind in enumerate(self.kind) if kind in _HOLDS]
        self.vertex_of = [*self.gpus, *self.holders]
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def network(self, name: str) -> Network:
        """Return the finished value."""
        nodes = {vertex.node for vertex in self.graph.vertices if vertex.node}
        places = {node: index for index, node in enumerate(sorted(nodes))}
        vertices = self.graph.vertices
        top = self._top()
        switches = [vertices[index].name for index in self.holders]
        if top is not None and FABRIC not in switches:
            self.vertex_of.append(top)
            switches.append(FABRIC)
        return Network(
            name=name,
            gpus=len(self.gpus),
            switches=switches,
            units=np.array([places.get(vertices[end].node, -1) for end in self.vertex_of]),
            link_bytes_per_s=np.array(self.rate, dtype=np.float64),
            latency_s=np.array([link.latency_s for link in self.graph.links], dtype=np.float64),
            link_name=lambda link: (
                f"{self.graph.links[link].source}→{self.graph.links[link].target}"
            ),
            routes=self.routes,
            bound_s=self.bound_s,
        )

    def link_name(self, link: int) -> str:
        """Return what a link joins."""
        return f"{self.graph.links[link].source}→{self.graph.links[link].target}"

    def _top(self) -> int | None:
        """Return the network switch that the fewest links lead up from: the one all nodes share."""
        switches = [index for index in self.holders if self.kind[index] == "switch"]
        return switches[-1] if switches else None

    def routes(self, source: Longs, target: Longs) -> Longs:
        """Return the links of each way."""
        pairs = np.column_stack((source, target))
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        wanted: dict[int, set[int]] = defaultdict(set)
        for a, b in distinct.tolist():
            if (a, b) not in self._known:
                wanted[a].add(b)
        for a, targets in wanted.items():
            self._search(a, targets)
        ways = [self._known[a, b] for a, b in distinct.tolist()]
        longest = max((len(way) for way in ways), default=0)
        table = np.full((len(ways), longest), NONE, dtype=np.int64)
        for row, way in enumerate(ways):
            table[row, : len(way)] = way
        return table[which.reshape(-1)]

    def _search(self, start: int, targets: set[int]) -> None:
        """Find the ways from one end to several others."""
        origin = self.vertex_of[start]
        missing = {self.vertex_of[end]: end for end in targets}
        if origin in missing:
            self._known[start, missing.pop(origin)] = ()
        queue: list[tuple[tuple[int, int, int, float, int], int, int, bool]] = [
            ((0, 0, 0, float("-inf"), 0), origin, NONE, True)
        ]
        came: dict[int, tuple[int, int]] = {}
        came_by: list[tuple[int, int]] = [(NONE, origin)]
        done: set[int] = set()
        queue[0] = (queue[0][0], origin, 0, True)
        while queue and missing:
            rank, here, step, passes = heapq.heappop(queue)
            if here in done:
                continue
            done.add(here)
            came[here] = (came_by[step][0], came_by[step][1])
            if here in missing:
                self._known[start, missing.pop(here)] = self._way(here, origin, came)
            if not passes:
                continue
            cpus, switches, relays, narrow, hops = rank
            relays += int(self.kind[here] == "gpu" and here != origin)
            for edge in self.leaving[here]:
                if edge.other in done:
                    continue
                kind = self.kind[edge.other]
                longer = (
                    cpus + (kind == "cpu"),
                    switches + (kind == "switch"),
                    relays,
                    max(narrow, -self.rate[edge.link]),
                    hops + 1,
                )
                came_by.append((edge.link, here))
                goes_on = kind != "gpu" or edge.fast
                heapq.heappush(queue, (longer, edge.other, len(came_by) - 1, goes_on))
        if missing:
            lost = next(iter(missing))
            names = self.graph.vertices
            what = f"no way leads from {names[origin].name} to {names[lost].name}"
            raise InputError([Problem("links", what, "add a link, or leave one of them out")])

    def _way(self, end: int, origin: int, came: dict[int, tuple[int, int]]) -> tuple[int, ...]:
        links = []
        while end != origin:
            link, end = came[end]
            links.append(link)
        return tuple(reversed(links))

    def isolated(self, gpu: int, verb: str) -> Problem:
        """Say which GPU is cut off and what little it is still joined to."""
        name = self.graph.vertices[gpu].name
        sides = self.leaving if verb == "reach" else self.arriving
        around = sorted(self.graph.vertices[one].name for one in _reached(gpu, sides) - {gpu})
        behind = f"only {', '.join(around[:4])} remain on its side" if around else "it has no link"
        what = f"{name} cannot {verb} the other GPUs: {behind}"
        fix = f"add a link from {name} to a switch or GPU, or leave {name} out of the group"
        return Problem(name, what, fix)

    def bound_s(self, ask: Ask) -> float:
        """Return the least time over the cuts around each GPU and around each node."""
        singles = [self._cut({self.gpus[gpu]}, ask) for gpu in ask.members]
        nodes: dict[str, set[int]] = defaultdict(set)
        for index, vertex in enumerate(self.graph.vertices):
            if vertex.node:
                nodes[vertex.node].add(index)
        whole = [self._cut(inside, ask) for inside in nodes.values()]
        n = len(ask.members)
        least = cuts.bound_s(ask.op, n, ask.nbytes, singles, reduces=ask.reduces)
        held = [cut for cut in whole if cut.ranks]
        if len(held) > 1:
            between = cuts.bound_s(ask.op, n, ask.nbytes, held, reduces=ask.reduces)
            least = max(least, between)
        return least

    def _cut(self, inside: set[int], ask: Ask) -> cuts.Cut:
        members = {self.gpus[gpu] for gpu in ask.members}
        out = sum(
            self.rate[edge.link]
            for vertex in inside
            for edge in self.leaving[vertex]
            if edge.other not in inside
        )
        back = sum(
            self.rate[edge.link]
            for vertex in inside
            for edge in self.arriving[vertex]
            if edge.other not in inside
        )
        root = self.gpus[ask.root] in inside
        return cuts.Cut(len(members & inside), out or float("inf"), back or float("inf"), root)


def _reached(start: int, links: dict[int, list[_Edge]]) -> set[int]:
    """Return every vertex that links lead to."""
    found, queue = {start}, [start]
    while queue:
        for edge in links[queue.pop()]:
            if edge.other not in found:
                found.add(edge.other)
                queue.append(edge.other)
    return found


def gpu_names(graph: LinkGraph) -> Sequence[str]:
    """Return the GPUs in the order in which a network numbers them."""
    return [vertex.name for vertex in graph.of_kind("gpu")]
