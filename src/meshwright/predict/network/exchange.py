"""All-to-all and point-to-point: what NCCL's send and receive kernels cost.

NCCL does not choose between algorithms here, only how many channels a message is split over. This
module knows those rules and prices the result.
"""

from typing import NamedTuple

from meshwright.predict.network.constants import Release, by_sm, fixed
from meshwright.predict.network.fabric import Correction
from meshwright.predict.network.graph import (
    card_gbps,
    graphs,
    nvlink_gbps,
    ring_capacity_gbps,
)
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.pricing import US, Price
from meshwright.predict.network.tuning import LL, SIMPLE, comm_channels, post_us

# NCCL 2.30.7: p2p channels, chunk per message between nodes, the most bytes of one channel inside
# a node (32 chunks of 512 KiB), and what one channel to a network peer is planned for.
CHANNELS = 32
CHUNK_BYTES = 131072
PART_BYTES = 32 * 524288
CHANNEL_GBPS = 14.0


class Part(NamedTuple):
    """A price that holds from a size on, with the channels the kernel then uses."""

    start_bytes: float
    price: Price
    channels: int


def all_to_all(
    place: Placement, release: Release, inside: Correction, between: Correction | None
) -> list[Part]:
    """Price NCCL's pairwise all-to-all: every rank sends each other rank its part directly."""
    local, remote = place.per_unit - 1, place.ranks - place.per_unit
    latency_us = release.base_us["ring"][SIMPLE] + local * release.nvlink_us["ring"][LL]
    per_byte = 0.0
    if local:
        rate = ring_capacity_gbps(place) * inside.efficiency
        per_byte = local / place.ranks / rate
    if between is None:
        latency_us += inside.delay_us
        return [Part(0, Price(latency_us * US, per_byte * 1e-9, pipelined=True), CHANNELS)]
    latency_us += _hop_us(place, release, between)
    # Messages to all remote peers are posted one after the other.
    slow_post = between.delay_us if between.per == "message" else 0.0
    latency_us += remote * (post_us(SIMPLE) + slow_post)
    rate = place.cards * card_gbps(place) / place.per_unit
    rate *= between.efficiency / place.sharers / place.spread_thinning
    if slow_post:
        gap_us = fixed().net_overhead_simple * (post_us(LL) + slow_post)
        rate = min(rate, CHUNK_BYTES / 1000 / gap_us)
    per_byte = max(per_byte, remote / place.ranks / rate)
    return [Part(0, Price(latency_us * US, per_byte * 1e-9, pipelined=False), CHANNELS)]


def send_recv(
    place: Placement, release: Release, inside: Correction, between: Correction | None
) -> list[Part]:
    """Price one message between neighbours of a group, all ranks sending at once."""
    base_us = release.base_us["ring"][SIMPLE]
    if between is None:
        latency_us = base_us + release.nvlink_us["ring"][SIMPLE] + inside.delay_us
        return _parts_inside(place, latency_us, inside)
    latency_us = base_us + _hop_us(place, release, between)
    channels = _channels_between(place, release)
    rate = min(card_gbps(place) * between.efficiency, channels * CHANNEL_GBPS) / place.share
    return [Part(0, Price(latency_us * US, 1e-9 / rate, pipelined=False), channels)]


def _parts_inside(place: Placement, latency_us: float, inside: Correction) -> list[Part]:
    """A message takes more channels as it grows, each as fast as one NVLink."""
    links = place.links
    channel, pair = ring_capacity_gbps(place), nvlink_gbps(links)
    if links.scale_up == "nvlink" and place.inside == "scale-up":
        channel, _ = by_sm(fixed().nvlink, links.sm)
        pair *= links.pair_bytes_per_s / links.gpu_bytes_per_s
    most = min(ring_capacity_gbps(place), pair) * inside.efficiency
    channels = max(1, CHANNELS // _power_of_two(place.ranks))
    parts, start = [], 0.0
    while True:
        rate = min(most, channels * channel * inside.efficiency)
        parts.append(Part(start, Price(latency_us * US, 1e-9 / rate, pipelined=False), channels))
        if channels >= CHANNELS or rate >= most:
            return parts
        start, channels = float(channels * PART_BYTES), 2 * channels


def _channels_between(place: Placement, release: Release) -> int:
    """Return the channels to one network peer: fewer in large groups, so that all peers fit."""
    available = _power_of_two(comm_channels(place, graphs(place, release)))
    if release.net_peer == "two":
        return 2 if 2 * place.ranks <= 4 * available else 1
    wanted = _power_of_two(max(1, -(-int(card_gbps(place)) // int(CHANNEL_GBPS))))
    batches = -(-place.ranks // 8)
    while wanted > 1 and wanted * batches > available:
        wanted //= 2
    return wanted


def _hop_us(place: Placement, release: Release, between: Correction) -> float:
    hop_us = release.net_us["ring"][SIMPLE] + 2 * between.delay_us
    return max(hop_us, place.card_s / US) + place.switches_s / US


def _power_of_two(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
