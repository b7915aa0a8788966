"""Experts' exchanges: tokens sent to the ranks that hold their experts, and back.

Two ways are priced. Pairwise is NCCL's all-to-all with a copy per chosen expert, as
Megatron-Core's dispatcher does it. Hierarchical is DeepEP's: a token crosses the network once per
unit that wants it, along its own rail, and fast links pass it on inside. It knows routing as a
uniform draw with a factor for imbalance; routers and models are elsewhere.
"""

from typing import Literal

import msgspec

from meshwright.errors import InputError
from meshwright.predict.network.collective_cost import CollectiveCost, predict_collective
from meshwright.predict.network.link_corrections import get_link_kinds, load_corrections
from meshwright.predict.network.nccl_constants import DEFAULT_NCCL, get_release
from meshwright.predict.network.nccl_cost import US
from meshwright.predict.network.nccl_graph import nic_gbps, ring_capacity_gbps
from meshwright.predict.network.nccl_tuning import SIMPLE, post_us
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.wire_bound import inter_domain_bytes_per_s, intra_domain_bytes_per_s
from meshwright.spec.field_checks import FieldChecker

DispatcherKind = Literal["alltoall", "deepep"]

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
    max_domains: int | None = None
    """Units that one token may go to at most, where the router limits them."""
    load_imbalance: float = 1.0
    """Tokens of the busiest rank over the mean."""
    message_tokens: int = 1
    """Tokens that hierarchical kernels put into one message over the network. Training runs on EFA
    fit one; benchmarks, which search for the best chunk, fit DeepEP's 8."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(tokens=self.tokens, top_k=self.top_k, max_domains=self.max_domains)
        bounds.count(message_tokens=self.message_tokens)
        bounds.positive(token_bytes=self.token_bytes, load_imbalance=self.load_imbalance)
        if not bounds.problems and self.load_imbalance < 1:
            bounds.add(
                "load_imbalance", f"{self.load_imbalance:g} is below 1", "the busiest rank is at 1"
            )
        if bounds.problems:
            raise InputError(bounds.problems)


def predict_expert_dispatch(
    place: Placement,
    traffic: ExpertTraffic,
    *,
    style: DispatcherKind = "alltoall",
    multiprocessors: int = 20,
    nccl: str = DEFAULT_NCCL,
) -> CollectiveCost:
    """Return what one dispatch or one combine costs.

    `multiprocessors` are those that hierarchical kernels take from compute.
    """
    load = traffic.tokens * traffic.token_bytes * traffic.load_imbalance
    if place.ranks == 1 or style == "alltoall":
        return predict_collective(place, "all_to_all", load * traffic.top_k, nccl=nccl)
    to_ranks = expected_distinct(place.ranks, traffic.top_k)
    to_units = min(
        expected_distinct(place.domains, traffic.top_k), float(traffic.max_domains or place.domains)
    )
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
    if place.ranks_per_domain == 1:
        return 0.0, 0.0
    passed_on = nbytes * (1 - 1 / place.ranks_per_domain)
    kind = get_link_kinds(place)[0]
    each, reached = MULTIPROCESSOR_GBPS, REACHED
    if kind == "nvlink5":
        each, reached = NVLINK5_MULTIPROCESSOR_GBPS, NVLINK5_REACHED
    rate = ring_capacity_gbps(place) * load_corrections()[kind].efficiency * reached
    rate = min(rate, multiprocessors * each)
    return passed_on / (rate * 1e9), passed_on / intra_domain_bytes_per_s(place)


def _between(place: Placement, nbytes: float, message_bytes: float) -> tuple[float, float]:
    """Return the time of what network cards carry, and the least it can be."""
    if place.domains == 1:
        return 0.0, 0.0
    crossing = nbytes * (1 - 1 / place.domains)
    bound_s = crossing * place.ranks_per_domain / inter_domain_bytes_per_s(place)
    return crossing / message_bytes * message_s(place, message_bytes), bound_s


def message_s(place: Placement, nbytes: float) -> float:
    """Return what one message of a stream of them costs a rank: to its card, or to a neighbour."""
    inside, fabric = get_link_kinds(place)
    if place.domains == 1:
        return nbytes / (ring_capacity_gbps(place) * load_corrections()[inside].efficiency * 1e9)
    rate = place.nics * nic_gbps(place) / place.ranks_per_domain
    rate *= (
        load_corrections()[fabric].efficiency
        / place.groups_per_nic
        / place.all_to_all_oversubscription
    )
    return MESSAGE_US.get(fabric, 0.0) * US + nbytes / (rate * 1e9)


def _latency_s(place: Placement, nccl: str) -> float:
    constants = get_release(nccl)
    base_us = constants.base_us["ring"][SIMPLE]
    inside, fabric = get_link_kinds(place)
    if place.domains == 1:
        return (base_us + load_corrections()[inside].delay_us) * US
    between = load_corrections()[fabric]
    hop_us = constants.net_us["ring"][SIMPLE] + 2 * between.delay_us
    return (base_us + hop_us + (place.domains - 1) * post_us(SIMPLE)) * US


def expected_distinct(places: int, draws: int) -> float:
    """Return how many of `places` a token's `draws` experts lie in, on average."""
    return places * (1 - (1 - 1 / places) ** draws)
