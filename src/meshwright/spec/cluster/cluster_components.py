"""The parts of a `Cluster`: scale-up domain, host, network cards, fabric, storage.

Each is a plain value that checks itself. Bandwidths are per direction and at wire speed: what
software gets out of a link is a calibration, not a description.
"""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker

ScaleUpKind = Literal["nvlink", "xgmi", "pcie", "shared-memory"]
FabricKind = Literal["infiniband", "roce", "efa", "omnipath", "slingshot", "ethernet", "none"]


class ScaleUpDomain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fast links between GPUs: a set of `gpus` that reach each other without a network card."""

    kind: ScaleUpKind
    """What the links are."""
    gpus: int
    """GPUs in one domain; more than a node holds where the links leave the box (NVL72)."""
    gpu_bytes_per_s: float
    """What one GPU can send into the domain, all its links together."""
    pair_bytes_per_s: float | None = None
    """What one pair can exchange where the links are a mesh; None: a pair gets all of it."""
    latency_s: float
    """One hop between two GPUs of the domain."""
    switched: bool = False
    """Whether a switch joins the GPUs (NVSwitch) rather than direct links."""
    in_network_reduction: bool = False
    """Whether the switch can add up what passes through it (NVLink SHARP)."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("kind", self.kind, get_args(ScaleUpKind))
        bounds.count(gpus=self.gpus)
        bounds.positive(
            gpu_bytes_per_s=self.gpu_bytes_per_s, pair_bytes_per_s=self.pair_bytes_per_s
        )
        bounds.not_negative(latency_s=self.latency_s)
        rates = bounds.is_valid("gpu_bytes_per_s", "pair_bytes_per_s")
        if rates and self.effective_pair_bytes_per_s > self.gpu_bytes_per_s:
            bounds.add(
                "pair_bytes_per_s",
                f"{self.effective_pair_bytes_per_s:g} is more than one GPU's links carry "
                f"({self.gpu_bytes_per_s:g})",
                f"use {self.gpu_bytes_per_s:g} or less",
            )
        bounds.mark_unreadable(
            in_network_reduction=self.in_network_reduction, switched=self.switched
        )
        reduces = bounds.is_valid("in_network_reduction", "switched") and self.in_network_reduction
        if reduces and not self.switched:
            bounds.add(
                "in_network_reduction", "needs a switch in the domain", "set switched = true"
            )
        bounds.raise_problems()

    @property
    def effective_pair_bytes_per_s(self) -> float:
        """What one GPU can send to one other, in bytes per second."""
        return self.gpu_bytes_per_s if self.pair_bytes_per_s is None else self.pair_bytes_per_s


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The CPU side of one node, and each GPU's link to it."""

    link: str = "pcie"
    """What joins GPU and CPU: pcie4, pcie5, c2c."""
    gpu_bytes_per_s: float
    """One GPU's link to the host."""
    latency_s: float
    """One hop over that link."""
    sockets: int = 2
    """CPU sockets of a node; GPUs are spread over them in order."""
    socket_bytes_per_s: float | None = None
    """What crosses from one socket to the other; None leaves it out of account."""
    memory_bytes: int | None = None
    """Host memory of a node."""
    memory_bytes_per_s: float | None = None
    """Bandwidth of the host memory of a node."""
    cores: int | None = None
    """CPU cores of a node."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(link=self.link)
        bounds.positive(
            gpu_bytes_per_s=self.gpu_bytes_per_s,
            socket_bytes_per_s=self.socket_bytes_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
        )
        bounds.not_negative(latency_s=self.latency_s)
        bounds.count(sockets=self.sockets, memory_bytes=self.memory_bytes, cores=self.cores)
        bounds.raise_problems()


class Nics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network cards of one node that carry traffic between GPUs."""

    per_node: int
    """Cards (ports) of a node."""
    nic_bytes_per_s: float
    """Wire speed of one card."""
    latency_s: float
    """From a GPU's memory on one node to a GPU's memory on another, without the switches."""
    rails: int | None = None
    """Groups of cards that each have their own leaf switches; None is one rail per card."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(per_node=self.per_node, rails=self.rails)
        bounds.positive(nic_bytes_per_s=self.nic_bytes_per_s)
        bounds.not_negative(latency_s=self.latency_s)
        if bounds.is_valid("per_node", "rails") and self.per_node % (self.rails or 1):
            bounds.add(
                "rails",
                f"{self.rails} rails do not share {self.per_node} NICs evenly",
                "use a divisor of per_node",
            )
        bounds.raise_problems()

    @property
    def rail_count(self) -> int:
        """Rails of a node."""
        return self.rails or self.per_node


class SwitchTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer of switches, counted from the nodes up."""

    name: str
    """What people call the layer: leaf, spine, core."""
    nodes: int | None = None
    """Nodes that meet in one group of this layer; None on the top one means all."""
    oversubscription: float = 1.0
    """How many times less bandwidth a node has up to this layer than to the one below."""
    latency_s: float = 0.0
    """What crossing the layer adds to a message, both ways through the layer below included."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(name=self.name)
        bounds.count(nodes=self.nodes)
        bounds.positive(oversubscription=self.oversubscription)
        if bounds.is_valid("oversubscription") and self.oversubscription < 1:
            bounds.add(
                "oversubscription",
                f"{self.oversubscription:g} is below 1",
                "write 7 where a layer offers one seventh",
            )
        bounds.not_negative(latency_s=self.latency_s)
        bounds.raise_problems()


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes: what it is and its layers of switches."""

    kind: FabricKind
    """What protocol it speaks; `none` is a box that stands alone."""
    tiers: tuple[SwitchTier, ...] = ()
    """Layers of switches from the nodes up."""
    rail_optimised: bool = False
    """Whether a leaf joins the same rail of many nodes rather than all rails of few."""
    in_network_reduction: bool = False
    """Whether the switches can add up what passes through them (SHARP)."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("kind", self.kind, get_args(FabricKind))
        bounds.mark_unreadable(tiers=self.tiers)
        if bounds.is_valid("kind", "tiers"):
            if self.kind == "none" and self.tiers:
                bounds.add("tiers", "a fabric of kind none has no switches", "leave tiers out")
            if self.kind != "none" and not self.tiers:
                bounds.add("tiers", f"an {self.kind} fabric has no layer", "give at least one tier")
        if bounds.is_valid("tiers"):
            self._check_tiers(bounds)
        bounds.raise_problems()

    def _check_tiers(self, bounds: FieldChecker) -> None:
        beneath = 0
        for index, tier in enumerate(self.tiers):
            last = index == len(self.tiers) - 1
            if tier.nodes is None and not last:
                what = "only the top layer may leave it out"
                bounds.add(f"tiers[{index}].nodes", what, "say how many nodes meet in this layer")
            elif tier.nodes is not None:
                if tier.nodes <= beneath or (beneath and tier.nodes % beneath):
                    bounds.add(
                        f"tiers[{index}].nodes",
                        f"{tier.nodes} is no larger multiple of the {beneath} of the layer below",
                        f"use {2 * beneath}, {3 * beneath} and so on",
                    )
                beneath = tier.nodes
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            what = f"two layers share a name: {', '.join(names)}"
            bounds.add("tiers", what, "call them leaf, spine and core")


class Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where checkpoints and data live."""

    kind: str
    """What it is: lustre, nfs, nvme, s3."""
    read_bytes_per_s: float
    """All nodes together."""
    write_bytes_per_s: float
    """All nodes together."""
    node_read_bytes_per_s: float | None = None
    """One node alone; None: as much as all together."""
    node_write_bytes_per_s: float | None = None
    """One node alone; None: as much as all together."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(kind=self.kind)
        bounds.positive(
            read_bytes_per_s=self.read_bytes_per_s,
            write_bytes_per_s=self.write_bytes_per_s,
            node_read_bytes_per_s=self.node_read_bytes_per_s,
            node_write_bytes_per_s=self.node_write_bytes_per_s,
        )
        bounds.raise_problems()
