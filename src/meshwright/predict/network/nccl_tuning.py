"""NCCL's cost model, restated: latency and bandwidth of every algorithm and protocol.

`build_tuning_table` gives what NCCL prints in its tuning log, `nccl_us` its estimate for a size. It
knows search graphs (`nccl_graph`) and NCCL's constants, no measurement: corrections are in
`nccl_cost`.
"""

from typing import Literal, NamedTuple

from meshwright.predict.network.nccl_constants import (
    PROTOCOLS,
    Algorithm,
    NcclRelease,
    Protocol,
    get_fixed_constants,
    get_generation_row,
)
from meshwright.predict.network.nccl_graph import NcclGraph, NcclGraphs
from meshwright.predict.network.placement import Placement

NcclOp = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv"
]
LL, LL128, SIMPLE = 0, 1, 2


class TuningEntry(NamedTuple):
    """One cell of the tuning log: what NCCL expects of an algorithm with a protocol."""

    algorithm: Algorithm
    protocol: Protocol
    base_us: float
    """Before any hop."""
    intra_hops: float
    """Hops inside units, one after the other."""
    intra_hop_us: float
    """One of them."""
    inter_hops: float
    """Hops between units, one after the other."""
    inter_hop_us: float
    """One of them."""
    algbw_gbps: float
    """Bytes of the message per nanosecond."""
    channels: int
    """Channels of its search graph."""

    @property
    def latency_us(self) -> float:
        """Return what NCCL adds for any size."""
        return (
            self.base_us + self.intra_hops * self.intra_hop_us + self.inter_hops * self.inter_hop_us
        )


def count_ring_steps(op: NcclOp, ranks: int) -> int:
    """Return the steps of a ring."""
    if op == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if op in ("all_gather", "reduce_scatter") else ranks


def build_tuning_table(
    op: NcclOp, place: Placement, found: NcclGraphs, release: NcclRelease, *, collnet: bool = False
) -> tuple[TuningEntry, ...]:
    """Return every algorithm and protocol that NCCL would consider for a collective.

    `collnet` says that reductions in the fabric's switches are enabled (SHARP).
    """
    entries = [_ring(op, place, found.ring, release, index) for index in (LL, LL128, SIMPLE)]
    if op == "all_reduce":
        entries += [_tree(place, found, release, index) for index in (LL, LL128, SIMPLE)]
        if collnet and place.domains > 1 and place.ranks_per_domain <= 8:
            entries += _collnet(place, found, release)
    if found.nvls is not None and found.nvls.channels >= 2:
        entries += _nvls(op, place, found.nvls, release, collnet=collnet)
    if op in ("all_gather", "reduce_scatter") and 1 == place.ranks_per_domain < place.domains:
        entries.append(_pat(place, found.ring, release))
    return tuple(entry for entry in entries if entry.algbw_gbps > 0)


def nccl_us(
    entry: TuningEntry, op: NcclOp, place: Placement, nbytes: float, channels: int
) -> float:
    """Return NCCL's own estimate for a size; `channels` are the communicator's."""
    latency, bandwidth = entry.latency_us, entry.algbw_gbps
    if entry.algorithm == "tree":
        bandwidth *= tree_factor(entry.protocol, nbytes)
    if nbytes >= plateau_bytes(entry, op, place, channels):
        latency *= plateau_factor(place)
    return latency + nbytes / (1000 * bandwidth)


def tree_factor(protocol: Protocol, nbytes: float) -> float:
    """Return NCCL's factor on tree bandwidth, which dips at middle sizes."""
    index = int(nbytes // 64).bit_length() - 1
    factors = get_fixed_constants().tree_correction[PROTOCOLS.index(protocol)]
    return factors[index] if 0 <= index < len(factors) else 1.0


def plateau_bytes(entry: TuningEntry, op: NcclOp, place: Placement, channels: int) -> float:
    """Return the size from which NCCL stretches a ring's latency between units."""
    if op != "all_reduce" or place.domains == 1:
        return float("inf")
    if entry.algorithm != "ring" or entry.protocol != "simple":
        return float("inf")
    return float(get_fixed_constants().ring_plateau_bytes * channels * place.ranks)


def plateau_factor(place: Placement) -> float:
    """Return by how much."""
    before_ampere, since = get_fixed_constants().ring_plateau
    return since if place.links.sm >= 80 else before_ampere


def count_comm_channels(place: Placement, found: NcclGraphs) -> int:
    """Return the channels that ring and tree kernels of the communicator use at most."""
    most = get_fixed_constants().max_channels
    channels = min(most, 2 * found.ring.channels)
    if place.links.sm >= 90 and place.domains > 1 and found.ring.intra_gbps > 45 and channels < 16:
        channels = 2 * channels
    return min(most, channels)


def count_nvls_channels(place: Placement, release: NcclRelease) -> int:
    """Return the channels of NVLS kernels."""
    if place.links.sm < 100:
        return release.nvls_channels["sm_90"]
    return release.nvls_channels["sm_100" if place.domains == 1 else "sm_100_multi"]


def count_kernel_channels(entry: TuningEntry, place: Placement, nbytes: float, most: int) -> int:
    """Return the channels (thread blocks) that one call runs on: fewer for small messages."""
    if entry.algorithm in ("nvls", "nvls_tree"):
        return most
    return max(1, min(most, int(nbytes // channel_bytes(entry, place))))


def channel_bytes(entry: TuningEntry, place: Placement) -> int:
    """Return the size from which on NCCL gives a message one more channel."""
    index = PROTOCOLS.index(entry.protocol)
    threshold = get_fixed_constants().threads[index] * get_fixed_constants().thread_threshold[index]
    if entry.algorithm == "ring" and entry.protocol == "ll":
        return threshold * place.ranks
    return threshold


def post_us(protocol: int) -> float:
    """Return what NCCL counts for posting one message to a network card.

    Hosts are taken to be Intel's; NCCL counts twice as much for AMD's.
    """
    return get_fixed_constants().net_overhead_us["intel"] * (
        get_fixed_constants().net_overhead_simple if protocol == SIMPLE else 1
    )


def _column(place: Placement) -> int:
    return min(place.domains, 3) - 1


def _inside_us(place: Placement, release: NcclRelease, algorithm: str, protocol: int) -> float:
    fast = place.intra_link == "scale-up" and place.links.scale_up in ("nvlink", "xgmi")
    return (release.nvlink_us if fast else release.pci_us)[algorithm][protocol]


def _between_us(place: Placement, release: NcclRelease, algorithm: str, protocol: int) -> float:
    # A single GPU per unit cannot hide any of it, so NCCL takes the tree's figure.
    return release.net_us["tree" if place.ranks_per_domain == 1 else algorithm][protocol]


def _ll_max(place: Placement, release: NcclRelease) -> float:
    row = get_generation_row(place.links.sm) if place.domains == 1 else 0
    return release.caps.ll_max[row][_column(place)]


def _ring(
    op: NcclOp, place: Placement, graph: NcclGraph, release: NcclRelease, protocol: int
) -> TuningEntry:
    bus = graph.channels * (graph.intra_gbps if place.domains <= 2 else graph.inter_gbps)
    if protocol == LL:
        bus = min(_ll_max(place, release), bus * release.ring_ll_share)
    elif protocol == LL128:
        cap = release.caps.ring_ll128[get_generation_row(place.links.sm)][_column(place)]
        bus = min(bus * 0.92, graph.channels * cap)
    count = count_ring_steps(op, place.ranks)
    inside_us = _inside_us(place, release, "ring", protocol)
    between_us = _between_us(place, release, "ring", protocol)
    inside, between = count, 0
    if op in ("broadcast", "reduce"):
        # One message runs around the ring in slices, so only one hop is waited for.
        inside, between = (1, 0) if place.domains == 1 else (0, 1)
        between_us = release.net_us["ring"][protocol]
    elif place.domains > 1:
        between = (2 if op == "all_reduce" else 1) * (place.domains - 1)
        inside, inside_us = count - between, max(inside_us, post_us(protocol))
    return TuningEntry(
        algorithm="ring",
        protocol=PROTOCOLS[protocol],
        base_us=release.base_us["ring"][protocol],
        intra_hops=inside,
        intra_hop_us=inside_us,
        inter_hops=between,
        inter_hop_us=between_us,
        algbw_gbps=bus * place.ranks / count,
        channels=graph.channels,
    )


def _tree(place: Placement, found: NcclGraphs, release: NcclRelease, protocol: int) -> TuningEntry:
    graph, row, column = found.tree, get_generation_row(place.links.sm), _column(place)
    bus = graph.channels * (graph.intra_gbps if place.domains <= 2 else graph.inter_gbps)
    bus = min(bus * 0.92, graph.channels * release.caps.tree[row][column])
    if protocol == LL:
        bus = min(bus / 3.8, _ll_max(place, release))
    elif protocol == LL128:
        share = 7 / 9 if place.domains == 1 else 120 / 128
        bus = min(bus * share, graph.channels * release.caps.tree_ll128[row][column])
    if found.tree_is_chain:
        bus *= 0.85
    return TuningEntry(
        algorithm="tree",
        protocol=PROTOCOLS[protocol],
        base_us=release.base_us["tree"][protocol],
        intra_hops=2 * (place.ranks // place.domains - 1),
        intra_hop_us=_inside_us(place, release, "tree", protocol),
        inter_hops=2 * _log2(place.domains),
        inter_hop_us=_between_us(place, release, "tree", protocol),
        algbw_gbps=bus * 0.5,
        channels=graph.channels,
    )


def _nvls(
    op: NcclOp, place: Placement, graph: NcclGraph, release: NcclRelease, *, collnet: bool
) -> list[TuningEntry]:
    """NVLS inside one unit; between units with trees, or with the fabric's own reductions."""
    if op not in ("all_reduce", "all_gather", "reduce_scatter"):
        return []
    if place.domains > 1 and op != "all_reduce":
        return []
    names: list[Algorithm] = ["nvls"] if place.domains == 1 else ["nvls_tree"]
    if place.domains > 1 and collnet:
        names.append("nvls")
    ratio = 1.0
    if op == "all_reduce":
        by_ranks = place.ranks / count_ring_steps(op, place.ranks)
        ratio = by_ranks if release.nvls_model == "efficiency" else 5 / 6
    deep = {"nvls": int(place.domains > 1), "nvls_tree": 2 * _log2(place.domains)}
    return [
        TuningEntry(
            algorithm=name,
            protocol="simple",
            base_us=release.base_us[name][SIMPLE],
            intra_hops=1,
            intra_hop_us=release.nvlink_us[name][SIMPLE],
            inter_hops=deep[name],
            inter_hop_us=_between_us(place, release, name, SIMPLE),
            algbw_gbps=graph.channels * _nvls_bus(op, place, graph, release, name) * ratio,
            channels=graph.channels,
        )
        for name in names
    ]


def _nvls_bus(
    op: NcclOp, place: Placement, graph: NcclGraph, release: NcclRelease, name: str
) -> float:
    """Return the bus bandwidth of one channel."""
    share = 1 - 1 / place.ranks_per_domain
    row, trees = get_generation_row(place.links.sm), name == "nvls_tree"
    if release.nvls_model == "five-sixths":
        if trees:
            return min(
                graph.intra_gbps, graph.inter_gbps if place.domains == 2 else graph.inter_gbps / 2
            )
        if op == "all_reduce":
            return min(graph.intra_gbps, graph.inter_gbps)
        return min(graph.intra_gbps * share, graph.inter_gbps * 0.9)
    inside = graph.intra_gbps * release.caps.nvls_efficiency[row]
    inside *= (graph.channels - 1) / graph.channels
    inside *= 2 if op == "all_reduce" else share
    if place.domains == 1:
        return inside
    across = graph.inter_gbps * (2 if trees and place.domains == 2 else 1)
    cap = release.caps.nvls_tree[row][_column(place)] if trees else float("inf")
    return min(inside, across, cap)


def _collnet(place: Placement, found: NcclGraphs, release: NcclRelease) -> list[TuningEntry]:
    """All-reduce in the fabric's switches, entered by a chain of GPUs or by one per card."""
    graph, ppn = found.tree, place.ranks_per_domain
    bus = graph.channels * graph.intra_gbps
    ratio = ppn / min(graph.channels, max(1, place.nics))
    direct = bus / (ratio - (ratio - 1) / 2) * (0.85 if place.links.sm >= 90 else 1.0)
    hop = release.nvlink_us["collnet_direct"][SIMPLE]
    shapes: list[tuple[Algorithm, float, float, float]] = [
        ("collnet_chain", 2 * (ppn - 1), release.nvlink_us["collnet_chain"][SIMPLE], bus)
    ]
    if place.links.switched:
        # The second term is the time that a head takes to serve its peers one by one.
        reach = min(1, ppn - 1) * hop + (ppn - 1) * 0.4
        shapes.append(("collnet_direct", 2, reach, direct))
    return [
        TuningEntry(
            algorithm=name,
            protocol="simple",
            base_us=release.base_us[name][SIMPLE],
            intra_hops=inside,
            intra_hop_us=inside_us,
            inter_hops=1,
            inter_hop_us=_between_us(place, release, name, SIMPLE),
            algbw_gbps=bandwidth * 0.5,
            channels=graph.channels,
        )
        for name, inside, inside_us, bandwidth in shapes
    ]


def _pat(place: Placement, graph: NcclGraph, release: NcclRelease) -> TuningEntry:
    bus = graph.channels * (graph.intra_gbps if place.domains <= 2 else graph.inter_gbps) * 0.75
    return TuningEntry(
        algorithm="pat",
        protocol="simple",
        base_us=release.base_us["pat"][SIMPLE],
        intra_hops=place.ranks,
        intra_hop_us=2.8,
        inter_hops=_log2(place.domains) / 3.5,
        inter_hop_us=release.net_us["tree"][SIMPLE],
        algbw_gbps=bus,
        channels=graph.channels,
    )


def _log2(value: int) -> int:
    return value.bit_length() - 1
