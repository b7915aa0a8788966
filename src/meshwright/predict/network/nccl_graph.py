"""NCCL's topology search, in closed form: channels and GB/s per channel of each algorithm.

NCCL searches paths over the links of one node; on the regular machines a `Placement` describes,
what it finds follows from a few divisions. The result feeds NCCL's cost model (`tuning`), so it is
what NCCL *believes*, in its own rounded speeds; what links really carry is in `bounds`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.predict.network.nccl_constants import (
    NcclRelease,
    get_fixed_constants,
    look_up_by_sm,
)
from meshwright.predict.network.placement import ClusterLinks, Placement

GB = 1e9


class NcclGraph(NamedTuple):
    """One search result: channels, and GB/s of each inside and between units."""

    channels: int
    intra_gbps: float
    inter_gbps: float


class NcclGraphs(NamedTuple):
    """Search results of one communicator."""

    ring: NcclGraph
    tree: NcclGraph
    nvls: NcclGraph | None
    tree_is_chain: bool
    """Whether a tree enters a unit at a single GPU, which NCCL counts as slower."""


def find_graphs(place: Placement, release: NcclRelease) -> NcclGraphs:
    """Return what the search finds for a group of at least two ranks."""
    if place.domains == 1:
        ring = _ring_inside(place, release)
        return NcclGraphs(ring, ring, _nvls_inside(place, release), tree_is_chain=False)
    speeds: Sequence[float] = look_up_by_sm(release.speeds_inter, place.links.sm)
    card = nic_gbps(place)
    found = _ring_between(place, speeds, card)
    ring = _duplicated(found, place.links.sm)
    chain = place.ranks_per_domain == 1 or place.links.sm >= 90
    return NcclGraphs(ring, _tree_between(place, ring, speeds), _nvls_between(place, speeds), chain)


def nic_gbps(place: Placement) -> float:
    """Return what NCCL counts for one network card: its speed, or its PCIe slot's if that is less.

    NCCL does not know who else uses the card.
    """
    return min(place.nic_bytes_per_s / GB, pcie_gbps(place.links.host_bytes_per_s))


def pcie_gbps(wire_bytes_per_s: float) -> float:
    """Return what NCCL counts for a link to the host."""
    wire = wire_bytes_per_s / GB
    for counted, physical in get_fixed_constants().pcie:
        if wire <= physical * 1.02:
            return counted * min(1.0, wire / physical * 1.02)
    return wire * 0.8


def nvlink_gbps(links: ClusterLinks) -> float:
    """Return what NCCL counts for all fast links of one GPU."""
    if links.scale_up == "nvlink":
        counted, physical = look_up_by_sm(get_fixed_constants().nvlink, links.sm)
        return links.gpu_bytes_per_s / GB * counted / physical
    return links.gpu_bytes_per_s / GB * _OTHER_LINKS


# Once a speed fits, the search tries no speed below about half of it.
_SLOWER = 0.49

# RCCL counts 48 of xGMI's 64 GB/s per link (ROCm/rccl, src/graph/topo.h); PCIe is about alike.
_OTHER_LINKS = 0.75


def ring_capacity_gbps(place: Placement) -> float:
    """Return what all rings through one GPU may carry inside a unit, as NCCL counts links."""
    links = place.links
    if place.intra_link == "host":
        return pcie_gbps(links.host_bytes_per_s)
    total = nvlink_gbps(links)
    if links.switched or links.pair_bytes_per_s >= links.gpu_bytes_per_s:
        return total
    return total * mesh_share(links, place.ranks_per_domain)


def mesh_share(links: ClusterLinks, ranks: int) -> float:
    """Return the part of a GPU's links that rings over `ranks` directly linked GPUs can use.

    In a full mesh each pair has its own link, so n GPUs have n − 1 rings. Where a GPU has fewer
    links than peers, the wiring is DGX-1's hybrid cube mesh and the first n GPUs' rings count.
    """
    wires = max(1, round(links.gpu_bytes_per_s / links.pair_bytes_per_s))
    if wires >= links.domain_gpus - 1:
        return min(ranks - 1, wires) / wires
    return _CUBE_MESH_RINGS.get(ranks, min(ranks - 1, wires)) / wires


# Rings of one link each through the first n GPUs of DGX-1 (V100: 0-1, 0-2 single, 0-3, 0-4 double
# and so on, as nvidia-smi prints it); five GPUs relay through the one that joins the two quads.
_CUBE_MESH_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}


def _ring_inside(place: Placement, release: NcclRelease) -> NcclGraph:
    capacity = ring_capacity_gbps(place)
    speeds: Sequence[float] = look_up_by_sm(release.speeds_intra, place.links.sm)
    best = None
    for speed in speeds:
        if best is not None and speed < _SLOWER * best.intra_gbps:
            break
        channels = min(int(capacity / speed + 1e-6), get_fixed_constants().max_ring_channels)
        if channels and (best is None or channels * speed > best.channels * best.intra_gbps):
            best = NcclGraph(channels, speed, speed)
    return _duplicated(best or NcclGraph(1, capacity, capacity), place.links.sm)


def _nvls_inside(place: Placement, release: NcclRelease) -> NcclGraph | None:
    if not _multicasts(place):
        return None
    speeds: Sequence[float] = look_up_by_sm(release.speeds_intra, place.links.sm)
    heads = min(place.ranks_per_domain, get_fixed_constants().max_nvls_heads)
    speed = _fitting(speeds, nvlink_gbps(place.links) / (heads + 1))
    return NcclGraph(heads, speed, speed)


def _ring_between(place: Placement, speeds: Sequence[float], card: float) -> NcclGraph:
    inside = ring_capacity_gbps(place) if place.ranks_per_domain > 1 else float("inf")
    # A ring leaves each unit at one GPU, whose fast links it then does not use.
    through = (
        (place.ranks_per_domain - 1) / place.ranks_per_domain if place.ranks_per_domain > 1 else 0.0
    )
    best = None
    for speed in speeds:
        if best is not None and speed < _SLOWER * best.inter_gbps:
            break
        channels = min(
            place.nics * int(card / speed + 1e-6), get_fixed_constants().max_ring_channels
        )
        fits = channels > 0 and channels * through * speed <= inside + 1e-6
        if fits and (best is None or channels * speed > best.channels * best.inter_gbps):
            best = NcclGraph(channels, speed, speed)
    speed = min(card, inside / max(place.nics * through, 1e-9))
    return best or NcclGraph(place.nics, speed, speed)


def _tree_between(place: Placement, ring: NcclGraph, speeds: Sequence[float]) -> NcclGraph:
    """Return the ring's channels with up to twice the speed inside: a tree's hops there differ."""
    capacity = ring_capacity_gbps(place) if place.ranks_per_domain > 1 else float("inf")
    if place.ranks_per_domain > 1:
        capacity *= place.ranks_per_domain / (place.ranks_per_domain - 1)
    intra = ring.inter_gbps
    for speed in sorted(speeds):
        if intra < speed <= 2 * ring.inter_gbps and ring.channels * speed <= capacity + 1e-6:
            intra = speed
    return NcclGraph(ring.channels, intra, ring.inter_gbps)


def _nvls_between(place: Placement, speeds: Sequence[float]) -> NcclGraph | None:
    if not _multicasts(place):
        return None
    heads = min(place.ranks_per_domain, place.nics, get_fixed_constants().max_nvls_heads)
    room = nvlink_gbps(place.links) / (heads + 1)
    card = nic_gbps(place)
    intra = _fitting(speeds, min(room, card))
    inter = max(intra, _fitting(speeds, min(card, 2 * intra)))
    return NcclGraph(heads, intra, inter)


def _multicasts(place: Placement) -> bool:
    links = place.links
    able = links.uses_nccl and links.has_in_network_switch and links.sm >= 90
    # NCCL leaves two GPUs to rings.
    return able and place.intra_link == "scale-up" and place.ranks_per_domain > 2


def _fitting(speeds: Sequence[float], most: float) -> float:
    """Return the largest speed that is tried and fits; below all of them, what there is."""
    return next((speed for speed in speeds if speed <= most + 1e-6), most)


def _duplicated(graph: NcclGraph, sm: int) -> NcclGraph:
    """Split fast channels in two, as NCCL does to keep more thread blocks busy."""
    if graph.intra_gbps < 25 or (sm > 80 and graph.intra_gbps < 50 and graph.channels > 4):
        return graph
    channels = min(2 * graph.channels, get_fixed_constants().max_ring_channels)
    parts = -(-channels // graph.channels)
    return NcclGraph(channels, graph.intra_gbps / parts, graph.inter_gbps / parts)
