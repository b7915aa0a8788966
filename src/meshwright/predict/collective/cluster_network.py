"""A `Cluster` as a `SimNetwork`: links and ways by arithmetic, so that 4,096 GPUs take no search.

The links are those of `spec.cluster.graph_from_cluster`, with two of them in a row that no other
way joins (PCIe switch to network card, card to leaf) taken as one. On rail-optimised fabrics a
message to another rail first crosses the scale-up links to the GPU on that rail, as NCCL's PXN
does. Ways are those of `spec.cluster.routing_table`, but for two things that arithmetic does not
ask: a GPU on that rail is taken to pass data on whether it takes part or not, and several cards of
one GPU are one.
"""

from math import gcd
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.policy.collective.algorithms.in_network import FABRIC
from meshwright.predict.collective.sim_network import (
    NO_LINK,
    CollectiveCall,
    Floats,
    Longs,
    RouteTable,
    SimNetwork,
)
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import build_placement, count_domain_gpus
from meshwright.predict.network.wire_bound import bound_s_per_byte
from meshwright.spec.cluster import Cluster


def build_cluster_network(cluster: Cluster) -> SimNetwork:
    """Return the links of a cluster and the ways between its GPUs and switches."""
    return _Wires(cluster).network()


class _Block(NamedTuple):
    """Links of one kind: their numbers follow each other."""

    first: int
    size: int
    rate: Floats
    latency_s: float
    source: str
    target: str
    """Names, as patterns of the index in the block and what follows from it."""


class _Wires:
    """Numbers the links of a cluster; every block of them has a rate, a latency and names."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node, self.gpus = cluster.gpus_per_node, cluster.gpus
        self.domain = cluster.scale_up.gpus
        self.blocks: list[_Block] = []
        host, nics = cluster.host, cluster.nics
        if cluster.scale_up.kind == "shared-memory":
            self.host_rate, self.host_s = (
                cluster.scale_up.effective_pair_bytes_per_s,
                cluster.scale_up.latency_s / 2,
            )
        else:
            self.host_rate, self.host_s = host.gpu_bytes_per_s, host.latency_s
        # As `graph_from_cluster`: as many PCIe switches as GPUs and cards can share evenly.
        self.groups = self.node if nics is None else gcd(self.node, nics.per_node)
        self.linked = cluster.scale_up.kind in ("nvlink", "xgmi")
        self.meshed = self.linked and not cluster.scale_up.switched
        self._scale_up()
        self._host()
        if nics is not None:
            self._fabric()

    def _add(
        self, size: int, rate: float | Floats, latency_s: float, source: str, target: str
    ) -> int:
        first = self.blocks[-1].first + self.blocks[-1].size if self.blocks else 0
        rates = np.broadcast_to(np.asarray(rate, dtype=np.float64), size)
        self.blocks.append(_Block(first, size, rates, latency_s, source, target))
        return first

    def _scale_up(self) -> None:
        scale_up = self.cluster.scale_up
        if not self.linked:
            return
        half = scale_up.latency_s / 2
        rate = scale_up.gpu_bytes_per_s
        hub = "links{domain}" if self.meshed else "nvswitch{domain}"
        self.port_out = self._add(self.gpus, rate, half, "gpu{i}", hub)
        self.port_in = self._add(self.gpus, rate, half, hub, "gpu{i}")
        if self.meshed:
            pairs = self.gpus * self.domain
            self.pair = self._add(
                pairs, scale_up.effective_pair_bytes_per_s, 0.0, "gpu{a}", "gpu{b}"
            )

    def _host(self) -> None:
        host, nodes = self.cluster.host, self.cluster.nodes
        switches, share = nodes * self.groups, self.node // self.groups
        half = self.host_s / 2
        self.pcie_out = self._add(self.gpus, self.host_rate, half, "gpu{i}", "{pcie}")
        self.pcie_in = self._add(self.gpus, self.host_rate, half, "{pcie}", "gpu{i}")
        up = share * self.host_rate
        self.cpu_up = self._add(switches, up, half, "{switch}", "{cpu}")
        self.cpu_down = self._add(switches, up, half, "{cpu}", "{switch}")
        across = host.socket_bytes_per_s or self.host_rate
        pairs = nodes * host.sockets * host.sockets
        self.socket = self._add(pairs, across, 0.0, "{cpu_a}", "{cpu_b}")

    def _fabric(self) -> None:
        cluster, nics = self.cluster, self.cluster.nics
        assert nics is not None
        tiers, nodes = cluster.fabric.tiers, cluster.nodes
        # Several cards of one GPU act as one; several GPUs may share a card.
        self.cards = min(nics.per_node, self.node)
        together = nics.per_node // self.cards
        rails = min(nics.rail_count, self.cards) if cluster.fabric.rail_optimised else 1
        self.rails = rails
        card_rate = nics.nic_bytes_per_s * together / tiers[0].oversubscription
        rest = max(0.0, nics.latency_s / 2 - self.cluster.host.latency_s / 2)
        half = rest + tiers[0].latency_s / 2
        self.card_up = self._add(nodes * self.cards, card_rate, half, "{card}", "{leaf}")
        self.card_down = self._add(nodes * self.cards, card_rate, half, "{leaf}", "{card}")
        self.tier_up: list[int] = []
        self.tier_down: list[int] = []
        node_rate = self.cards * card_rate / rails
        for level in range(1, len(tiers)):
            node_rate /= tiers[level].oversubscription
            below = tiers[level - 1].nodes or nodes
            blocks = -(-nodes // below)
            covered = np.minimum(below, nodes - np.arange(blocks) * below)
            rates = np.repeat(node_rate * covered, rails if level == 1 else 1)
            here, above = "{tier" + str(level - 1) + "}", "{above" + str(level - 1) + "}"
            half = tiers[level].latency_s / 2
            self.tier_up.append(self._add(len(rates), rates, half, here, above))
            self.tier_down.append(self._add(len(rates), rates, half, above, here))
            if level == 1:
                node_rate *= rails

    def network(self) -> SimNetwork:
        """Return the finished value."""
        cluster = self.cluster
        unit = count_domain_gpus(cluster)
        domains = -(-self.gpus // self.domain) if self.linked and not self.meshed else 0
        switches = [f"nvswitch{index}" for index in range(domains)]
        units = [np.arange(self.gpus) // unit, np.arange(domains) * self.domain // unit]
        if cluster.nics is not None:
            switches.append(FABRIC)
            units.append(np.array([-1]))
        return SimNetwork(
            name=cluster.name,
            gpus=self.gpus,
            switches=switches,
            domains=np.concatenate(units),
            link_bytes_per_s=np.concatenate([block.rate for block in self.blocks]),
            latency_s=np.repeat(
                [block.latency_s for block in self.blocks], [block.size for block in self.blocks]
            ),
            link_name=self.link_name,
            routes=self.routes,
            bound_s=self.bound_s,
        )

    def bound_s(self, ask: CollectiveCall) -> float:
        """Return the least time by the closed form of `predict.network`."""
        known = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")
        if ask.op not in known:
            return 0.0
        op: NcclOp = ask.op  # type: ignore[assignment]
        place = build_placement(self.cluster, ask.members, sharers=1)
        if not ask.reduces:
            links = replace(place.links, has_in_network_switch=False, has_in_network_fabric=False)
            place = replace(place, links=links)
        return ask.nbytes * bound_s_per_byte(op, place)

    def link_name(self, link: int) -> str:
        """Return what a link joins."""
        block = next(block for block in self.blocks if link < block.first + block.size)
        words = self._words(link - block.first, block)
        return f"{block.source.format(**words)}→{block.target.format(**words)}"

    def _words(self, index: int, block: _Block) -> dict[str, str | int]:
        """Return what the names of a link may refer to."""
        host, domain = self.cluster.host, self.domain
        node, local = divmod(index, self.node)
        group_node, group = divmod(index, self.groups)
        words: dict[str, str | int] = {
            "i": index,
            "domain": index // domain,
            "a": index // domain,
            "b": index // domain // domain * domain + index % domain,
            "pcie": f"node{node}.pcie{local * self.groups // self.node}",
            "switch": f"node{group_node}.pcie{group}",
            "cpu": f"node{group_node}.cpu{group * host.sockets // self.groups}",
            "cpu_a": f"node{index // host.sockets**2}.cpu{index // host.sockets % host.sockets}",
            "cpu_b": f"node{index // host.sockets**2}.cpu{index % host.sockets}",
        }
        if self.cluster.nics is not None and "{card}" in (block.source, block.target):
            card_node, card = divmod(index, self.cards)
            together = self.cluster.nics.per_node // self.cards
            last = f"-{(card + 1) * together - 1}" if together > 1 else ""
            words["card"] = f"node{card_node}.nic{card * together}{last}"
            below = self.cluster.fabric.tiers[0].nodes or self.cluster.nodes
            words["leaf"] = self._switch(0, card_node // below, card * self.rails // self.cards)
        for level, tier in enumerate(self.cluster.fabric.tiers[:-1]):
            rails = self.rails if level == 0 else 1
            place, rail = divmod(index, rails)
            words[f"tier{level}"] = self._switch(level, place, rail)
            above = self.cluster.fabric.tiers[level + 1].nodes or self.cluster.nodes
            first_node = place * (tier.nodes or self.cluster.nodes)
            words[f"above{level}"] = self._switch(level + 1, first_node // above, 0)
        return words

    def _switch(self, level: int, place: int, rail: int) -> str:
        rails = self.rails if level == 0 else 1
        name = f"{self.cluster.fabric.tiers[level].name}{place}"
        return f"{name}.rail{rail}" if rails > 1 else name

    def routes(self, source: Longs, target: Longs) -> RouteTable:
        """Return the links of each way."""
        columns: list[Longs] = []
        gpu_to_gpu = (source < self.gpus) & (target < self.gpus)
        same = source // self.domain == target // self.domain
        near = gpu_to_gpu & same & (source != target) & self.linked
        columns += self._near(source, target, near)
        apart = gpu_to_gpu & (source != target) & ~near
        inside = apart & (source // self.node == target // self.node)
        columns += self._through_host(source, target, inside)
        columns += self._to_switches(source, target)
        if self.cluster.nics is not None:
            columns += self._across(source, target, apart & ~inside)
        if not columns:
            return RouteTable(np.empty((len(source), 0), dtype=np.int64))
        return RouteTable(_compact(np.column_stack(columns)))

    def _near(self, source: Longs, target: Longs, some: np.ndarray) -> list[Longs]:
        if not self.linked or not some.any():
            return []
        found = [_where(some, self.port_out + source), _where(some, self.port_in + target)]
        if self.meshed:
            found.append(_where(some, self.pair + source * self.domain + target % self.domain))
        return found

    def _through_host(self, source: Longs, target: Longs, some: np.ndarray) -> list[Longs]:
        if not some.any():
            return []
        group_a, group_b = (end * self.groups // self.node for end in (source, target))
        climbs = some & (group_a != group_b)
        sockets = self.cluster.host.sockets
        cpu_a, cpu_b = (
            group % self.groups * sockets // self.groups for group in (group_a, group_b)
        )
        crosses = climbs & (cpu_a != cpu_b)
        node = source // self.node
        return [
            _where(some, self.pcie_out + source),
            _where(climbs, self.cpu_up + group_a),
            _where(crosses, self.socket + (node * sockets + cpu_a) * sockets + cpu_b),
            _where(climbs, self.cpu_down + group_b),
            _where(some, self.pcie_in + target),
        ]

    def _to_switches(self, source: Longs, target: Longs) -> list[Longs]:
        """The ways into a switch that holds data and out of it.

        Above the leaf a switch that adds up passes on one sum for all that reached it, so a way to
        the top layer loads the sender's own links only.
        """
        into = (source < self.gpus) & (target >= self.gpus)
        out = (source >= self.gpus) & (target < self.gpus)
        if not (into.any() or out.any()):
            return []
        top = self.gpus + (-(-self.gpus // self.domain) if self.linked and not self.meshed else 0)
        found = []
        if self.linked and not self.meshed:
            found += [
                _where(into & (target < top), self.port_out + source),
                _where(out & (source < top), self.port_in + target),
            ]
        if self.cluster.nics is not None:
            up, down = into & (target >= top), out & (source >= top)
            found += [
                _where(up, self.pcie_out + source),
                _where(up, self.card_up + self._card(source)),
                _where(down, self.card_down + self._card(target)),
                _where(down, self.pcie_in + target),
            ]
        return found

    def _card(self, gpu: Longs) -> Longs:
        return gpu // self.node * self.cards + gpu % self.node * self.cards // self.node

    def _across(self, source: Longs, target: Longs, some: np.ndarray) -> list[Longs]:
        if not some.any():
            return []
        node_a, node_b = source // self.node, target // self.node
        rail_a, rail_b = (end % self.node * self.rails // self.node for end in (source, target))
        differ = some & (rail_a != rail_b)
        relays = differ & (self.domain >= self.node) & self.linked
        # The GPU of the sender's node that has the same place there as the target in its own.
        relay = np.where(relays, node_a * self.node + target % self.node, source)
        found = [
            _where(relays, self.port_out + source) if self.linked else _where(relays, source),
            _where(relays, self.port_in + relay) if self.linked else _where(relays, source),
            _where(some, self.pcie_out + relay),
            _where(some, self.card_up + self._card(relay)),
            _where(some, self.card_down + self._card(target)),
            _where(some, self.pcie_in + target),
        ]
        climbs = differ & ~relays
        rail_out = np.where(relays, rail_b, rail_a)
        beneath = some
        for level, tier in enumerate(self.cluster.fabric.tiers[:-1]):
            size = tier.nodes or self.cluster.nodes
            place_a, place_b = node_a // size, node_b // size
            beneath = beneath & ((place_a != place_b) | (climbs if level == 0 else False))
            if level == 0:
                place_a, place_b = place_a * self.rails + rail_out, place_b * self.rails + rail_b
            found.append(_where(beneath, self.tier_up[level] + place_a))
            found.append(_where(beneath, self.tier_down[level] + place_b))
        return found


def _where(some: np.ndarray, links: Longs) -> Longs:
    return np.where(some, links, NO_LINK)


def _compact(table: Longs) -> Longs:
    """Move the links of every way to the front and drop columns that nobody uses."""
    used = table != NO_LINK
    longest = int(used.sum(axis=1).max(initial=0))
    order = np.argsort(~used, axis=1, kind="stable")[:, :longest]
    return np.take_along_axis(table, order, axis=1)
