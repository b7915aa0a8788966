"""`CollectiveCurve`: the time of one collective on one group as a function of its size.

NCCL's choice is the lower envelope of straight lines, so it changes at a few sizes only. A curve
holds those sizes with the price of what is chosen between them; a size is then one search in a
sorted list. Where NCCL switches to something slower than it believes, the curve stays flat until
the message has grown enough: time never falls with size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

from meshwright.predict.network import nccl_p2p_cost
from meshwright.predict.network.link_corrections import (
    LinkCorrection,
    get_link_kinds,
    load_corrections,
)
from meshwright.predict.network.nccl_constants import PROTOCOLS, get_fixed_constants, get_release
from meshwright.predict.network.nccl_cost import AlphaBetaCost, compute_algorithm_cost
from meshwright.predict.network.nccl_graph import find_graphs
from meshwright.predict.network.nccl_tuning import (
    NcclOp,
    TuningEntry,
    build_tuning_table,
    count_comm_channels,
    count_kernel_channels,
    count_nvls_channels,
    plateau_bytes,
    plateau_factor,
    tree_factor,
)
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.wire_bound import bound_s_per_byte


class CurveSegment(NamedTuple):
    """What holds from one size on."""

    start_bytes: float
    cost: AlphaBetaCost
    floor_s: float
    """The longest time of any smaller message."""
    entry: TuningEntry | None
    """NCCL's choice; None for point-to-point kernels, which have no other."""
    channels: int
    """The most channels the kernel uses."""


class CollectiveCurve(NamedTuple):
    """Pieces of a cost curve in the order of size."""

    starts: tuple[float, ...]
    segments: tuple[CurveSegment, ...]
    bound_s_per_byte: float

    def find_segment(self, nbytes: float) -> CurveSegment:
        """Return the piece that a size falls into."""
        return self.segments[bisect_right(self.starts, nbytes) - 1]

    def predict_s(self, nbytes: float) -> float:
        """Return the time of a message."""
        piece = self.segments[bisect_right(self.starts, nbytes) - 1]
        latency_s, s_per_byte, pipelined, channels, channel_bytes = piece.cost
        stream_s = nbytes * s_per_byte
        if nbytes < channels * channel_bytes:
            stream_s = channels * min(nbytes, channel_bytes) * s_per_byte
        seconds = latency_s + stream_s
        if pipelined:
            seconds += (latency_s * stream_s) ** 0.5
        return max(seconds, piece.floor_s, nbytes * self.bound_s_per_byte)


@lru_cache(maxsize=16384)
def build_curve(
    place: Placement,
    op: NcclOp,
    nccl: str,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> CollectiveCurve:
    """Return the cost curve of a collective on a group of at least two ranks."""
    inside, fabric = get_link_kinds(place)
    between = load_corrections()[fabric] if place.domains > 1 else None
    found = list_nccl_choices(place, op, nccl, collnet, only)
    raw = compute_choice_costs(found, place, op, nccl, (load_corrections()[inside], between))
    return join_segments(raw, bound_s_per_byte(op, place))


def join_segments(
    raw: Sequence[tuple[float, AlphaBetaCost, TuningEntry | None, int]], bound: float
) -> CollectiveCurve:
    """Join priced choices into a curve that never falls with size."""
    pieces: list[CurveSegment] = []
    floor_s = 0.0
    for start, cost, entry, channels in raw:
        if pieces:
            floor_s = max(floor_s, pieces[-1].cost.predict_s(start))
        pieces.append(CurveSegment(start, cost, floor_s, entry, channels))
    starts = tuple(piece.start_bytes for piece in pieces)
    return CollectiveCurve(starts, tuple(pieces), bound)


class NcclChoice(NamedTuple):
    """What NCCL takes from one size on, before any price is put on it."""

    start_bytes: float
    entry: TuningEntry
    channels: int


def list_nccl_choices(
    place: Placement, op: NcclOp, nccl: str, collnet: bool, only: tuple[str, ...] | None
) -> list[NcclChoice]:
    """Return NCCL's choice by size; none for point-to-point kernels, which have no other."""
    if op in ("all_to_all", "send_recv"):
        return []
    constants = get_release(nccl)
    found = find_graphs(place, constants)
    entries = build_tuning_table(op, place, found, constants, collnet=collnet)
    if only is not None:
        entries = tuple(entry for entry in entries if entry.algorithm in only)
    ring, nvls = count_comm_channels(place, found), count_nvls_channels(place, constants)
    chosen = []
    for start, index in _switches(entries, op, place, ring):
        entry = entries[index]
        most = nvls if entry.algorithm in ("nvls", "nvls_tree") else ring
        chosen.append(NcclChoice(start, entry, most))
    return chosen


def compute_choice_costs(
    found: Sequence[NcclChoice],
    place: Placement,
    op: NcclOp,
    nccl: str,
    links: tuple[LinkCorrection, LinkCorrection | None],
) -> list[tuple[float, AlphaBetaCost, TuningEntry | None, int]]:
    """Put prices on NCCL's choices, or on its point-to-point kernels.

    `links` corrects what is inside units and, where there are several, what is between them.
    """
    if op in ("all_to_all", "send_recv"):
        parts_of = (
            nccl_p2p_cost.compute_all_to_all_cost
            if op == "all_to_all"
            else nccl_p2p_cost.compute_send_recv_cost
        )
        parts = parts_of(place, get_release(nccl), *links)
        return [(part.start_bytes, part.cost, None, part.channels) for part in parts]
    known: dict[TuningEntry, AlphaBetaCost] = {}
    raw: list[tuple[float, AlphaBetaCost, TuningEntry | None, int]] = []
    for start, entry, channels in found:
        if entry not in known:
            known[entry] = compute_algorithm_cost(entry, op, place, links, channels)
        cost = known[entry]
        if entry.algorithm == "tree":
            factor = tree_factor(entry.protocol, start)
            cost = cost._replace(s_per_byte=cost.s_per_byte / factor)
        raw.append((start, cost, entry, channels))
    return raw


def _switches(
    entries: Sequence[TuningEntry], op: NcclOp, place: Placement, channels: int
) -> list[tuple[float, int]]:
    """Return the sizes from which NCCL takes another entry, or another factor of a tree."""
    trees = [_tree_factors(entry) for entry in entries]
    stretched = [plateau_bytes(entry, op, place, channels) for entry in entries]
    marks = {0.0, *(size for size in stretched if size < inf)}
    if any(trees):
        marks |= {
            float(64 << index) for index in range(len(get_fixed_constants().tree_correction[0]) + 1)
        }
    bases = [entry.latency_us for entry in entries]
    slopes = [1 / (1000 * entry.algbw_gbps) for entry in entries]
    longer = plateau_factor(place)
    chosen: list[tuple[float, int]] = []
    before = -1
    for low, high in pairwise([*sorted(marks), inf]):
        octave = min(int(low // 64).bit_length(), len(get_fixed_constants().tree_correction[0]) + 1)
        lines = [
            (base * longer if low >= size else base, slope / tree[octave] if tree else slope)
            for base, slope, tree, size in zip(bases, slopes, trees, stretched, strict=True)
        ]
        for start, index in _envelope(lines, low, high):
            if index != before or trees[index]:
                chosen.append((start, index))
            before = index
    return chosen


def _tree_factors(entry: TuningEntry) -> tuple[float, ...]:
    """Return NCCL's factors on a tree's bandwidth by octave from 64 bytes on; none for others."""
    if entry.algorithm != "tree":
        return ()
    return (1.0, *get_fixed_constants().tree_correction[PROTOCOLS.index(entry.protocol)], 1.0)


def _envelope(
    lines: Sequence[tuple[float, float]], low: float, high: float
) -> list[tuple[float, int]]:
    """Return which line `a + b·x` is lowest from where on, between `low` and `high`."""
    at = low
    values = [base + slope * low for base, slope in lines]
    index = values.index(min(values))
    found = [(at, index)]
    while True:
        base, slope = lines[index]
        nearest, following = high, -1
        for other, (other_base, other_slope) in enumerate(lines):
            if other_slope < slope:
                crossing = (other_base - base) / (slope - other_slope)
                if at < crossing < nearest:
                    nearest, following = crossing, other
        if following < 0:
            return found
        at, index = nearest, following
        found.append((at, index))


def count_thread_blocks(piece: CurveSegment, place: Placement, nbytes: float) -> int:
    """Return the thread blocks, each on a multiprocessor of its own, that a call runs on."""
    if piece.entry is None:
        return piece.channels
    return count_kernel_channels(piece.entry, place, nbytes, piece.channels)
