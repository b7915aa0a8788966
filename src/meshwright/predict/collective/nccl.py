"""What NCCL would run, simulated: its algorithm, protocol and speeds, carried out move by move.

NCCL's choice and its figures come from `predict.network`: a latency per call and hop, and the
bandwidth of all channels together. Here they become links and hops of a network, and the library's
algorithm of that name runs on it. The closed form of `predict.network` then is an independent
answer to the same question.
"""

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from meshwright.policy.collective import Collective, build
from meshwright.policy.collective.streaming import streamed
from meshwright.predict.collective.costs import Costs
from meshwright.predict.collective.nccl_chunks import pieces
from meshwright.predict.collective.nccl_exchange import (
    Case,
    exchange,
    folded_exchange,
    neighbours,
    network_at,
    stream_s,
)
from meshwright.predict.collective.simulation import Simulated, simulate
from meshwright.predict.network.bounds import bound_s_per_byte, inside_bytes_per_s
from meshwright.predict.network.collective import collective as priced
from meshwright.predict.network.constants import DEFAULT_NCCL
from meshwright.predict.network.curve import Piece, curve
from meshwright.predict.network.fabric import corrections, kinds
from meshwright.predict.network.graph import ring_capacity_gbps
from meshwright.predict.network.placement import Placement, placement
from meshwright.predict.network.pricing import US, nvls_gbps
from meshwright.predict.network.tuning import (
    Entry,
    Op,
    kernel_channels,
    steps,
)
from meshwright.spec.cluster import Cluster

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
    op: Op,
    nbytes: float,
    members: Sequence[int] | None = None,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> Simulated:
    """Simulate what NCCL would run for a collective on GPUs of a cluster that nobody else uses."""
    ranks = range(cluster.gpus) if members is None else members
    place = placement(cluster, ranks, sharers=1)
    return simulate_nccl(place, op, nbytes, nccl=nccl, collnet=collnet, only=only)


def simulate_nccl(
    place: Placement,
    op: Op,
    nbytes: float,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> Simulated:
    """Simulate what NCCL would run for a collective on a group of at least two ranks."""
    # Refuses what cannot be asked, with every fault.
    priced(place, op, nbytes, nccl=nccl, collnet=collnet, only=only)
    case = _case(place, op, nbytes, nccl=nccl, collnet=collnet, only=only)
    return simulate(case.collective, case.network, nbytes, costs=case.costs)


def simulated_us(
    place: Placement,
    op: Op,
    nbytes: float,
    *,
    nccl: str = DEFAULT_NCCL,
    only: tuple[str, ...] | None = None,
) -> float:
    """Return the simulated microseconds of a call, never below what the wires allow."""
    if place.ranks == 1:
        return 0.0
    if op == "all_to_all" and place.ranks > _FOLDED_RANKS and place.units > 1:
        result = folded_exchange(place, nbytes, nccl)
    else:
        result = simulate_nccl(place, op, nbytes, nccl=nccl, only=only)
    return max(result.seconds, nbytes * bound_s_per_byte(op, place)) / US


def _case(
    place: Placement,
    op: Op,
    nbytes: float,
    *,
    nccl: str,
    collnet: bool,
    only: tuple[str, ...] | None,
) -> Case:
    if op == "all_to_all":
        inside, fabric = kinds(place)
        between = corrections()[fabric] if place.units > 1 else None
        return exchange(place, nbytes, nccl, corrections()[inside], between)
    piece = curve(place, op, nccl, collnet, only).piece(nbytes)
    if piece.entry is None:
        return neighbours(place, nbytes, piece)
    return _algorithm(place, op, nbytes, piece, piece.entry)


def _algorithm(
    place: Placement,
    op: Op,
    nbytes: float,
    piece: Piece,
    entry: Entry,
) -> Case:
    """A collective of one of NCCL's algorithms."""
    price = piece.price
    between = corrections()[kinds(place)[1]] if place.units > 1 else None
    hop_s = 0.0
    if between is not None:
        flush = 2 if entry.protocol == "simple" else 1
        hop_us = entry.between_us + between.delay_us * flush
        hop_s = max(hop_us * US, place.card_s) + place.switches_s
    base_s = entry.base_us * US
    rest_s = max(0.0, price.latency_s - base_s - entry.between * hop_s)
    if between is None:
        # A delay per call belongs to no hop.
        call_s = max(0.0, rest_s - entry.inside * entry.inside_us * US)
        base_s, rest_s = base_s + call_s, rest_s - call_s
    name = _NAMES[entry.algorithm]
    inside_s = rest_s / entry.inside if entry.inside else 0.0
    if name in _SWITCHED:
        # One hop of NCCL's model is into the switch, back, and the same again for the results.
        inside_s /= 4
    if name in _SWITCHED and place.units * place.per_unit != place.ranks:
        # Units that are not all alike are taken to be, as in the closed form.
        place = replace(place, ranks=place.units * place.per_unit)
    unit, gpu = _speeds(place, op, entry, nbytes / stream_s(price, nbytes))
    built = _built(name, op, place.ranks, place.per_unit, _pieces(place, op, nbytes, piece, entry))
    network = network_at(place, gpu, unit)
    costs = Costs(
        name=f"NCCL {entry.algorithm} {entry.protocol}",
        base_s=base_s,
        inside_hop_s=inside_s,
        between_hop_s=hop_s,
    )
    return Case(built, network, costs)


def _speeds(
    place: Placement, op: Op, entry: Entry, algbw_bytes_per_s: float
) -> tuple[float, float]:
    """Return what a unit and a GPU send per second, from the algorithm's bandwidth.

    A ring passes each byte of the message on 2(n − 1)/n times (half of that without the sums), a
    rank of a double tree sends and receives it twice, and NVLS moves it into the switch with the
    share of one rank more.
    """
    one_unit = place.units == 1
    if entry.algorithm in ("nvls", "nvls_tree") or entry.algorithm.startswith("collnet"):
        inside = corrections()[kinds(place)[0]].efficiency
        gpu = nvls_gbps(place) * 1e9 * inside if place.per_unit > 1 else algbw_bytes_per_s
        if one_unit:
            gpu = algbw_bytes_per_s
        gpu *= 1 + 1 / place.per_unit if op == "all_reduce" else 1
        trees = 2 if entry.algorithm == "nvls_tree" and place.units > 2 else 1
        return algbw_bytes_per_s * trees, max(gpu, algbw_bytes_per_s)
    if entry.algorithm == "tree":
        bus = 2 * algbw_bytes_per_s
    elif entry.algorithm == "pat":
        bus = algbw_bytes_per_s * (1 - 1 / place.ranks)
    else:
        bus = algbw_bytes_per_s * steps(op, place.ranks) / place.ranks
    fast = ring_capacity_gbps(place) * 1e9 if place.per_unit > 1 else bus
    return bus, bus if one_unit else max(bus, min(fast, inside_bytes_per_s(place)))


def _pieces(place: Placement, op: Op, nbytes: float, piece: Piece, entry: Entry) -> int:
    """Return how many chunks follow each other; a ring has one chunk per rank and no more."""
    streams = op in ("broadcast", "reduce")
    if entry.algorithm in ("ring", "pat") and not streams:
        return 1
    channels = kernel_channels(entry, place, nbytes, piece.channels)
    return pieces(place, entry, nbytes, channels, _MOST_PIECES)


@lru_cache(maxsize=256)
def _built(name: str, op: Op, ranks: int, per_unit: int, parts: int) -> Collective:
    per_node = per_unit if per_unit < ranks else None
    if name in _SWITCHED:
        found = build(name, op, ranks, per_node=per_node, pieces=1)
        return streamed(found, min(parts, _MOST_PARTS)) if op == "all_reduce" else found
    streams = name in ("double_tree",) or op in ("broadcast", "reduce")
    return build(name, op, ranks, per_node=per_node, pieces=parts if streams else None)
