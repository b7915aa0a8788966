"""Experts' exchanges: tokens sent to the ranks that hold their experts, and back.

Two ways are priced. Pairwise is NCCL's all-to-all with a copy per chosen expert, as
Megatron-Core's dispatcher does it. Hierarchical is DeepEP's: a token crosses the network once per
unit that wants it, along its own rail, and fast links pass it on inside. It knows routing as a
uniform draw with a factor for imbalance; routers and models are elsewhere.
"""

from typing import Literal

import msgspec

from meshwright.errors import InputError
from meshwright.predict.network.bounds import inside_bytes_per_s, unit_bytes_per_s
from meshwright.predict.network.collective import CollectiveCost, collective
from meshwright.predict.network.constants import DEFAULT_NCCL, release
from meshwright.predict.network.fabric import corrections, kinds
from meshwright.predict.network.graph import card_gbps, ring_capacity_gbps
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.pricing import US
from meshwright.predict.network.tuning import SIMPLE, post_us
from meshwright.spec.bounds import Bounds

Style = Literal["pairwise", "hierarchical"]

# DeepEP on 8 H100 (4096 tokens of 7168, 8 of 256 experts): 2068 µs on 4 multiprocessors, 492 on 20,
# 498 on 24 for 140 MB of fp8 dispatch; 3897, 983 and 961 for 272 MB of bf16 combine. So one
# multiprocessor moves 17 GB/s, and all of them 0.78 of what rings reach. Source: the measured
# operator tables of ai-dynamo/aiconfigurator (Apache-2.0).
MULTIPROCESSOR_GBPS, REACHED = 17.0, 0.78
# HybridEP on 8 B200 moves 536 GB/s of bf16 dispatch and 531 of combine on 16 multiprocessors; on
# GB200 550 and 538 over 8 ranks, 479 and 448 on 32 multiprocessors over 36 (its README, the calls
# timed from PyTorch): 33 GB/s each, and 0.6 of what rings reach.
NVLINK5_MULTIPROCESSOR_GBPS, NVLINK5_REACHED = 33.0, 0.6
# Cards differ in how many messages they can post. Raw RDMA between two p5 nodes along the rails
# moves 13.8 GB/s in messages of 8 KiB and 21.1 in messages of 16 KiB, 43.7 at best (UCCL's
# microbenchmark): 0.42 µs a message beside its bytes.
MESSAGE_US = {"efa": 0.42}


class ExpertTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sends in one dispatch (or gets back in one combine)."""

    tokens: int
    """Tokens of the rank."""
    token_bytes: float
    """Bytes of one token: hidden size times the precision, with its scales."""
    top_k: int
    """Experts that each token is sent to."""
    most_units: int | None = None
    """Units that one token may go to at most, where the router limits them."""
    imbalance: float = 1.0
    """Tokens of the busiest rank over the mean."""
    message_tokens: int = 1
    """Tokens that hierarchical kernels put into one message over the network. Training runs on EFA
    fit one; benchmarks, which search for the best chunk, fit DeepEP's 8."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(tokens=self.tokens, top_k=self.top_k, most_units=self.most_units)
        bounds.count(message_tokens=self.message_tokens)
        bounds.positive(token_bytes=self.token_bytes, imbalance=self.imbalance)
        if not bounds.problems and self.imbalance < 1:
            bounds.add("imbalance", f"{self.imbalance:g} is below 1", "the busiest rank is at 1")
        if bounds.problems:
            raise InputError(bounds.problems)


def expert_exchange(
    place: Placement,
    traffic: ExpertTraffic,
    *,
    style: Style = "pairwise",
    multiprocessors: int = 20,
    nccl: str = DEFAULT_NCCL,
) -> CollectiveCost:
    """Return what one dispatch or one combine costs.

    `multiprocessors` are those that hierarchical kernels take from compute.
    """
    load = traffic.tokens * traffic.token_bytes * traffic.imbalance
    if place.ranks == 1 or style == "pairwise":
        return collective(place, "all_to_all", load * traffic.top_k, nccl=nccl)
    to_ranks = distinct(place.ranks, traffic.top_k)
    to_units = min(distinct(place.units, traffic.top_k), float(traffic.most_units or place.units))
    inside_s, inside_bound_s = _inside(place, load * to_ranks, multiprocessors)
    message_bytes = traffic.message_tokens * traffic.token_bytes
    between_s, between_bound_s = _between(place, load * to_units, message_bytes)
    bound_s = max(inside_bound_s, between_bound_s)
    seconds = max(_latency_s(place, nccl) + max(inside_s, between_s), bound_s)
    return CollectiveCost(
        seconds=seconds,
        algorithm="hierarchical",
        protocol="",
        channels=multiprocessors,
        busbw_bytes_per_s=load * to_ranks * (1 - 1 / place.ranks) / seconds,
        bound_s=bound_s,
    )


def _inside(place: Placement, nbytes: float, multiprocessors: int) -> tuple[float, float]:
    """Return the time of what fast links carry, and the least it can be."""
    if place.per_unit == 1:
        return 0.0, 0.0
    passed_on = nbytes * (1 - 1 / place.per_unit)
    kind = kinds(place)[0]
    each, reached = MULTIPROCESSOR_GBPS, REACHED
    if kind == "nvlink5":
        each, reached = NVLINK5_MULTIPROCESSOR_GBPS, NVLINK5_REACHED
    rate = ring_capacity_gbps(place) * corrections()[kind].efficiency * reached
    rate = min(rate, multiprocessors * each)
    return passed_on / (rate * 1e9), passed_on / inside_bytes_per_s(place)


def _between(place: Placement, nbytes: float, message_bytes: float) -> tuple[float, float]:
    """Return the time of what network cards carry, and the least it can be."""
    if place.units == 1:
        return 0.0, 0.0
    crossing = nbytes * (1 - 1 / place.units)
    bound_s = crossing * place.per_unit / unit_bytes_per_s(place)
    return crossing / message_bytes * message_s(place, message_bytes), bound_s


def message_s(place: Placement, nbytes: float) -> float:
    """Return what one message of a stream of them costs a rank: to its card, or to a neighbour."""
    inside, fabric = kinds(place)
    if place.units == 1:
        return nbytes / (ring_capacity_gbps(place) * corrections()[inside].efficiency * 1e9)
    rate = place.cards * card_gbps(place) / place.per_unit
    rate *= corrections()[fabric].efficiency / place.sharers / place.spread_thinning
    return MESSAGE_US.get(fabric, 0.0) * US + nbytes / (rate * 1e9)


def _latency_s(place: Placement, nccl: str) -> float:
    constants = release(nccl)
    base_us = constants.base_us["ring"][SIMPLE]
    inside, fabric = kinds(place)
    if place.units == 1:
        return (base_us + corrections()[inside].delay_us) * US
    between = corrections()[fabric]
    hop_us = constants.net_us["ring"][SIMPLE] + 2 * between.delay_us
    return (base_us + hop_us + (place.units - 1) * post_us(SIMPLE)) * US


def distinct(places: int, draws: int) -> float:
    """Return how many of `places` a token's `draws` experts lie in, on average."""
    return places * (1 - (1 - 1 / places) ** draws)
