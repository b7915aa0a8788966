"""Machines that collectives are compared on, regular and not, and the library's best on each.

Regular ones come from the catalog; the others are those with links removed, and a DGX-1 drawn link
by link. The library competes with every algorithm it has that reduces in GPUs, on 1 to 8 channels,
and with rings searched for the machine, as NCCL searches them.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

from meshwright.errors import InputError
from meshwright.policy.collective import ALGORITHMS, build_algorithm
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.synthesis import compute_steady_loads
from meshwright.spec import catalog
from meshwright.spec.cluster.failed_components import remove_components
from meshwright.spec.cluster.link_graph import (
    GraphLink,
    GraphVertex,
    LinkGraph,
    LinkKind,
    make_duplex_links,
)
from meshwright.spec.cluster.routing_table import RoutingTable

IN_SWITCHES = {"nvls", "nvls_tree", "sharp"}


class Machine(NamedTuple):
    """A network and the GPUs that take part."""

    title: str
    graph: LinkGraph
    gpus: tuple[str, ...] | None = None
    per_node: int | None = None
    regular: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        """The GPU of every rank."""
        return self.gpus or tuple(vertex.name for vertex in self.graph.vertices_of_kind("gpu"))


# NVLinks of 25 GB/s between the GPUs of a DGX-1 with V100: `nvidia-smi topo -m` as NVIDIA's DGX-1
# white paper (WP-08437) draws it.
_DGX1 = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2}
_DGX1 |= {(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2}


def dgx1() -> LinkGraph:
    """Return eight V100 in a hybrid cube mesh, in pairs on PCIe 3 switches below two CPUs."""
    vertices = [GraphVertex(name=f"gpu{rank}", kind="gpu") for rank in range(8)]
    vertices += [GraphVertex(name=f"pcie{index}", kind="pcie-switch") for index in range(4)]
    vertices += [GraphVertex(name=f"cpu{index}", kind="cpu") for index in range(2)]
    links: list[GraphLink] = []
    for (a, b), count in _DGX1.items():
        links += make_duplex_links(f"gpu{a}", f"gpu{b}", "nvlink", 25e9 * count, 0.6e-6)
    for rank in range(8):
        links += make_duplex_links(f"gpu{rank}", f"pcie{rank // 2}", "pcie", 15.75e9, 0.5e-6)
    for index in range(4):
        links += make_duplex_links(f"pcie{index}", f"cpu{index // 2}", "pcie", 15.75e9, 0.5e-6)
    links += make_duplex_links("cpu0", "cpu1", "socket", 6e9)
    return LinkGraph(vertices=tuple(vertices), links=tuple(links))


def only(graph: LinkGraph, kind: LinkKind) -> LinkGraph:
    """Return a graph with links of one kind, where GPUs are no peers through their host."""
    kept = tuple(link for link in graph.links if link.kind == kind)
    return LinkGraph(vertices=graph.vertices, links=kept)


def machines() -> list[Machine]:
    """Return the machines of the comparison."""
    mi300x = only(catalog.get_cluster("azure-nd-mi300x-v5").build_link_graph(1), "xgmi")
    pod = catalog.get_cluster("h100-superpod")
    azure = catalog.get_cluster("azure-nd-h100-v5").build_link_graph(2)
    half = [f"node1.nic{index}" for index in (1, 3, 5, 7)]
    bridged = catalog.get_cluster("a100-pcie-box").build_link_graph(1)
    six = tuple(f"gpu{rank}" for rank in range(6))
    return [
        Machine("NVSwitch node, 8 H100", pod.build_link_graph(1), None, 8, True),
        Machine("xGMI mesh, 8 MI300X", mi300x, None, 8, True),
        Machine("2 rail-optimised nodes", pod.build_link_graph(2), None, 8, True),
        Machine("4 rail-optimised nodes", pod.build_link_graph(4), None, 8, True),
        Machine("DGX-1, 8 V100", dgx1(), None, 8, True),
        Machine("DGX-1, 6 of 8 V100", dgx1(), six, 6),
        Machine("xGMI mesh, one link failed", remove_components(mi300x, ["gpu0~gpu1"]), None, 8),
        Machine("2 nodes with 8 and 4 cards", remove_components(azure, half), None, 8),
        Machine(
            "2 nodes, a rail down",
            remove_components(pod.build_link_graph(2), ["leaf0.rail3"]),
            None,
            8,
        ),
        Machine(
            "4 nodes, a rail down",
            remove_components(pod.build_link_graph(4), ["leaf0.rail3"]),
            None,
            8,
        ),
        Machine("8 A100 PCIe bridged in pairs", bridged, None, 8),
    ]


class Rival(NamedTuple):
    """The best that the library has for a machine."""

    name: str
    rate_bytes_per_s: float
    collective: Collective


def rival(machine: Machine, op: CollectiveOp) -> Rival:
    """Return the library's algorithm with the highest steady rate."""
    found = []
    for name, collective in _candidates(machine, op):
        loads = compute_steady_loads(machine.graph, collective, machine.members)
        found.append(Rival(name, loads.rate_bytes_per_s, collective))
    return max(found, key=lambda one: one.rate_bytes_per_s)


def _candidates(machine: Machine, op: CollectiveOp) -> Iterator[tuple[str, Collective]]:
    ranks = len(machine.members)
    for algorithm in ALGORITHMS:
        if op not in algorithm.ops or algorithm.name in IN_SWITCHES:
            continue
        for channels in (1, 2, 4, 8):
            try:
                collective = build_algorithm(
                    algorithm.name, op, ranks, per_node=machine.per_node, channels=channels
                )
            except InputError:
                continue  # needs pods, or another number of ranks
            yield f"{algorithm.name}, {channels} channels", collective
    for rings in _ring_sets(machine) if ranks <= 8 else ():
        for count in range(1, len(rings) + 1):
            both = [*rings[:count], *(ring[::-1] for ring in rings[:count])]
            collective = build_algorithm("ring", op, ranks, channels=len(both), orders=both)
            yield f"ring, {len(both)} searched", collective


def _ring_sets(machine: Machine) -> list[list[tuple[int, ...]]]:
    """Return sets of up to six rings, for rings of several widths and two tastes."""
    ways = RoutingTable(machine.graph, machine.members)
    legs = {pair: ways.find_direct_path(*pair) for pair in permutations(range(ways.gpus), 2)}
    widths = {
        pair: 0.0 if leg is None else leg.bottleneck_bytes_per_s for pair, leg in legs.items()
    }
    steps = {width / part for width in widths.values() if width for part in (1, 2)}
    return [_rings(widths, step, taste) for step in sorted(steps) for taste in (-1, 1)]


def _rings(widths: dict[tuple[int, int], float], step: float, taste: int) -> list[tuple[int, ...]]:
    """Return rings, each the widest over what those before it left.

    Of equally wide ones, a taste of 1 takes those over the fullest links, -1 over the emptiest.
    """
    left = dict(widths)
    ranks = range(1 + max(a for a, _ in widths))
    found: list[tuple[int, ...]] = []

    def hops(order: tuple[int, ...]) -> list[float]:
        around = zip(order, (*order[1:], order[0]), strict=True)
        return [min(left[a, b], left[b, a]) for a, b in around]

    def worth(order: tuple[int, ...]) -> tuple[float, float]:
        rates = hops(order)
        return min(rates), taste * sum(rates)

    for _ in range(6):
        ring = max(((0, *rest) for rest in permutations(ranks[1:])), key=worth)
        if found and min(hops(ring)) < step / 2:
            break
        found.append(ring)
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            left[a, b] -= step
            left[b, a] -= step
    return found
