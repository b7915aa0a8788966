"""`Cluster`: devices, nodes and the links between them. It knows no model and no layout.

Ranks count GPUs node by node, and nodes domain by domain, so the distance between two ranks
follows from their numbers alone.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster.cluster_components import Fabric, Host, Nics, ScaleUpDomain, Storage
from meshwright.spec.cluster.gpu import Gpu, SpecSource
from meshwright.spec.cluster.graph_from_cluster import build_link_graph
from meshwright.spec.cluster.link_graph import LinkGraph
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.name_suggestions import build_unknown_name_problem

SAME = "same"
SCALE_UP = "scale-up"
HOST = "host"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of equal nodes with GPUs, the links inside and between them, and what they cost."""

    name: str
    """Catalog name, lower case with dashes."""
    title: str
    """Name for people."""
    gpu: Gpu
    """The device in every node."""
    nodes: int
    """Nodes of the cluster."""
    max_nodes: int | None = None
    """Nodes up to which the description holds; None has no limit."""
    gpus_per_node: int = 8
    """GPUs one operating system sees."""
    scale_up: ScaleUpDomain
    """The fast links between GPUs."""
    host: Host
    """CPU, host memory and the GPUs' links to them."""
    nics: Nics | None = None
    """Network cards of a node; None where it has none."""
    fabric: Fabric = Fabric(kind="none")
    """The network between nodes."""
    storage: Storage | None = None
    """Where checkpoints and data live; None where nothing is known."""
    price_per_gpu_hour: float | None = None
    """US dollars for one GPU and hour."""
    failures_per_gpu_hour: float | None = None
    """Interruptions of a job for one GPU and hour."""
    aliases: tuple[str, ...] = ()
    """Other names that people use for it."""
    sources: tuple[SpecSource, ...] = ()
    """Where the figures were read."""
    notes: str = ""
    """What a user of the figures must know."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(name=self.name, title=self.title)
        bounds.count(nodes=self.nodes, max_nodes=self.max_nodes, gpus_per_node=self.gpus_per_node)
        bounds.not_negative(
            price_per_gpu_hour=self.price_per_gpu_hour,
            failures_per_gpu_hour=self.failures_per_gpu_hour,
        )
        parts = {"scale_up": self.scale_up, "nics": self.nics, "fabric": self.fabric}
        bounds.mark_unreadable(gpu=self.gpu, host=self.host, sources=self.sources, **parts)
        if bounds.is_valid("nodes", "gpus_per_node", *parts):
            self._check_network(bounds)
        if bounds.is_valid("gpus_per_node", "scale_up"):
            self._check_domain(bounds)
        if bounds.is_valid("nodes", "max_nodes"):
            self._check_limit(bounds)
        if bounds.is_valid("sources"):
            self._check_sources(bounds)
        bounds.raise_problems()

    def _check_domain(self, bounds: FieldChecker) -> None:
        node, domain = self.gpus_per_node, self.scale_up.gpus
        if domain % node and node % domain:
            bounds.add(
                "scale_up.gpus",
                f"a domain of {domain} GPUs does not line up with nodes of {node}",
                f"use a divisor or a multiple of {node}",
            )

    def _check_limit(self, bounds: FieldChecker) -> None:
        if self.max_nodes is not None and self.nodes > self.max_nodes:
            bounds.add(
                "nodes",
                f"{self.nodes} is more than max_nodes ({self.max_nodes})",
                f"use {self.max_nodes} or fewer",
            )

    def _check_sources(self, bounds: FieldChecker) -> None:
        for source in self.sources:
            for field in source.fields:
                if field.partition(".")[0] not in self.__struct_fields__:
                    known = self.__struct_fields__
                    bounds.problems.append(
                        build_unknown_name_problem("field", field, known, "sources")
                    )

    def _check_network(self, bounds: FieldChecker) -> None:
        linked = self.nodes * self.gpus_per_node <= self.scale_up.gpus
        if self.nodes > 1 and not linked and self.nics is None:
            bounds.add("nics", f"{self.nodes} nodes have no NIC", "add nics and a fabric")
        if self.nics is not None and self.fabric.kind == "none":
            bounds.add("fabric.kind", "there are NICs but no fabric", "say what it is")
        if self.nics is None and self.fabric.kind != "none":
            bounds.add("nics", f"an {self.fabric.kind} fabric needs NICs", "add nics")
        top = self.fabric.tiers[-1].nodes if self.fabric.tiers else None
        if top is not None and self.nodes > top:
            bounds.add(
                f"fabric.tiers[{len(self.fabric.tiers) - 1}].nodes",
                f"the top layer joins {top} nodes, the cluster has {self.nodes}",
                "leave it out or raise it",
            )

    @property
    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def nic_bytes_per_s_per_gpu(self) -> float:
        """Each GPU's share of its node's network cards; 0 where there are none."""
        if self.nics is None:
            return 0.0
        return self.nics.per_node * self.nics.nic_bytes_per_s / self.gpus_per_node

    def with_gpus(self, gpus: int) -> "Cluster":
        """Return the same cluster with just enough nodes for `gpus`.

        Nodes stay whole, so the result may have more GPUs than asked for: 2047 in nodes of 8 are
        2048.
        """
        most = None if self.max_nodes is None else self.max_nodes * self.gpus_per_node
        if gpus < 1 or (most is not None and gpus > most):
            fix = "use 1 or more" if most is None else f"use 1 to {most}"
            raise InputError([Problem("gpus", f"{self.name} cannot have {gpus} GPUs", fix)])
        return msgspec.structs.replace(self, nodes=-(-gpus // self.gpus_per_node))

    def node_of(self, rank: int) -> int:
        """Return the node that holds a GPU."""
        return self._checked(rank) // self.gpus_per_node

    def domain_of(self, rank: int) -> int:
        """Return the scale-up domain that holds a GPU."""
        return self._checked(rank) // self.scale_up.gpus

    def rail_of(self, rank: int) -> int:
        """Return the rail of a GPU's network card; 0 where there is none."""
        rails = 1 if self.nics is None else self.nics.rail_count
        return self._checked(rank) % self.gpus_per_node * rails // self.gpus_per_node

    def tier_between(self, a: int, b: int) -> str:
        """Name what joins two GPUs: `same`, `scale-up`, `host`, or a layer of the fabric."""
        level = self._level(a, b)
        return level if isinstance(level, str) else self.fabric.tiers[level].name

    def bandwidth_between(self, a: int, b: int) -> float:
        """Return bytes per second from one GPU to another, per direction.

        Inside a domain a pair has the links to itself. Across nodes it is the share each GPU
        has when all GPUs of the cluster send at once: its part of the network cards, divided by
        every oversubscription on the way up.
        """
        level = self._level(a, b)
        if level == SAME:
            return self.gpu.memory_bytes_per_s
        if level == SCALE_UP:
            return self.scale_up.effective_pair_bytes_per_s
        if isinstance(level, str):
            return self._host_rate(a, b)
        # Data leaves over the GPU's own link to the host side, where the cards are.
        rate = min(self.nic_bytes_per_s_per_gpu, self.host.gpu_bytes_per_s)
        for tier in self.fabric.tiers[: level + 1]:
            rate /= tier.oversubscription
        return rate

    def latency_between(self, a: int, b: int) -> float:
        """Return the seconds that an empty message takes from one GPU to another."""
        level = self._level(a, b)
        if level == SAME:
            return 0.0
        if level == SCALE_UP:
            return self.scale_up.latency_s
        if isinstance(level, str) or self.nics is None:
            return 2 * self.host.latency_s
        switches = sum(tier.latency_s for tier in self.fabric.tiers[: level + 1])
        relay = self.scale_up.latency_s if self._relays(a, b) else 0.0
        return self.nics.latency_s + switches + relay

    def hops_between(self, a: int, b: int) -> int:
        """Return how many switches (CPU sockets, on the way through the host) a message crosses."""
        level = self._level(a, b)
        if level == SAME:
            return 0
        if level == SCALE_UP:
            return int(self.scale_up.switched)
        if isinstance(level, str):
            return 1 + int(self._socket(a) != self._socket(b))
        # Up through the layers and down again; a relayed message first changes its rail.
        return 2 * level + 1 + (int(self.scale_up.switched) if self._relays(a, b) else 0)

    def build_link_graph(self, nodes: int | None = None) -> LinkGraph:
        """Draw the first `nodes` nodes (all, where None) as vertices and links."""
        shown = self.nodes if nodes is None else nodes
        if not 1 <= shown <= self.nodes:
            raise InputError(
                [Problem("nodes", f"{self.name} has no {nodes} nodes", f"use 1 to {self.nodes}")]
            )
        return build_link_graph(
            shown,
            self.gpus_per_node,
            scale_up=self.scale_up,
            host=self.host,
            nics=self.nics,
            fabric=self.fabric,
        )

    def _level(self, a: int, b: int) -> str | int:
        if self._checked(a) == self._checked(b):
            return SAME
        if a // self.scale_up.gpus == b // self.scale_up.gpus:
            return SCALE_UP
        node_a, node_b = a // self.gpus_per_node, b // self.gpus_per_node
        if node_a == node_b:
            return HOST
        level = self._meeting_tier(node_a, node_b)
        if self._rails_differ(a, b) and not self._relays(a, b):
            # No fast link to the card on the right rail: the message climbs to where rails meet.
            level = min(level + 1, len(self.fabric.tiers) - 1)
        return level

    def _meeting_tier(self, node_a: int, node_b: int) -> int:
        for index, tier in enumerate(self.fabric.tiers):
            if tier.nodes is None or node_a // tier.nodes == node_b // tier.nodes:
                return index
        raise AssertionError("a cluster's top layer joins all its nodes")

    def _rails_differ(self, a: int, b: int) -> bool:
        return self.fabric.rail_optimised and self.rail_of(a) != self.rail_of(b)

    def _relays(self, a: int, b: int) -> bool:
        # NCCL calls it PXN: a neighbour in the domain that owns the right card passes data on.
        return self._rails_differ(a, b) and self.scale_up.gpus >= self.gpus_per_node

    def _socket(self, rank: int) -> int:
        return rank % self.gpus_per_node * self.host.sockets // self.gpus_per_node

    def _host_rate(self, a: int, b: int) -> float:
        across = self.host.socket_bytes_per_s
        if across is None or self._socket(a) == self._socket(b):
            return self.host.gpu_bytes_per_s
        return min(self.host.gpu_bytes_per_s, across)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.gpus:
            raise InputError(
                [Problem("rank", f"{self.name} has no rank {rank}", f"use 0 to {self.gpus - 1}")]
            )
        return rank
