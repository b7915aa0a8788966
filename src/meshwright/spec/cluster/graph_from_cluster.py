"""Draw the nodes of a regular cluster as a `LinkGraph`.

It knows the parts of a cluster and how they are usually wired: GPUs and the network cards nearest
to them share a PCIe switch below a CPU socket. Switches of one layer and group are one vertex, and
a link carries what all its wires carry together.
"""

from collections.abc import Iterator
from math import gcd

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster.cluster_components import Fabric, Host, Nics, ScaleUpDomain, SwitchTier
from meshwright.spec.cluster.link_graph import (
    GraphLink,
    GraphVertex,
    LinkGraph,
    LinkKind,
    make_duplex_links,
)

MAX_GPUS = 4096
"""Above this a graph is too large to draw or to search in Python."""


def build_link_graph(
    nodes: int,
    gpus_per_node: int,
    *,
    scale_up: ScaleUpDomain,
    host: Host,
    nics: Nics | None,
    fabric: Fabric,
) -> LinkGraph:
    """Return the graph of `nodes` nodes; ranks are `gpu0`, `gpu1` and so on over all nodes."""
    gpus = nodes * gpus_per_node
    if gpus > MAX_GPUS:
        most = max(1, MAX_GPUS // gpus_per_node)
        raise InputError(
            [Problem("nodes", f"{nodes} nodes are {gpus} GPUs, too many", f"use {most} or fewer")]
        )
    if scale_up.kind == "shared-memory":
        # Ranks on CPU cores meet in memory: the way through the host is their link.
        host = msgspec.structs.replace(
            host,
            gpu_bytes_per_s=scale_up.effective_pair_bytes_per_s,
            latency_s=scale_up.latency_s / 2,
        )
    drawing = _Drawing()
    for node in range(nodes):
        drawing.node(node, gpus_per_node, host, nics)
    if scale_up.kind in ("nvlink", "xgmi"):
        drawing.domains(gpus, scale_up)
    if nics is not None:
        drawing.fabric(nodes, nics, fabric)
    return LinkGraph(vertices=tuple(drawing.vertices), links=tuple(drawing.links))


class _Drawing:
    """The vertices and links drawn so far."""

    def __init__(self) -> None:
        self.vertices: list[GraphVertex] = []
        self.links: list[GraphLink] = []

    def node(self, node: int, gpus: int, host: Host, nics: Nics | None) -> None:
        place = f"node{node}"
        sockets = [f"{place}.cpu{index}" for index in range(host.sockets)]
        self.vertices += [GraphVertex(name=name, kind="cpu", node=place) for name in sockets]
        across = host.socket_bytes_per_s or host.gpu_bytes_per_s
        for index, cpu in enumerate(sockets):
            for other in sockets[index + 1 :]:
                self.links += make_duplex_links(cpu, other, "socket", across)
        # As many switches as GPUs and cards can share evenly: 8 for 8 and 32, 4 for 8 and 4.
        groups = gpus if nics is None else gcd(gpus, nics.per_node)
        share = gpus // groups
        to_host: LinkKind = "c2c" if host.link == "c2c" else "pcie"
        for group in range(groups):
            switch = f"{place}.pcie{group}"
            cpu = sockets[group * host.sockets // groups]
            self.vertices.append(GraphVertex(name=switch, kind="pcie-switch", node=place))
            rate, half = host.gpu_bytes_per_s, host.latency_s / 2
            self.links += make_duplex_links(switch, cpu, to_host, share * rate, half)
            for index in range(group * share, (group + 1) * share):
                gpu = f"gpu{node * gpus + index}"
                self.vertices.append(GraphVertex(name=gpu, kind="gpu", node=place))
                self.links += make_duplex_links(gpu, switch, to_host, rate, half)
            if nics is not None:
                cards = nics.per_node // groups
                # The card's latency runs from GPU memory, so the PCIe hop is part of it.
                rest = max(0.0, nics.latency_s / 2 - half)
                for index in range(group * cards, (group + 1) * cards):
                    nic = f"{place}.nic{index}"
                    self.vertices.append(GraphVertex(name=nic, kind="nic", node=place))
                    self.links += make_duplex_links(switch, nic, "pcie", nics.nic_bytes_per_s, rest)

    def domains(self, gpus: int, scale_up: ScaleUpDomain) -> None:
        kind: LinkKind = "xgmi" if scale_up.kind == "xgmi" else "nvlink"
        for domain, first in enumerate(range(0, gpus, scale_up.gpus)):
            members = [f"gpu{rank}" for rank in range(first, min(first + scale_up.gpus, gpus))]
            if scale_up.switched:
                switch = f"nvswitch{domain}"
                rate, half = scale_up.gpu_bytes_per_s, scale_up.latency_s / 2
                self.vertices.append(GraphVertex(name=switch, kind="nvswitch"))
                for gpu in members:
                    self.links += make_duplex_links(gpu, switch, kind, rate, half)
                continue
            for index, gpu in enumerate(members):
                for other in members[index + 1 :]:
                    self.links += make_duplex_links(
                        gpu, other, kind, scale_up.effective_pair_bytes_per_s, scale_up.latency_s
                    )

    def fabric(self, nodes: int, nics: Nics, fabric: Fabric) -> None:
        first = fabric.tiers[0]
        rails = nics.rail_count if fabric.rail_optimised else 1
        card_rate = nics.nic_bytes_per_s / first.oversubscription
        beneath: list[tuple[str, int]] = []
        for leaf, start, cards in _leaves(nodes, nics, first, rails):
            self.vertices.append(GraphVertex(name=leaf, kind="switch", label=first.name))
            beneath.append((leaf, start))
            for card in cards:
                self.links += make_duplex_links(
                    card, leaf, "network", card_rate, first.latency_s / 2
                )
        node_rate = nics.per_node * card_rate / rails
        below = first
        for tier in fabric.tiers[1:]:
            node_rate /= tier.oversubscription
            beneath = self._layer(nodes, tier, below, beneath, node_rate)
            node_rate, rails, below = node_rate * rails, 1, tier

    def _layer(
        self,
        nodes: int,
        tier: SwitchTier,
        below: SwitchTier,
        beneath: list[tuple[str, int]],
        node_rate: float,
    ) -> list[tuple[str, int]]:
        """Draw one layer above `beneath` (switches with their first node); return its switches."""
        size = tier.nodes or nodes
        above: dict[str, int] = {}
        for switch, start in beneath:
            name = f"{tier.name}{start // size}"
            if name not in above:
                above[name] = start // size * size
                self.vertices.append(GraphVertex(name=name, kind="switch", label=tier.name))
            covered = min(below.nodes or nodes, nodes - start)
            self.links += make_duplex_links(
                switch, name, "network", node_rate * covered, tier.latency_s / 2
            )
        return list(above.items())


def _leaves(
    nodes: int, nics: Nics, tier: SwitchTier, rails: int
) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each switch of the first layer, its first node, and the cards that end in it."""
    size = tier.nodes or nodes
    share = nics.per_node // rails
    for group, start in enumerate(range(0, nodes, size)):
        places = range(start, min(start + size, nodes))
        for rail in range(rails):
            ports = range(rail * share, (rail + 1) * share)
            name = f"{tier.name}{group}" + (f".rail{rail}" if rails > 1 else "")
            yield name, start, [f"node{n}.nic{k}" for n in places for k in ports]
