"""`Placement`: where the ranks of one group lie, reduced to what a collective's time depends on.

It knows clusters and rank numbers, no collective. A *unit* is a set of GPUs that reach each other
without a network card: a node, or a scale-up domain where that is larger (NVL72). It is what NCCL
counts as one node.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.nccl_constants import parse_sm
from meshwright.spec.cluster import Cluster

IntraDomainLink = Literal["scale-up", "host", "none"]


class ClusterLinks(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What joins the GPUs of a cluster: the figures that do not depend on the group."""

    sm: int
    """Compute capability as NCCL counts it; other makers' devices go by the nearest in date."""
    uses_nccl: bool
    """Whether the device is NVIDIA's, so that NCCL's own choice applies."""
    scale_up: str
    """Kind of the fast links: nvlink, xgmi, pcie, shared-memory."""
    gpu_bytes_per_s: float
    """All fast links of one GPU together."""
    pair_bytes_per_s: float
    """The fast links between one pair."""
    domain_gpus: int
    """GPUs that the fast links join."""
    switched: bool
    """Whether a switch joins them."""
    has_in_network_switch: bool
    """Whether that switch adds up and copies what passes (NVLS)."""
    host_bytes_per_s: float
    """One GPU's link to the host, where the network cards are."""
    fabric: str
    """Kind of the network between units; `none` where there is none."""
    has_in_network_fabric: bool
    """Whether its switches add up what passes (SHARP)."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Where one group of ranks lies on a cluster."""

    links: ClusterLinks
    ranks: int
    """Ranks of the group."""
    domains: int
    """Nodes (or larger scale-up domains) that hold them."""
    ranks_per_domain: int
    """Ranks in the fullest unit."""
    intra_link: IntraDomainLink
    """What joins the ranks of one unit: the fast links, the host, or nothing (one rank each)."""
    nics: int
    """Network cards of a unit that the group's GPUs are nearest to; a GPU's own cards count as
    one."""
    nic_bytes_per_s: float
    """Wire speed of one of them."""
    groups_per_nic: float
    """Groups that use each card at the same time."""
    ring_oversubscription: float
    """How many times less the fabric's upper layers leave for traffic to the next unit."""
    all_to_all_oversubscription: float
    """How many times less they leave for traffic to all units."""
    nic_latency_s: float
    """The least an empty message takes from unit to unit, without the switches."""
    switch_latency_s: float
    """What the switches between the group's units add to it."""

    @property
    def network_slowdown(self) -> float:
        """How many times less of the network the group has than its cards carry alone."""
        return self.groups_per_nic * self.ring_oversubscription


def build_placement(
    cluster: Cluster, ranks: Sequence[int], *, sharers: float | None = None
) -> Placement:
    """Return where `ranks` lie, in the order of their index in the group.

    `sharers` says how many groups use each network card at the same time. Left out, every GPU of
    the nodes is taken to be in such a group, as the ranks of one training step are.
    """
    members = tuple(ranks)
    problems = []
    if not members:
        problems.append(Problem("ranks", "the group is empty", "give at least one rank"))
    if len(set(members)) != len(members):
        problems.append(Problem("ranks", "a rank is named twice", "name each rank once"))
    outside = [rank for rank in members if not 0 <= rank < cluster.gpus]
    if outside:
        what = f"{cluster.name} has no rank {outside[0]}"
        problems.append(Problem("ranks", what, f"use 0 to {cluster.gpus - 1}"))
    problems += _sharers_problems(sharers)
    if problems:
        raise InputError(problems)
    return _counted(cluster, members, sharers)


@lru_cache(maxsize=65536)
def build_strided_placement(
    cluster: Cluster, first: int, size: int, stride: int = 1, *, sharers: float | None = None
) -> Placement:
    """Return where the ranks `first`, `first + stride`, … lie: the groups of a `Layout`."""
    problems = []
    if size < 1 or stride < 1:
        what = f"{size} ranks with a stride of {stride}"
        problems.append(Problem("size", what, "use whole numbers from 1 up"))
    last = first + (size - 1) * stride
    if first < 0 or last >= cluster.gpus:
        what = f"{cluster.name} has no ranks {first} to {last}"
        problems.append(Problem("first", what, f"use 0 to {cluster.gpus - 1}"))
    problems += _sharers_problems(sharers)
    if problems:
        raise InputError(problems)
    unit = count_domain_gpus(cluster)
    regular = stride % unit == 0 or (unit % stride == 0 and first % unit < stride)
    if not regular or size * stride <= unit:
        return _counted(cluster, range(first, last + 1, stride), sharers)
    # Every unit looks like the first one, so one of them and the spacing say it all.
    per_unit = max(1, unit // stride)
    head = tuple(range(first, first + per_unit * stride, stride)) if per_unit > 1 else (first,)
    units = -(-size // per_unit)
    step_units = max(1, stride // unit)
    return _placed(
        cluster,
        ranks=size,
        units=units,
        local=head,
        unit_numbers=range(first // unit, first // unit + units * step_units, step_units),
        sharers=sharers,
    )


def share_nics(place: Placement, groups: float) -> Placement:
    """Return the same group while `groups` times as many use its network cards."""
    problems = _sharers_problems(groups)
    if problems:
        raise InputError(problems)
    return msgspec.structs.replace(place, groups_per_nic=place.groups_per_nic * groups)


def count_domain_gpus(cluster: Cluster) -> int:
    """Return the GPUs of one unit: a node, or a scale-up domain where that is larger."""
    return max(cluster.gpus_per_node, cluster.scale_up.gpus)


@lru_cache(maxsize=1024)
def read_cluster_links(cluster: Cluster) -> ClusterLinks:
    """Return what joins the GPUs of a cluster."""
    sm = parse_sm(cluster.gpu.arch)
    return ClusterLinks(
        # RCCL is a port of NCCL: its devices are looked up as the NVIDIA part of their year.
        sm=90 if sm is None else sm,
        uses_nccl=sm is not None,
        scale_up=cluster.scale_up.kind,
        gpu_bytes_per_s=cluster.scale_up.gpu_bytes_per_s,
        pair_bytes_per_s=cluster.scale_up.effective_pair_bytes_per_s,
        domain_gpus=cluster.scale_up.gpus,
        switched=cluster.scale_up.switched,
        has_in_network_switch=cluster.scale_up.in_network_reduction,
        host_bytes_per_s=cluster.host.gpu_bytes_per_s,
        fabric=cluster.fabric.kind,
        has_in_network_fabric=cluster.fabric.in_network_reduction,
    )


def _counted(cluster: Cluster, ranks: Sequence[int], sharers: float | None) -> Placement:
    """Reduce ranks in any order by counting them unit by unit."""
    unit = count_domain_gpus(cluster)
    units: dict[int, list[int]] = {}
    for rank in ranks:
        units.setdefault(rank // unit, []).append(rank)
    fullest = max(units.values(), key=len)
    return _placed(
        cluster,
        ranks=len(ranks),
        units=len(units),
        local=tuple(fullest),
        unit_numbers=tuple(units),
        sharers=sharers,
    )


def _placed(
    cluster: Cluster,
    *,
    ranks: int,
    units: int,
    local: tuple[int, ...],
    unit_numbers: Sequence[int],
    sharers: float | None,
) -> Placement:
    inside: IntraDomainLink = "none"
    if len(local) > 1:
        domains = {rank // cluster.scale_up.gpus for rank in local}
        inside = "scale-up" if len(domains) == 1 else "host"
    cards, card_rate, busiest = _cards(cluster, local) if units > 1 else (0, 0.0, 1.0)
    ring, spread, switches_s = _fabric(cluster, unit_numbers) if units > 1 else (1.0, 1.0, 0.0)
    nic_s = 0.0 if cluster.nics is None or units == 1 else cluster.nics.latency_s
    return Placement(
        links=read_cluster_links(cluster),
        ranks=ranks,
        domains=units,
        ranks_per_domain=len(local),
        intra_link=inside,
        nics=cards,
        nic_bytes_per_s=card_rate,
        groups_per_nic=busiest if sharers is None else float(sharers),
        ring_oversubscription=ring,
        all_to_all_oversubscription=spread,
        nic_latency_s=nic_s,
        switch_latency_s=switches_s,
    )


def _cards(cluster: Cluster, local: tuple[int, ...]) -> tuple[int, float, float]:
    """Return the cards near these GPUs, the speed of one, and the groups on the busiest one."""
    nics = cluster.nics
    if nics is None:
        what = f"{cluster.name} has no NIC, yet the group spans nodes or domains"
        raise InputError([Problem("ranks", what, "keep the group inside one domain")])
    gpus = cluster.gpus_per_node
    if nics.per_node >= gpus:
        # Several cards per GPU act as one (aws-ofi-nccl and NCCL 2.23+ join them).
        return len(local), nics.per_node // gpus * nics.nic_bytes_per_s, 1.0
    members: dict[tuple[int, int], int] = {}
    for rank in local:
        node, index = divmod(rank, gpus)
        card = node, index * nics.per_node // gpus
        members[card] = members.get(card, 0) + 1
    busiest = gpus / nics.per_node / min(members.values())
    return len(members), nics.nic_bytes_per_s, max(1.0, busiest)


def _fabric(cluster: Cluster, units: Sequence[int]) -> tuple[float, float, float]:
    """Return the thinning for neighbour and for all-to-all traffic, and the switches' latency.

    With every node of a group in step, only the units whose next one lies behind another switch
    of a layer load that layer, and an oversubscribed layer carries that part of the traffic.
    """
    nodes_per_unit = max(1, cluster.scale_up.gpus // cluster.gpus_per_node)
    low, high = min(units) * nodes_per_unit, max(units) * nodes_per_unit
    spacing = (high - low) / max(1, len(units) - 1)
    ring = spread = cumulative = 1.0
    latency_s, beneath = 0.0, 1
    for index, tier in enumerate(cluster.fabric.tiers):
        if index and low // beneath == high // beneath:
            break
        cumulative *= tier.oversubscription
        latency_s += tier.latency_s
        # What leaves the block below: one unit in so many for neighbours, nearly all for spreads.
        block = max(1.0, beneath / max(spacing, 1.0)) if index else 1.0
        ring = max(ring, cumulative / block)
        spread = max(spread, cumulative * (len(units) - block) / max(1, len(units) - 1))
        beneath = tier.nodes or 1
    return ring, spread, latency_s


def _sharers_problems(sharers: float | None) -> list[Problem]:
    if sharers is None or sharers >= 1:
        return []
    return [Problem("sharers", f"{sharers!r} groups share a NIC", "use 1 or more")]
