"""All-to-all and point-to-point: what NCCL's send and receive kernels cost.

NCCL does not choose between algorithms here, only how many channels a message is split over. This
module knows those rules and prices the result.
"""

from typing import NamedTuple

from meshwright.predict.network.link_corrections import LinkCorrection
from meshwright.predict.network.nccl_constants import (
    NcclRelease,
    get_fixed_constants,
    look_up_by_sm,
)
from meshwright.predict.network.nccl_cost import US, AlphaBetaCost
from meshwright.predict.network.nccl_graph import (
    find_graphs,
    nic_gbps,
    nvlink_gbps,
    ring_capacity_gbps,
)
from meshwright.predict.network.nccl_tuning import LL, SIMPLE, count_comm_channels, post_us
from meshwright.predict.network.placement import Placement

# NCCL 2.30.7: p2p channels, chunk per message between nodes, the most bytes of one channel inside
# a node (32 chunks of 512 KiB), and what one channel to a network peer is planned for.
CHANNELS = 32
CHUNK_BYTES = 131072
PART_BYTES = 32 * 524288
CHANNEL_GBPS = 14.0


class P2PCostSegment(NamedTuple):
    """A price that holds from a size on, with the channels the kernel then uses."""

    start_bytes: float
    cost: AlphaBetaCost
    channels: int


def compute_all_to_all_cost(
    place: Placement, release: NcclRelease, inside: LinkCorrection, between: LinkCorrection | None
) -> list[P2PCostSegment]:
    """Price NCCL's pairwise all-to-all: every rank sends each other rank its part directly."""
    local, remote = place.ranks_per_domain - 1, place.ranks - place.ranks_per_domain
    latency_us = release.base_us["ring"][SIMPLE] + local * release.nvlink_us["ring"][LL]
    per_byte = 0.0
    if local:
        rate = ring_capacity_gbps(place) * inside.efficiency
        per_byte = local / place.ranks / rate
    if between is None:
        latency_us += inside.delay_us
        return [
            P2PCostSegment(
                0, AlphaBetaCost(latency_us * US, per_byte * 1e-9, pipelined=True), CHANNELS
            )
        ]
    latency_us += _hop_us(place, release, between)
    # Messages to all remote peers are posted one after the other.
    slow_post = between.delay_us if between.per == "message" else 0.0
    latency_us += remote * (post_us(SIMPLE) + slow_post)
    rate = place.nics * nic_gbps(place) / place.ranks_per_domain
    rate *= between.efficiency / place.groups_per_nic / place.all_to_all_oversubscription
    if slow_post:
        gap_us = get_fixed_constants().net_overhead_simple * (post_us(LL) + slow_post)
        rate = min(rate, CHUNK_BYTES / 1000 / gap_us)
    per_byte = max(per_byte, remote / place.ranks / rate)
    return [
        P2PCostSegment(
            0, AlphaBetaCost(latency_us * US, per_byte * 1e-9, pipelined=False), CHANNELS
        )
    ]


def compute_send_recv_cost(
    place: Placement, release: NcclRelease, inside: LinkCorrection, between: LinkCorrection | None
) -> list[P2PCostSegment]:
    """Price one message between neighbours of a group, all ranks sending at once."""
    base_us = release.base_us["ring"][SIMPLE]
    if between is None:
        latency_us = base_us + release.nvlink_us["ring"][SIMPLE] + inside.delay_us
        return _parts_inside(place, latency_us, inside)
    latency_us = base_us + _hop_us(place, release, between)
    channels = _channels_between(place, release)
    rate = (
        min(nic_gbps(place) * between.efficiency, channels * CHANNEL_GBPS) / place.network_slowdown
    )
    return [
        P2PCostSegment(0, AlphaBetaCost(latency_us * US, 1e-9 / rate, pipelined=False), channels)
    ]


def _parts_inside(
    place: Placement, latency_us: float, inside: LinkCorrection
) -> list[P2PCostSegment]:
    """A message takes more channels as it grows, each as fast as one NVLink."""
    links = place.links
    channel, pair = ring_capacity_gbps(place), nvlink_gbps(links)
    if links.scale_up == "nvlink" and place.intra_link == "scale-up":
        channel, _ = look_up_by_sm(get_fixed_constants().nvlink, links.sm)
        pair *= links.pair_bytes_per_s / links.gpu_bytes_per_s
    most = min(ring_capacity_gbps(place), pair) * inside.efficiency
    channels = max(1, CHANNELS // _power_of_two(place.ranks))
    parts, start = [], 0.0
    while True:
        rate = min(most, channels * channel * inside.efficiency)
        parts.append(
            P2PCostSegment(
                start, AlphaBetaCost(latency_us * US, 1e-9 / rate, pipelined=False), channels
            )
        )
        if channels >= CHANNELS or rate >= most:
            return parts
        start, channels = float(channels * PART_BYTES), 2 * channels


def _channels_between(place: Placement, release: NcclRelease) -> int:
    """Return the channels to one network peer: fewer in large groups, so that all peers fit."""
    available = _power_of_two(count_comm_channels(place, find_graphs(place, release)))
    if release.net_peer == "two":
        return 2 if 2 * place.ranks <= 4 * available else 1
    wanted = _power_of_two(max(1, -(-int(nic_gbps(place)) // int(CHANNEL_GBPS))))
    batches = -(-place.ranks // 8)
    while wanted > 1 and wanted * batches > available:
        wanted //= 2
    return wanted


def _hop_us(place: Placement, release: NcclRelease, between: LinkCorrection) -> float:
    hop_us = release.net_us["ring"][SIMPLE] + 2 * between.delay_us
    return max(hop_us, place.nic_latency_s / US) + place.switch_latency_s / US


def _power_of_two(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
