"""NCCL's cost model, restated: latency and bandwidth of every algorithm and protocol.

`table` gives what NCCL prints in its tuning log, `nccl_us` its estimate for a size. It knows
search graphs (`graph`) and NCCL's constants, no measurement: corrections are in `pricing`.
"""

from typing import Literal, NamedTuple

from meshwright.predict.network.constants import (
    PROTOCOLS,
    Algorithm,
    Protocol,
    Release,
    fixed,
    generation,
)
from meshwright.predict.network.graph import Graph, Graphs
from meshwright.predict.network.placement import Placement

Op = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv"
]
LL, LL128, SIMPLE = 0, 1, 2


class Entry(NamedTuple):
    """One cell of the tuning log: what NCCL expects of an algorithm with a protocol."""

    algorithm: Algorithm
    protocol: Protocol
    base_us: float
    """Before any hop."""
    inside: float
    """Hops inside units, one after the other."""
    inside_us: float
    """One of them."""
    between: float
    """Hops between units, one after the other."""
    between_us: float
    """One of them."""
    algbw_gbps: float
    """Bytes of the message per nanosecond."""
    channels: int
    """Channels of its search graph."""

    @property
    def latency_us(self) -> float:
        """Return what NCCL adds for any size."""
        return self.base_us + self.inside * self.inside_us + self.between * self.between_us


def steps(op: Op, ranks: int) -> int:
    """Return the steps of a ring."""
    if op == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if op in ("all_gather", "reduce_scatter") else ranks


def table(
    op: Op, place: Placement, found: Graphs, release: Release, *, collnet: bool = False
) -> tuple[Entry, ...]:
    """Return every algorithm and protocol that NCCL would consider for a collective.

    `collnet` says that reductions in the fabric's switches are enabled (SHARP).
    """
    entries = [_ring(op, place, found.ring, release, index) for index in (LL, LL128, SIMPLE)]
    if op == "all_reduce":
        entries += [_tree(place, found, release, index) for index in (LL, LL128, SIMPLE)]
        if collnet and place.units > 1 and place.per_unit <= 8:
            entries += _collnet(place, found, release)
    if found.nvls is not None and found.nvls.channels >= 2:
        entries += _nvls(op, place, found.nvls, release, collnet=collnet)
    if op in ("all_gather", "reduce_scatter") and 1 == place.per_unit < place.units:
        entries.append(_pat(place, found.ring, release))
    return tuple(entry for entry in entries if entry.algbw_gbps > 0)


def nccl_us(entry: Entry, op: Op, place: Placement, nbytes: float, channels: int) -> float:
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
    factors = fixed().tree_correction[PROTOCOLS.index(protocol)]
    return factors[index] if 0 <= index < len(factors) else 1.0


def plateau_bytes(entry: Entry, op: Op, place: Placement, channels: int) -> float:
    """Return the size from which NCCL stretches a ring's latency between units."""
    if op != "all_reduce" or place.units == 1:
        return float("inf")
    if entry.algorithm != "ring" or entry.protocol != "simple":
        return float("inf")
    return float(fixed().ring_plateau_bytes * channels * place.ranks)


def plateau_factor(place: Placement) -> float:
    """Return by how much."""
    before_ampere, since = fixed().ring_plateau
    return since if place.links.sm >= 80 else before_ampere


def comm_channels(place: Placement, found: Graphs) -> int:
    """Return the channels that ring and tree kernels of the communicator use at most."""
    most = fixed().max_channels
    channels = min(most, 2 * found.ring.channels)
    if place.links.sm >= 90 and place.units > 1 and found.ring.intra > 45 and channels < 16:
        channels = 2 * channels
    return min(most, channels)


def nvls_channels(place: Placement, release: Release) -> int:
    """Return the channels of NVLS kernels."""
    if place.links.sm < 100:
        return release.nvls_channels["sm_90"]
    return release.nvls_channels["sm_100" if place.units == 1 else "sm_100_multi"]


def kernel_channels(entry: Entry, place: Placement, nbytes: float, most: int) -> int:
    """Return the channels (thread blocks) that one call runs on: fewer for small messages."""
    if entry.algorithm in ("nvls", "nvls_tree"):
        return most
    return max(1, min(most, int(nbytes // channel_bytes(entry, place))))


def channel_bytes(entry: Entry, place: Placement) -> int:
    """Return the size from which on NCCL gives a message one more channel."""
    index = PROTOCOLS.index(entry.protocol)
    threshold = fixed().threads[index] * fixed().thread_threshold[index]
    if entry.algorithm == "ring" and entry.protocol == "ll":
        return threshold * place.ranks
    return threshold


def post_us(protocol: int) -> float:
    """Return what NCCL counts for posting one message to a network card.

    Hosts are taken to be Intel's; NCCL counts twice as much for AMD's.
    """
    return fixed().net_overhead_us["intel"] * (
        fixed().net_overhead_simple if protocol == SIMPLE else 1
    )


def _column(place: Placement) -> int:
    return min(place.units, 3) - 1


def _inside_us(place: Placement, release: Release, algorithm: str, protocol: int) -> float:
    fast = place.inside == "scale-up" and place.links.scale_up in ("nvlink", "xgmi")
    return (release.nvlink_us if fast else release.pci_us)[algorithm][protocol]


def _between_us(place: Placement, release: Release, algorithm: str, protocol: int) -> float:
    # A single GPU per unit cannot hide any of it, so NCCL takes the tree's figure.
    return release.net_us["tree" if place.per_unit == 1 else algorithm][protocol]


def _ll_max(place: Placement, release: Release) -> float:
    row = generation(place.links.sm) if place.units == 1 else 0
    return release.caps.ll_max[row][_column(place)]


def _ring(op: Op, place: Placement, graph: Graph, release: Release, protocol: int) -> Entry:
    bus = graph.channels * (graph.intra if place.units <= 2 else graph.inter)
    if protocol == LL:
        bus = min(_ll_max(place, release), bus * release.ring_ll_share)
    elif protocol == LL128:
        cap = release.caps.ring_ll128[generation(place.links.sm)][_column(place)]
        bus = min(bus * 0.92, graph.channels * cap)
    count = steps(op, place.ranks)
    inside_us = _inside_us(place, release, "ring", protocol)
    between_us = _between_us(place, release, "ring", protocol)
    inside, between = count, 0
    if op in ("broadcast", "reduce"):
        # One message runs around the ring in slices, so only one hop is waited for.
        inside, between = (1, 0) if place.units == 1 else (0, 1)
        between_us = release.net_us["ring"][protocol]
    elif place.units > 1:
        between = (2 if op == "all_reduce" else 1) * (place.units - 1)
        inside, inside_us = count - between, max(inside_us, post_us(protocol))
    return Entry(
        algorithm="ring",
        protocol=PROTOCOLS[protocol],
        base_us=release.base_us["ring"][protocol],
        inside=inside,
        inside_us=inside_us,
        between=between,
        between_us=between_us,
        algbw_gbps=bus * place.ranks / count,
        channels=graph.channels,
    )


def _tree(place: Placement, found: Graphs, release: Release, protocol: int) -> Entry:
    graph, row, column = found.tree, generation(place.links.sm), _column(place)
    bus = graph.channels * (graph.intra if place.units <= 2 else graph.inter)
    bus = min(bus * 0.92, graph.channels * release.caps.tree[row][column])
    if protocol == LL:
        bus = min(bus / 3.8, _ll_max(place, release))
    elif protocol == LL128:
        share = 7 / 9 if place.units == 1 else 120 / 128
        bus = min(bus * share, graph.channels * release.caps.tree_ll128[row][column])
    if found.tree_is_chain:
        bus *= 0.85
    return Entry(
        algorithm="tree",
        protocol=PROTOCOLS[protocol],
        base_us=release.base_us["tree"][protocol],
        inside=2 * (place.ranks // place.units - 1),
        inside_us=_inside_us(place, release, "tree", protocol),
        between=2 * _log2(place.units),
        between_us=_between_us(place, release, "tree", protocol),
        algbw_gbps=bus * 0.5,
        channels=graph.channels,
    )


def _nvls(
    op: Op, place: Placement, graph: Graph, release: Release, *, collnet: bool
) -> list[Entry]:
    """NVLS inside one unit; between units with trees, or with the fabric's own reductions."""
    if op not in ("all_reduce", "all_gather", "reduce_scatter"):
        return []
    if place.units > 1 and op != "all_reduce":
        return []
    names: list[Algorithm] = ["nvls"] if place.units == 1 else ["nvls_tree"]
    if place.units > 1 and collnet:
        names.append("nvls")
    ratio = 1.0
    if op == "all_reduce":
        by_ranks = place.ranks / steps(op, place.ranks)
        ratio = by_ranks if release.nvls_model == "efficiency" else 5 / 6
    deep = {"nvls": int(place.units > 1), "nvls_tree": 2 * _log2(place.units)}
    return [
        Entry(
            algorithm=name,
            protocol="simple",
            base_us=release.base_us[name][SIMPLE],
            inside=1,
            inside_us=release.nvlink_us[name][SIMPLE],
            between=deep[name],
            between_us=_between_us(place, release, name, SIMPLE),
            algbw_gbps=graph.channels * _nvls_bus(op, place, graph, release, name) * ratio,
            channels=graph.channels,
        )
        for name in names
    ]


def _nvls_bus(op: Op, place: Placement, graph: Graph, release: Release, name: str) -> float:
    """Return the bus bandwidth of one channel."""
    share = 1 - 1 / place.per_unit
    row, trees = generation(place.links.sm), name == "nvls_tree"
    if release.nvls_model == "five-sixths":
        if trees:
            return min(graph.intra, graph.inter if place.units == 2 else graph.inter / 2)
        if op == "all_reduce":
            return min(graph.intra, graph.inter)
        return min(graph.intra * share, graph.inter * 0.9)
    inside = graph.intra * release.caps.nvls_efficiency[row]
    inside *= (graph.channels - 1) / graph.channels
    inside *= 2 if op == "all_reduce" else share
    if place.units == 1:
        return inside
    across = graph.inter * (2 if trees and place.units == 2 else 1)
    cap = release.caps.nvls_tree[row][_column(place)] if trees else float("inf")
    return min(inside, across, cap)


def _collnet(place: Placement, found: Graphs, release: Release) -> list[Entry]:
    """All-reduce in the fabric's switches, entered by a chain of GPUs or by one per card."""
    graph, ppn = found.tree, place.per_unit
    bus = graph.channels * graph.intra
    ratio = ppn / min(graph.channels, max(1, place.cards))
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
        Entry(
            algorithm=name,
            protocol="simple",
            base_us=release.base_us[name][SIMPLE],
            inside=inside,
            inside_us=inside_us,
            between=1,
            between_us=_between_us(place, release, name, SIMPLE),
            algbw_gbps=bandwidth * 0.5,
            channels=graph.channels,
        )
        for name, inside, inside_us, bandwidth in shapes
    ]


def _pat(place: Placement, graph: Graph, release: Release) -> Entry:
    bus = graph.channels * (graph.intra if place.units <= 2 else graph.inter) * 0.75
    return Entry(
        algorithm="pat",
        protocol="simple",
        base_us=release.base_us["pat"][SIMPLE],
        inside=place.ranks,
        inside_us=2.8,
        between=_log2(place.units) / 3.5,
        between_us=release.net_us["tree"][SIMPLE],
        algbw_gbps=bus,
        channels=graph.channels,
    )


def _log2(value: int) -> int:
    return value.bit_length() - 1
