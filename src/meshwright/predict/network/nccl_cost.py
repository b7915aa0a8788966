"""What an algorithm really costs: NCCL's latencies and bandwidths with the fabric's corrections.

A `AlphaBetaCost` is a few numbers, so that a size is priced in a few operations. NCCL's own
estimate, which decides the algorithm, is in `tuning`; here its figures become seconds.
"""

from math import sqrt
from typing import NamedTuple

from meshwright.predict.network.link_corrections import LinkCorrection
from meshwright.predict.network.nccl_constants import (
    NcclRelease,
    get_fixed_constants,
    get_generation_row,
    get_release,
    look_up_by_sm,
)
from meshwright.predict.network.nccl_graph import nic_gbps, nvlink_gbps
from meshwright.predict.network.nccl_tuning import NcclOp, TuningEntry, channel_bytes
from meshwright.predict.network.placement import Placement

US = 1e-6


class AlphaBetaCost(NamedTuple):
    """Seconds of a call: `latency_s + bytes · s_per_byte`, and what filling a pipeline adds."""

    latency_s: float
    s_per_byte: float
    pipelined: bool
    """Whether the message flows through its hops in chunks, rather than around a ring."""
    channels: int = 1
    """Channels that share the stream; a message too small for all of them takes fewer."""
    channel_bytes: float = 0.0
    """What a channel must get before NCCL takes the next one."""

    def predict_s(self, nbytes: float) -> float:
        """Return the time of a message.

        A stream cut into k chunks over h hops of start-up a takes (k + h)·(a + stream/k). With
        the best k that is the sum of both parts and a cross term 2·√(latency · stream). Half of
        it fits measured trees and NVLS on every fabric (0, 0.7, 1 and 1.5 were tried for the
        factor); rings, whose steps are counted one by one, show none. A message on one channel
        in many streams at that part of the rate, and stays that long until all have their share.
        """
        widest = max(nbytes, self.channels * min(nbytes, self.channel_bytes))
        stream_s = widest * self.s_per_byte
        if not self.pipelined:
            return self.latency_s + stream_s
        return self.latency_s + stream_s + sqrt(self.latency_s * stream_s)


# Rings that gather or scatter inside a unit also copy each rank's own block from one buffer to the
# other, which takes part of a step. Bus bandwidth over 2 GPUs is 0.78 of that over 8 on H100
# (meta-pytorch/autoparallel's table) and 0.70 on B200 (dranet), over 4 H100 0.92 (xxrjun): 0.28,
# 0.43 and 0.3 of a step.
OWN_BLOCK_STEPS = 0.4


def compute_algorithm_cost(
    entry: TuningEntry,
    op: NcclOp,
    place: Placement,
    links: tuple[LinkCorrection, LinkCorrection | None],
    channels: int = 1,
) -> AlphaBetaCost:
    """Return the price of one algorithm with one protocol on up to `channels` channels.

    `links` corrects what is inside units and, where there are several, what is between them.
    """
    inside, between = links
    twice = 2 if entry.protocol == "simple" else 1
    latency_us = entry.base_us
    if between is None:
        latency_us += entry.intra_hops * entry.intra_hop_us
        latency_us += inside.delay_us if inside.per == "call" else 0.0
    else:
        latency_us += entry.intra_hops * _step_us(entry, between)
        # NCCL counts a card's latency twice for Simple, whose data needs a flush.
        hop_us = entry.inter_hop_us + between.delay_us * twice
        hop_us = max(hop_us, place.nic_latency_s / US) + place.switch_latency_s / US
        latency_us += entry.inter_hops * hop_us
    gbps = _gbps(entry, op, place, inside, between)
    pipelined = entry.algorithm not in ("ring", "pat")
    if entry.algorithm != "ring" or entry.protocol != "ll":
        # Other protocols get more channels so early that it does not show.
        return AlphaBetaCost(latency_us * US, 1e-9 / gbps, pipelined)
    return AlphaBetaCost(
        latency_us * US, 1e-9 / gbps, pipelined, channels, channel_bytes(entry, place)
    )


def _step_us(entry: TuningEntry, between: LinkCorrection) -> float:
    """Return one step inside a unit while others of the ring post to the network."""
    if entry.algorithm != "ring" or between.per != "message":
        return entry.intra_hop_us
    posts = get_fixed_constants().net_overhead_simple if entry.protocol == "simple" else 1
    return max(
        entry.intra_hop_us,
        posts * (get_fixed_constants().net_overhead_us["intel"] + between.delay_us),
    )


def _gbps(
    entry: TuningEntry,
    op: NcclOp,
    place: Placement,
    inside: LinkCorrection,
    between: LinkCorrection | None,
) -> float:
    """Return the bytes of the message per nanosecond, at the slower of the two kinds of link."""
    if between is None:
        found = entry.algbw_gbps
        if entry.algorithm == "nvls" and op == "all_reduce":
            found = nvls_gbps(place)
        if entry.algorithm == "ring" and op in ("all_gather", "reduce_scatter"):
            found *= (place.ranks - 1) / (place.ranks - 1 + OWN_BLOCK_STEPS)
        return found * inside.efficiency
    network = between.efficiency / place.network_slowdown
    if entry.algorithm not in ("nvls", "nvls_tree"):
        return entry.algbw_gbps * network
    cards = min(place.nics, get_fixed_constants().max_nvls_heads) * nic_gbps(place)
    # Two trees, each through half of the nodes: a unit of many sends and receives twice.
    trees = entry.algorithm == "nvls_tree" and place.domains > 2
    return min(nvls_gbps(place) * inside.efficiency, cards / (2 if trees else 1) * network)


def nvls_gbps(place: Placement) -> float:
    """Return what an all-reduce through the switch reaches inside one unit.

    The newest NCCL's model of it matches measurements of every release (8 H100: 476 GB/s bus
    bandwidth, 473 to 481 measured; 8 B200: 829, 835 to 842), so it serves all of them.
    """
    newest: NcclRelease = get_release("2.30")
    sm, heads = place.links.sm, min(place.ranks_per_domain, get_fixed_constants().max_nvls_heads)
    room = nvlink_gbps(place.links) / (heads + 1)
    speeds: tuple[float, ...] = look_up_by_sm(newest.speeds_intra, sm)
    speed = next((speed for speed in speeds if speed <= room + 1e-6), room)
    bus = 2 * (heads - 1) * speed * newest.caps.nvls_efficiency[get_generation_row(sm)]
    return bus * place.ranks_per_domain / (2 * (place.ranks_per_domain - 1))
