"""Why NCCL does not consider an algorithm for a collective on a group, in plain words.

The rules are those of `tuning` and `graph`, told from the other side: each reason names what the
group would need and what it has. It prices nothing.
"""

from collections.abc import Collection

import msgspec

from meshwright.predict.network.nccl_constants import ALGORITHMS, PROTOCOLS
from meshwright.predict.network.nccl_tuning import NcclOp, TuningEntry
from meshwright.predict.network.placement import Placement

TITLES = {
    "tree": "Tree",
    "ring": "Ring",
    "collnet_direct": "CollNetDirect",
    "collnet_chain": "CollNetChain",
    "nvls": "NVLS",
    "nvls_tree": "NVLSTree",
    "pat": "PAT",
    "ll": "LL",
    "ll128": "LL128",
    "simple": "Simple",
}
"""How NCCL's documentation writes the names."""


class UnavailableAlgorithm(msgspec.Struct, frozen=True, kw_only=True):
    """An algorithm, or one of its protocols, that NCCL does not consider."""

    algorithm: str
    protocol: str
    """Empty where the reason holds for the whole algorithm."""
    reason: str


def list_unavailable(
    op: NcclOp,
    place: Placement,
    entries: Collection[TuningEntry],
    *,
    collnet: bool,
    only: tuple[str, ...] | None,
) -> tuple[UnavailableAlgorithm, ...]:
    """Return what is missing from NCCL's table for a group of at least two ranks, and why."""
    known = {(entry.algorithm, entry.protocol) for entry in entries}
    missing: list[UnavailableAlgorithm] = []
    for algorithm in ALGORITHMS:
        protocols = [protocol for protocol in PROTOCOLS if (algorithm, protocol) in known]
        if only is not None and algorithm not in only:
            missing.append(_whole(algorithm, f"only {', '.join(only)} may be used"))
        elif not protocols:
            missing.append(_whole(algorithm, _reason(algorithm, op, place, collnet)))
        elif protocols == ["simple"]:
            why = f"{TITLES[algorithm]} runs with Simple alone"
            missing += [
                UnavailableAlgorithm(algorithm=algorithm, protocol=protocol, reason=why)
                for protocol in ("ll", "ll128")
            ]
    return tuple(missing)


def _whole(algorithm: str, why: str) -> UnavailableAlgorithm:
    return UnavailableAlgorithm(algorithm=algorithm, protocol="", reason=why)


def _reason(algorithm: str, op: NcclOp, place: Placement, collnet: bool) -> str:
    found = ""
    match algorithm:
        case "tree":
            found = "Tree serves all_reduce only"
        case "pat":
            found = _pat(op, place)
        case "nvls":
            found = _nvls(op, place) or _nvls_between(op, place, collnet)
        case "nvls_tree":
            found = _nvls_tree(op, place) or _nvls(op, place)
        case "collnet_chain":
            found = _collnet(op, place, collnet)
        case "collnet_direct":
            found = _collnet(op, place, collnet) or _direct(place)
    return found or f"NCCL counts no bandwidth for {TITLES[algorithm]} here"


def _pat(op: NcclOp, place: Placement) -> str:
    if op not in ("all_gather", "reduce_scatter"):
        return "PAT serves all_gather and reduce_scatter only"
    if place.domains == 1:
        return "PAT works between nodes, and the group is in one"
    return f"PAT needs one GPU per node, and the group has {place.ranks_per_domain}"


def _nvls(op: NcclOp, place: Placement) -> str:
    """Say what the devices or the group lack; empty where they could run NVLS."""
    links = place.links
    if op in ("broadcast", "reduce"):
        return f"NVLS does not serve {op}"
    if not links.uses_nccl:
        return "NVLS needs NVIDIA GPUs with NVSwitch"
    if links.sm < 90 or not links.has_in_network_switch:
        here = f"the GPUs are sm_{links.sm}"
        here += "" if links.switched else " without a switch"
        return f"NVLS needs NVSwitch and sm_90, and {here}"
    if place.ranks_per_domain <= 2:
        return f"NVLS needs three GPUs per node, and the group has {place.ranks_per_domain}"
    if place.intra_link != "scale-up":
        return "NVLS needs the node's GPUs in one NVLink domain"
    return ""


def _nvls_between(op: NcclOp, place: Placement, collnet: bool) -> str:
    if place.domains > 1 and op != "all_reduce":
        return f"NVLS for {op} between nodes needs a SHARP plugin, which is not modelled"
    if place.domains > 1 and not collnet:
        return "NVLS between nodes needs CollNet, which is off (NVLSTree does without)"
    return ""


def _nvls_tree(op: NcclOp, place: Placement) -> str:
    if op != "all_reduce":
        return "NVLSTree serves all_reduce only"
    return "NVLSTree joins nodes, and the group is in one" if place.domains == 1 else ""


def _collnet(op: NcclOp, place: Placement, collnet: bool) -> str:
    if not collnet:
        return "CollNet is off (NCCL_COLLNET_ENABLE=1 and a SHARP plugin turn it on)"
    if place.domains == 1:
        return "CollNet works between nodes, and the group is in one"
    if place.ranks_per_domain > 8:
        return f"CollNet takes up to 8 GPUs per node, and the group has {place.ranks_per_domain}"
    return "" if op == "all_reduce" else f"CollNet for {op} is not modelled"


def _direct(place: Placement) -> str:
    return "" if place.links.switched else "CollNetDirect needs a switch between a node's GPUs"
