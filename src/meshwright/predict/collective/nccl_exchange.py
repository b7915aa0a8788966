"""NCCL's all-to-all and point-to-point kernels as something to simulate.

NCCL does not choose between algorithms here: every rank sends each other rank its part, or every
rank sends to the next one. `network_at` gives a placement's links at the speeds NCCL reaches.
"""

from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.policy.collective import Builder, Collective, build
from meshwright.predict.collective.costs import Costs
from meshwright.predict.collective.network import Network
from meshwright.predict.collective.of_placement import placement_network
from meshwright.predict.collective.simulation import Simulated, simulate
from meshwright.predict.network.constants import fixed, release
from meshwright.predict.network.curve import Piece
from meshwright.predict.network.exchange import CHUNK_BYTES
from meshwright.predict.network.fabric import Correction, corrections, kinds
from meshwright.predict.network.graph import card_gbps, ring_capacity_gbps
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.pricing import US, Price
from meshwright.predict.network.tuning import LL, SIMPLE, post_us


class Case(NamedTuple):
    """What is simulated for one call of NCCL."""

    collective: Collective
    network: Network
    costs: Costs


@lru_cache(maxsize=1024)
def network_at(place: Placement, gpu: float, unit: float, post: float = float("inf")) -> Network:
    """Return the links of a placement: rates of a GPU, of a unit's cards, and of posting."""
    return placement_network(
        place, gpu_bytes_per_s=gpu, unit_bytes_per_s=unit, post_bytes_per_s=post
    )


def stream_s(price: Price, nbytes: float) -> float:
    """Return the part of a price that bytes over bandwidth take, at a size."""
    rest_s = price.seconds(nbytes) - price.latency_s
    if price.pipelined:
        # The price has latency + stream + √(latency · stream); the pipeline is simulated here.
        root = (sqrt(price.latency_s + 4 * rest_s) - sqrt(price.latency_s)) / 2
        rest_s = root * root
    return max(rest_s, 1e-15)


def exchange(
    place: Placement, nbytes: float, nccl: str, inside: Correction, between: Correction | None
) -> Case:
    """NCCL's all-to-all: every rank sends each other rank its part."""
    constants = release(nccl)
    costs = Costs(
        name="NCCL pairwise",
        base_s=(constants.base_us["ring"][SIMPLE] + (inside.delay_us if not between else 0.0)) * US,
        inside_hop_s=(place.per_unit - 1) * constants.nvlink_us["ring"][LL] * US,
        between_hop_s=0.0,
    )
    gpu = ring_capacity_gbps(place) * 1e9 * inside.efficiency if place.per_unit > 1 else 1e15
    unit, post = 1e15, float("inf")
    if between is not None:
        unit = place.cards * card_gbps(place) * 1e9
        unit *= between.efficiency / place.sharers / place.spread_thinning
        hop_us = constants.net_us["ring"][SIMPLE] + 2 * between.delay_us
        hop_s = max(hop_us * US, place.card_s) + place.switches_s
        slow_us = between.delay_us if between.per == "message" else 0.0
        post = nbytes / place.ranks / ((post_us(SIMPLE) + slow_us) * US)
        if slow_us:
            gap_us = fixed().net_overhead_simple * (post_us(LL) + slow_us)
            post = min(post, CHUNK_BYTES / (gap_us * US))
        costs = Costs(
            name=costs.name,
            base_s=costs.base_s,
            inside_hop_s=costs.inside_hop_s,
            between_hop_s=hop_s,
        )
    collective = _pairwise(place.ranks)
    return Case(collective, network_at(place, gpu, unit, max(post, 1.0)), costs)


def folded_exchange(place: Placement, nbytes: float, nccl: str) -> Simulated:
    """Simulate an all-to-all for one unit; every other unit does the same at the same time.

    What the unit sends elsewhere goes to stand-ins in a second unit. As much comes in as goes out,
    so the links into a unit are as busy as those out of it.
    """
    inside, fabric = kinds(place)
    case = exchange(place, nbytes, nccl, corrections()[inside], corrections()[fabric])
    width = place.per_unit
    rates = case.network.link_bytes_per_s
    pair = replace(place, ranks=2 * width, units=2)
    network = network_at(pair, float(rates[0]), float(rates[2 * place.ranks]), float(rates[-1]))
    return simulate(_folded(place.units, width), network, nbytes, costs=case.costs)


@lru_cache(maxsize=64)
def _folded(units: int, width: int) -> Collective:
    """Return what one unit of a pairwise all-to-all sends; each part of the message is 2 chunks."""
    ranks = units * width
    half = Builder("pairwise", "all_to_all", ranks=2 * width, chunks=2 * ranks)
    for step in range(1, ranks):
        with half.step():
            for rank in range(width):
                unit, local = divmod((rank + step) % ranks, width)
                target = local if unit == 0 else width + local
                slot = 2 * (unit * width + local)
                arrives = half.output + 2 * ((rank - local) % width + unit * width)
                half.copy(rank, target, chunk=slot, to=arrives, count=2, channel=unit)
    return half.done()


def neighbours(place: Placement, nbytes: float, piece: Piece) -> Case:
    """NCCL's point-to-point kernels: every rank sends to the next."""
    ranks, rate = place.ranks, nbytes / stream_s(piece.price, nbytes)
    collective = _ring_of_sends(ranks)
    network = network_at(place, rate, rate * place.per_unit)
    costs = Costs(
        name="NCCL p2p",
        base_s=piece.price.latency_s,
        inside_hop_s=0.0,
        between_hop_s=0.0,
    )
    return Case(collective, network, costs)


@lru_cache(maxsize=64)
def _ring_of_sends(ranks: int) -> Collective:
    return build("direct", "send_recv", ranks, peers=[(r + 1) % ranks for r in range(ranks)])


@lru_cache(maxsize=64)
def _pairwise(ranks: int) -> Collective:
    return build("pairwise", "all_to_all", ranks)
