"""The least time a collective can take: bytes over wires, whatever the algorithm.

It knows the physical speeds of a `Placement` and nothing of NCCL. Every prediction stays above it.
"""

from meshwright.predict.network.nccl_graph import mesh_share
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import Placement


def bound_s_per_byte(op: NcclOp, place: Placement) -> float:
    """Return seconds per byte of the message, by nccl-tests' convention of size."""
    if place.ranks == 1:
        return 0.0
    if place.domains == 1:
        return _inside(op, place) / intra_domain_bytes_per_s(place)
    local = 0.0
    if op == "all_to_all" and place.ranks_per_domain > 1:
        local = (place.ranks_per_domain - 1) / place.ranks / intra_domain_bytes_per_s(place)
    return max(local, _between(op, place) / inter_domain_bytes_per_s(place))


def intra_domain_bytes_per_s(place: Placement) -> float:
    """Return what one GPU can exchange with its peers in the unit, on the wire."""
    links = place.links
    if place.intra_link == "host":
        return links.host_bytes_per_s
    if links.switched or links.pair_bytes_per_s >= links.gpu_bytes_per_s:
        return links.gpu_bytes_per_s
    return links.gpu_bytes_per_s * mesh_share(links, place.ranks_per_domain)


def inter_domain_bytes_per_s(place: Placement) -> float:
    """Return what all cards of a unit give the group, on the wire."""
    card = min(place.nic_bytes_per_s, place.links.host_bytes_per_s)
    return place.nics * card / place.groups_per_nic


def _inside(op: NcclOp, place: Placement) -> float:
    """Bytes through one GPU's links, per byte of the message."""
    most = 1 - 1 / place.ranks
    if op == "all_reduce":
        # A switch that adds and copies spares each GPU half of the traffic.
        return most if place.links.has_in_network_switch else 2 * most
    return 1.0 if op in ("broadcast", "reduce", "send_recv") else most


def _between(op: NcclOp, place: Placement) -> float:
    """Bytes through the cards of the fullest unit, per byte of the message."""
    if op == "all_reduce":
        most = 1 - 1 / place.domains
        return most if place.links.has_in_network_fabric else 2 * most
    if op in ("all_gather", "reduce_scatter"):
        return 1 - place.ranks_per_domain / place.ranks
    if op == "all_to_all":
        return place.ranks_per_domain * (1 - place.ranks_per_domain / place.ranks)
    return 1.0
