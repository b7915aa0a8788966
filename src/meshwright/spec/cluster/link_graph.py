"""`LinkGraph`: a machine as vertices and directed links, for irregular wiring and for drawing.

It finds paths and what they carry. It does not know what a cluster is or where a graph came
from: `graph_from_cluster` makes one of a `Cluster`, the readers of topology files build one for a
real machine.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.name_suggestions import build_unknown_name_problem

VertexKind = Literal["gpu", "cpu", "pcie-switch", "nvswitch", "nic", "switch"]
LinkKind = Literal["nvlink", "xgmi", "c2c", "pcie", "socket", "network"]


class GraphVertex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that links end at."""

    name: str
    """Unique in its graph."""
    kind: VertexKind
    """What it is."""
    label: str = ""
    """What else is known of it: a bus address, a device name."""
    node: str = ""
    """The node (host) it is part of; empty outside nodes."""
    arch: str = ""
    """Compute architecture of a GPU (sm_90, gfx942) where its source names it."""
    port_bytes_per_s: float | None = None
    """What a network card sends into its network, where that is known and not drawn as a link."""
    port_latency_s: float | None = None
    """What NCCL adds to each hop through a network card, where its plugin states it."""
    port: int | None = None
    """Which port of its device a network card is."""
    guid: str = ""
    """The network card's device: ports with the same one share its way to the host."""
    rail: int | None = None
    """Rail of the fabric that a network card is wired to, where its source names it."""
    plane: int | None = None
    """Plane of the fabric, in networks built several times over, where its source names it."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(name=self.name)
        bounds.one_of("kind", self.kind, get_args(VertexKind))
        bounds.positive(port_bytes_per_s=self.port_bytes_per_s)
        bounds.not_negative(port_latency_s=self.port_latency_s)
        bounds.count(0, port=self.port, rail=self.rail, plane=self.plane)
        bounds.raise_problems()


class GraphLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A one-way link between two vertices; parallel wires are one link with their sum."""

    source: str
    """Vertex that sends."""
    target: str
    """Vertex that receives."""
    kind: LinkKind
    """What the wires are."""
    link_bytes_per_s: float
    """What they carry together."""
    latency_s: float = 0.0
    """What crossing them costs."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("kind", self.kind, get_args(LinkKind))
        bounds.positive(link_bytes_per_s=self.link_bytes_per_s)
        bounds.not_negative(latency_s=self.latency_s)
        if self.source == self.target:
            bounds.add("target", f"{self.target!r} is linked to itself", "name another vertex")
        bounds.raise_problems()


class GraphPath(msgspec.Struct, frozen=True, kw_only=True):
    """A way from one vertex to another."""

    vertices: tuple[str, ...]
    """Both ends and all between."""
    path_bytes_per_s: float
    """What its narrowest link carries."""
    latency_s: float
    """The latencies of its links together."""


class LinkGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Vertices and the directed links between them."""

    vertices: tuple[GraphVertex, ...]
    """Every GPU, CPU, switch and card."""
    links: tuple[GraphLink, ...]
    """Every link, one entry per direction."""

    def __post_init__(self) -> None:
        problems: list[Problem] = []
        names = [vertex.name for vertex in self.vertices]
        known = set(names)
        if len(known) != len(names):
            twice = sorted(name for name, times in Counter(names).items() if times > 1)
            what = f"named more than once: {', '.join(twice)}"
            problems.append(Problem("vertices", what, "give each a name of its own"))
        ends: set[tuple[str, str, str]] = set()
        for index, link in enumerate(self.links):
            problems.extend(
                build_unknown_name_problem("vertex", end, known, f"links[{index}]")
                for end in (link.source, link.target)
                if end not in known
            )
            if (link.source, link.target, link.kind) in ends:
                problems.append(
                    Problem(
                        f"links[{index}]",
                        f"{link.source} to {link.target} by {link.kind} is listed twice",
                        "add the bandwidths up",
                    )
                )
            ends.add((link.source, link.target, link.kind))
        if problems:
            raise InputError(problems)

    def vertices_of_kind(self, kind: VertexKind) -> tuple[GraphVertex, ...]:
        """Return the vertices of one kind, in the order given."""
        return tuple(vertex for vertex in self.vertices if vertex.kind == kind)

    def links_from(self, name: str) -> tuple[GraphLink, ...]:
        """Return the links that leave a vertex."""
        return tuple(link for link in self.links if link.source == name)

    def widest_path(self, source: str, target: str) -> GraphPath | None:
        """Return the path with the most bandwidth (then the fewest links); None if there is none.

        GPUs end paths but do not pass data on. What a transfer takes is another question: `ways`.
        """
        return self._search(source, target, _by_width)

    def shortest_path(self, source: str, target: str) -> GraphPath | None:
        """Return the path with the least latency (then the fewest links); None if there is none.

        GPUs end paths but do not pass data on.
        """
        return self._search(source, target, _by_latency)

    def path_bytes_per_s(self, source: str, target: str) -> float:
        """Return what the widest path carries in bytes per second; 0 where there is no path."""
        path = self.widest_path(source, target)
        return 0.0 if path is None else path.path_bytes_per_s

    def isolated_gpus(self) -> tuple[str, ...]:
        """Name the GPUs that cannot reach any other GPU, where there are several."""
        group_of = self._components()
        gpus = [vertex.name for vertex in self.vertices_of_kind("gpu")]
        members = Counter(group_of[name] for name in gpus)
        if len(gpus) < 2:
            return ()
        return tuple(name for name in gpus if members[group_of[name]] == 1)

    def _components(self) -> dict[str, str]:
        # Links come in pairs, so reaching is taken to hold both ways.
        joined = DisjointSets(vertex.name for vertex in self.vertices)
        for link in self.links:
            joined.union(link.source, link.target)
        return {vertex.name: joined.find(vertex.name) for vertex in self.vertices}

    def _search(
        self, source: str, target: str, rank: "Callable[[GraphPath], tuple[float, float]]"
    ) -> GraphPath | None:
        kinds = {vertex.name: vertex.kind for vertex in self.vertices}
        for name in (source, target):
            if name not in kinds:
                raise InputError([build_unknown_name_problem("vertex", name, kinds)])
        leaving: dict[str, list[GraphLink]] = {}
        for link in self.links:
            leaving.setdefault(link.source, []).append(link)
        start = GraphPath(vertices=(source,), path_bytes_per_s=math.inf, latency_s=0.0)
        queue: list[tuple[tuple[float, float], int, GraphPath]] = [(rank(start), 0, start)]
        done: set[str] = set()
        pushed = 0
        while queue:
            _, _, path = heapq.heappop(queue)
            here = path.vertices[-1]
            if here == target:
                return path
            if here in done or (kinds[here] == "gpu" and here != source):
                continue
            done.add(here)
            for link in leaving.get(here, ()):
                if link.target not in done:
                    longer = _extend(path, link)
                    pushed += 1
                    heapq.heappush(queue, (rank(longer), pushed, longer))
        return None


def _by_width(path: GraphPath) -> tuple[float, float]:
    return -path.path_bytes_per_s, len(path.vertices)


def _by_latency(path: GraphPath) -> tuple[float, float]:
    return path.latency_s, len(path.vertices)


def _extend(path: GraphPath, link: GraphLink) -> GraphPath:
    return GraphPath(
        vertices=(*path.vertices, link.target),
        path_bytes_per_s=min(path.path_bytes_per_s, link.link_bytes_per_s),
        latency_s=path.latency_s + link.latency_s,
    )


def make_duplex_links(
    a: str, b: str, kind: LinkKind, link_bytes_per_s: float, latency_s: float = 0.0
) -> tuple[GraphLink, GraphLink]:
    """Return the two links of a pair that carries as much in either direction."""
    return (
        GraphLink(
            source=a, target=b, kind=kind, link_bytes_per_s=link_bytes_per_s, latency_s=latency_s
        ),
        GraphLink(
            source=b, target=a, kind=kind, link_bytes_per_s=link_bytes_per_s, latency_s=latency_s
        ),
    )


class DisjointSets:
    """Names joined into groups, each known by the first of its names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._order = {name: index for index, name in enumerate(names)}
        self._parent = {name: name for name in self._order}

    def find(self, name: str) -> str:
        """Return the name that stands for the group of `name`."""
        while self._parent[name] != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name

    def union(self, a: str, b: str) -> None:
        """Make one group of two."""
        first, second = sorted((self.find(a), self.find(b)), key=self._order.__getitem__)
        self._parent[second] = first

    def members(self, name: str) -> list[str]:
        """Return every name in the group of `name`."""
        group = self.find(name)
        return [other for other in self._order if self.find(other) == group]

    def list_sets(self) -> list[list[str]]:
        """Return the groups in the order of their first names."""
        members: dict[str, list[str]] = {}
        for name in self._order:
            members.setdefault(self.find(name), []).append(name)
        return list(members.values())
