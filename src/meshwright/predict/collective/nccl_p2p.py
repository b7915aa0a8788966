"""NCCL's all-to-all and point-to-point kernels as something to simulate.

NCCL does not choose between algorithms here: every rank sends each other rank its part, or every
rank sends to the next one. `build_network_at_rates` gives a placement's links at the speeds NCCL
reaches.
"""

from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.policy.collective import Collective, CollectiveBuilder, build_algorithm
from meshwright.predict.collective.message_costs import MessageCosts
from meshwright.predict.collective.placement_network import build_placement_network
from meshwright.predict.collective.sim_network import SimNetwork
from meshwright.predict.collective.simulation import SimulatedCollective, simulate_collective
from meshwright.predict.network.cost_curve import CurveSegment
from meshwright.predict.network.link_corrections import (
    LinkCorrection,
    get_link_kinds,
    load_corrections,
)
from meshwright.predict.network.nccl_constants import get_fixed_constants, get_release
from meshwright.predict.network.nccl_cost import US, AlphaBetaCost
from meshwright.predict.network.nccl_graph import nic_gbps, ring_capacity_gbps
from meshwright.predict.network.nccl_p2p_cost import CHUNK_BYTES
from meshwright.predict.network.nccl_tuning import LL, SIMPLE, post_us
from meshwright.predict.network.placement import Placement


class NcclP2PCall(NamedTuple):
    """What is simulated for one call of NCCL."""

    collective: Collective
    network: SimNetwork
    costs: MessageCosts


@lru_cache(maxsize=1024)
def build_network_at_rates(
    place: Placement, gpu: float, unit: float, post: float = float("inf")
) -> SimNetwork:
    """Return the links of a placement: rates of a GPU, of a unit's cards, and of posting."""
    return build_placement_network(
        place, gpu_bytes_per_s=gpu, unit_bytes_per_s=unit, post_bytes_per_s=post
    )


def stream_s(price: AlphaBetaCost, nbytes: float) -> float:
    """Return the part of a price that bytes over bandwidth take, at a size."""
    rest_s = price.predict_s(nbytes) - price.latency_s
    if price.pipelined:
        # The price has latency + stream + √(latency · stream); the pipeline is simulated here.
        root = (sqrt(price.latency_s + 4 * rest_s) - sqrt(price.latency_s)) / 2
        rest_s = root * root
    return max(rest_s, 1e-15)


def build_all_to_all(
    place: Placement,
    nbytes: float,
    nccl: str,
    inside: LinkCorrection,
    between: LinkCorrection | None,
) -> NcclP2PCall:
    """NCCL's all-to-all: every rank sends each other rank its part."""
    constants = get_release(nccl)
    costs = MessageCosts(
        name="NCCL pairwise",
        base_s=(constants.base_us["ring"][SIMPLE] + (inside.delay_us if not between else 0.0)) * US,
        intra_hop_s=(place.ranks_per_domain - 1) * constants.nvlink_us["ring"][LL] * US,
        inter_hop_s=0.0,
    )
    gpu = (
        ring_capacity_gbps(place) * 1e9 * inside.efficiency if place.ranks_per_domain > 1 else 1e15
    )
    unit, post = 1e15, float("inf")
    if between is not None:
        unit = place.nics * nic_gbps(place) * 1e9
        unit *= between.efficiency / place.groups_per_nic / place.all_to_all_oversubscription
        hop_us = constants.net_us["ring"][SIMPLE] + 2 * between.delay_us
        hop_s = max(hop_us * US, place.nic_latency_s) + place.switch_latency_s
        slow_us = between.delay_us if between.per == "message" else 0.0
        post = nbytes / place.ranks / ((post_us(SIMPLE) + slow_us) * US)
        if slow_us:
            gap_us = get_fixed_constants().net_overhead_simple * (post_us(LL) + slow_us)
            post = min(post, CHUNK_BYTES / (gap_us * US))
        costs = MessageCosts(
            name=costs.name,
            base_s=costs.base_s,
            intra_hop_s=costs.intra_hop_s,
            inter_hop_s=hop_s,
        )
    collective = _pairwise(place.ranks)
    return NcclP2PCall(collective, build_network_at_rates(place, gpu, unit, max(post, 1.0)), costs)


def simulate_folded_all_to_all(place: Placement, nbytes: float, nccl: str) -> SimulatedCollective:
    """Simulate an all-to-all for one unit; every other unit does the same at the same time.

    What the unit sends elsewhere goes to stand-ins in a second unit. As much comes in as goes out,
    so the links into a unit are as busy as those out of it.
    """
    inside, fabric = get_link_kinds(place)
    case = build_all_to_all(
        place, nbytes, nccl, load_corrections()[inside], load_corrections()[fabric]
    )
    width = place.ranks_per_domain
    rates = case.network.link_bytes_per_s
    pair = replace(place, ranks=2 * width, domains=2)
    network = build_network_at_rates(
        pair, float(rates[0]), float(rates[2 * place.ranks]), float(rates[-1])
    )
    return simulate_collective(_folded(place.domains, width), network, nbytes, costs=case.costs)


@lru_cache(maxsize=64)
def _folded(units: int, width: int) -> Collective:
    """Return what one unit of a pairwise all-to-all sends; each part of the message is 2 chunks."""
    ranks = units * width
    half = CollectiveBuilder("pairwise", "all_to_all", ranks=2 * width, chunks=2 * ranks)
    for step in range(1, ranks):
        with half.step():
            for rank in range(width):
                unit, local = divmod((rank + step) % ranks, width)
                target = local if unit == 0 else width + local
                slot = 2 * (unit * width + local)
                arrives = half.output + 2 * ((rank - local) % width + unit * width)
                half.copy(rank, target, chunk=slot, to=arrives, count=2, channel=unit)
    return half.build()


def build_send_recv(place: Placement, nbytes: float, piece: CurveSegment) -> NcclP2PCall:
    """NCCL's point-to-point kernels: every rank sends to the next."""
    ranks, rate = place.ranks, nbytes / stream_s(piece.cost, nbytes)
    collective = _ring_of_sends(ranks)
    network = build_network_at_rates(place, rate, rate * place.ranks_per_domain)
    costs = MessageCosts(
        name="NCCL p2p",
        base_s=piece.cost.latency_s,
        intra_hop_s=0.0,
        inter_hop_s=0.0,
    )
    return NcclP2PCall(collective, network, costs)


@lru_cache(maxsize=64)
def _ring_of_sends(ranks: int) -> Collective:
    return build_algorithm(
        "direct", "send_recv", ranks, peers=[(r + 1) % ranks for r in range(ranks)]
    )


@lru_cache(maxsize=64)
def _pairwise(ranks: int) -> Collective:
    return build_algorithm("pairwise", "all_to_all", ranks)
