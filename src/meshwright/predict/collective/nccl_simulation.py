"""What NCCL would run, simulated: its algorithm, protocol and speeds, carried out move by move.

NCCL's choice and its figures come from `predict.network`: a latency per call and hop, and the
bandwidth of all channels together. Here they become links and hops of a network, and the library's
algorithm of that name runs on it. The closed form of `predict.network` then is an independent
answer to the same question.
"""

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from meshwright.policy.collective import Collective, build_algorithm
from meshwright.policy.collective.phase_pipelining import pipeline_phases
from meshwright.predict.collective.message_costs import MessageCosts
from meshwright.predict.collective.nccl_p2p import (
    NcclP2PCall,
    build_all_to_all,
    build_network_at_rates,
    build_send_recv,
    simulate_folded_all_to_all,
    stream_s,
)
from meshwright.predict.collective.simulation import SimulatedCollective, simulate_collective
from meshwright.predict.network.collective_cost import predict_collective
from meshwright.predict.network.cost_curve import CurveSegment, build_curve
from meshwright.predict.network.link_corrections import get_link_kinds, load_corrections
from meshwright.predict.network.nccl_constants import DEFAULT_NCCL, get_fixed_constants
from meshwright.predict.network.nccl_cost import US, nvls_gbps
from meshwright.predict.network.nccl_graph import ring_capacity_gbps
from meshwright.predict.network.nccl_tuning import (
    NcclOp,
    TuningEntry,
    count_kernel_channels,
    count_ring_steps,
)
from meshwright.predict.network.placement import Placement, build_placement
from meshwright.predict.network.wire_bound import bound_s_per_byte, intra_domain_bytes_per_s
from meshwright.spec.cluster import Cluster

STEP_BYTES = {"simple": 524288, "ll128": 576000, "ll": 32768}

NVLS_BYTES = 131072

_NVLS_SHRINKS = ((64, 65536), (8, 32768), (2, 16384))

_NVLS_TREE_SHRINKS = ((16, 131072), (4, 65536), (1, 32768))

_FAR_UNITS, _FAR_BYTES = 4, 65536


def count_chunks(
    place: Placement, entry: TuningEntry, nbytes: float, channels: int, most: int
) -> int:
    """Return how many chunks of a message follow each other on a channel, at most `most`."""
    if entry.algorithm == "ring" and entry.protocol != "simple":
        # Their flags come with every line of 8 or 128 bytes, so ranks pass lines on, not chunks.
        return most
    chunk = float(STEP_BYTES[entry.protocol])
    share = nbytes / max(1, channels)
    if entry.algorithm in ("nvls", "nvls_tree"):
        heads = min(place.ranks_per_domain, get_fixed_constants().max_nvls_heads)
        share /= heads
        chunk = _nvls_bytes(place, entry, share)
    elif entry.algorithm == "tree" and entry.protocol == "ll128":
        hops = 1 + place.domains.bit_length() - 1 + 0.1 * place.ranks_per_domain
        for times, least in ((64, 131072), (16, 32768)):
            while share / chunk < hops * times / place.ranks_per_domain and chunk > least:
                chunk /= 2
    return max(1, min(most, round(share / chunk)))


def _nvls_bytes(place: Placement, entry: TuningEntry, share: float) -> float:
    """Return the chunk of one head."""
    if entry.algorithm == "nvls":
        chunk, shrinks = NVLS_BYTES, _NVLS_SHRINKS
    else:
        chunk = _FAR_BYTES if place.domains >= _FAR_UNITS else NVLS_BYTES
        shrinks = _NVLS_TREE_SHRINKS
    for times, smaller in shrinks:
        if share < times * chunk and chunk > smaller:
            chunk = smaller
    return float(chunk)


_NAMES = {
    "ring": "ring",
    "tree": "double_tree",
    "nvls": "nvls",
    "nvls_tree": "nvls_tree",
    "collnet_direct": "sharp",
    "collnet_chain": "sharp",
    "pat": "pat",
}
"""NCCL's algorithms by the names of the library."""

_SWITCHED = ("nvls", "nvls_tree", "sharp")

_FOLDED_RANKS = 64
"""All-to-alls over more ranks than this are simulated for one unit, which stands for all."""

_MOST_PARTS = 16

_MOST_PIECES = 48
"""Beyond this more pieces change little and take long to simulate."""


def predict_nccl(
    cluster: Cluster,
    op: NcclOp,
    nbytes: float,
    members: Sequence[int] | None = None,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> SimulatedCollective:
    """Simulate what NCCL would run for a collective on GPUs of a cluster that nobody else uses."""
    ranks = range(cluster.gpus) if members is None else members
    place = build_placement(cluster, ranks, sharers=1)
    return simulate_nccl(place, op, nbytes, nccl=nccl, collnet=collnet, only=only)


def simulate_nccl(
    place: Placement,
    op: NcclOp,
    nbytes: float,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> SimulatedCollective:
    """Simulate what NCCL would run for a collective on a group of at least two ranks."""
    # Refuses what cannot be asked, with every fault.
    predict_collective(place, op, nbytes, nccl=nccl, collnet=collnet, only=only)
    case = _case(place, op, nbytes, nccl=nccl, collnet=collnet, only=only)
    return simulate_collective(case.collective, case.network, nbytes, costs=case.costs)


def simulate_nccl_us(
    place: Placement,
    op: NcclOp,
    nbytes: float,
    *,
    nccl: str = DEFAULT_NCCL,
    only: tuple[str, ...] | None = None,
) -> float:
    """Return the simulated microseconds of a call, never below what the wires allow."""
    if place.ranks == 1:
        return 0.0
    if op == "all_to_all" and place.ranks > _FOLDED_RANKS and place.domains > 1:
        result = simulate_folded_all_to_all(place, nbytes, nccl)
    else:
        result = simulate_nccl(place, op, nbytes, nccl=nccl, only=only)
    return max(result.seconds, nbytes * bound_s_per_byte(op, place)) / US


def _case(
    place: Placement,
    op: NcclOp,
    nbytes: float,
    *,
    nccl: str,
    collnet: bool,
    only: tuple[str, ...] | None,
) -> NcclP2PCall:
    if op == "all_to_all":
        inside, fabric = get_link_kinds(place)
        between = load_corrections()[fabric] if place.domains > 1 else None
        return build_all_to_all(place, nbytes, nccl, load_corrections()[inside], between)
    piece = build_curve(place, op, nccl, collnet, only).find_segment(nbytes)
    if piece.entry is None:
        return build_send_recv(place, nbytes, piece)
    return _algorithm(place, op, nbytes, piece, piece.entry)


def _algorithm(
    place: Placement,
    op: NcclOp,
    nbytes: float,
    piece: CurveSegment,
    entry: TuningEntry,
) -> NcclP2PCall:
    """A collective of one of NCCL's algorithms."""
    price = piece.cost
    between = load_corrections()[get_link_kinds(place)[1]] if place.domains > 1 else None
    hop_s = 0.0
    if between is not None:
        flush = 2 if entry.protocol == "simple" else 1
        hop_us = entry.inter_hop_us + between.delay_us * flush
        hop_s = max(hop_us * US, place.nic_latency_s) + place.switch_latency_s
    base_s = entry.base_us * US
    rest_s = max(0.0, price.latency_s - base_s - entry.inter_hops * hop_s)
    if between is None:
        # A delay per call belongs to no hop.
        call_s = max(0.0, rest_s - entry.intra_hops * entry.intra_hop_us * US)
        base_s, rest_s = base_s + call_s, rest_s - call_s
    name = _NAMES[entry.algorithm]
    inside_s = rest_s / entry.intra_hops if entry.intra_hops else 0.0
    if name in _SWITCHED:
        # One hop of NCCL's model is into the switch, back, and the same again for the results.
        inside_s /= 4
    if name in _SWITCHED and place.domains * place.ranks_per_domain != place.ranks:
        # Units that are not all alike are taken to be, as in the closed form.
        place = replace(place, ranks=place.domains * place.ranks_per_domain)
    unit, gpu = _speeds(place, op, entry, nbytes / stream_s(price, nbytes))
    built = _built(
        name, op, place.ranks, place.ranks_per_domain, _pieces(place, op, nbytes, piece, entry)
    )
    network = build_network_at_rates(place, gpu, unit)
    costs = MessageCosts(
        name=f"NCCL {entry.algorithm} {entry.protocol}",
        base_s=base_s,
        intra_hop_s=inside_s,
        inter_hop_s=hop_s,
    )
    return NcclP2PCall(built, network, costs)


def _speeds(
    place: Placement, op: NcclOp, entry: TuningEntry, algbw_bytes_per_s: float
) -> tuple[float, float]:
    """Return what a unit and a GPU send per second, from the algorithm's bandwidth.

    A ring passes each byte of the message on 2(n − 1)/n times (half of that without the sums), a
    rank of a double tree sends and receives it twice, and NVLS moves it into the switch with the
    share of one rank more.
    """
    one_unit = place.domains == 1
    if entry.algorithm in ("nvls", "nvls_tree") or entry.algorithm.startswith("collnet"):
        inside = load_corrections()[get_link_kinds(place)[0]].efficiency
        gpu = nvls_gbps(place) * 1e9 * inside if place.ranks_per_domain > 1 else algbw_bytes_per_s
        if one_unit:
            gpu = algbw_bytes_per_s
        gpu *= 1 + 1 / place.ranks_per_domain if op == "all_reduce" else 1
        trees = 2 if entry.algorithm == "nvls_tree" and place.domains > 2 else 1
        return algbw_bytes_per_s * trees, max(gpu, algbw_bytes_per_s)
    if entry.algorithm == "tree":
        bus = 2 * algbw_bytes_per_s
    elif entry.algorithm == "pat":
        bus = algbw_bytes_per_s * (1 - 1 / place.ranks)
    else:
        bus = algbw_bytes_per_s * count_ring_steps(op, place.ranks) / place.ranks
    fast = ring_capacity_gbps(place) * 1e9 if place.ranks_per_domain > 1 else bus
    return bus, bus if one_unit else max(bus, min(fast, intra_domain_bytes_per_s(place)))


def _pieces(
    place: Placement, op: NcclOp, nbytes: float, piece: CurveSegment, entry: TuningEntry
) -> int:
    """Return how many chunks follow each other; a ring has one chunk per rank and no more."""
    streams = op in ("broadcast", "reduce")
    if entry.algorithm in ("ring", "pat") and not streams:
        return 1
    channels = count_kernel_channels(entry, place, nbytes, piece.channels)
    return count_chunks(place, entry, nbytes, channels, _MOST_PIECES)


@lru_cache(maxsize=256)
def _built(name: str, op: NcclOp, ranks: int, per_unit: int, parts: int) -> Collective:
    per_node = per_unit if per_unit < ranks else None
    if name in _SWITCHED:
        found = build_algorithm(name, op, ranks, per_node=per_node, pieces=1)
        return pipeline_phases(found, min(parts, _MOST_PARTS)) if op == "all_reduce" else found
    streams = name in ("double_tree",) or op in ("broadcast", "reduce")
    return build_algorithm(name, op, ranks, per_node=per_node, pieces=parts if streams else None)
