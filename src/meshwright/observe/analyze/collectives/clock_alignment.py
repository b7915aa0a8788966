"""Aligns the clocks of ranks by the collectives they share.

Where each member needs data of each, all end together but for the skew of the last messages,
whatever their clocks say. So the typical difference of two ranks' ends is the offset of their
clocks, and its change over time their drift. The skew is small beside a transfer, and smallest for
short ones, which count most. Ranks that share no collective are reached through others that share
one with both.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.collectives.collective_calls import COLLECTIVE_OPS
from meshwright.observe.analyze.collectives.matched_collectives import (
    MatchedCollectives,
    match_collectives,
    shift_members,
)
from meshwright.observe.analyze.spans.intervals import Ints
from meshwright.timeline.memo import memoize
from meshwright.timeline.readers.parsing.arrow_arrays import to_number_array
from meshwright.timeline.timeline import Timeline

ROUNDS = 20
DRIFT_ROUNDS = 5
MIN_COLLECTIVES_FOR_DRIFT = 16
"""Collectives that a rank must share before a drift is looked for."""
MAX_COLLECTIVES_FOR_DRIFT = 256
"""Collectives at either end of a profile that a drift is told by, at most."""
MIN_COLLECTIVES_FOR_OFFSET = 8
"""By so many collectives, the surest ones, two clocks are compared first."""
END_SKEW_NS, END_SKEW_SHARE = 20_000, 0.05
"""Members end a collective apart by so much, and by so much of its transfer, on one clock too."""
_TOGETHER = [
    COLLECTIVE_OPS.index(op)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
]
"""Here each member needs data of each; in others the root may end a whole transfer early."""
MAX_DRIFT = 200e-6
"""Quartz is good to 100 parts in a million; two clocks drift apart by twice that at most."""


class RankClock(NamedTuple):
    """A rank's clock beside that of the first rank."""

    rank: int
    offset_ns: int
    """What it shows too much, at `ClockAlignment.origin_ns`."""
    drift: float
    """What it gains per ns."""
    uncertainty_ns: int
    """How far ends lie apart on one clock too; a smaller offset cannot be told from none."""
    num_collectives: int
    """How many it was told by."""
    is_aligned: bool
    """Whether collectives tie it to the first rank."""


class ClockAlignment(NamedTuple):
    """The clocks of all ranks."""

    origin_ns: int
    clocks: tuple[RankClock, ...]
    is_shared: bool
    """Whether all ranks show one clock already, as the ranks of one host do."""

    def offset_at(self, rank: int, moment_ns: Ints) -> Ints:
        """What a rank's clock shows too much at these moments; 0 where clocks are shared."""
        clock = next((one for one in self.clocks if one.rank == rank), None)
        if clock is None or self.is_shared:
            return np.zeros(np.shape(moment_ns), dtype=np.int64)
        drift = np.rint(clock.drift * (moment_ns - self.origin_ns)).astype(np.int64)
        moved: Ints = clock.offset_ns + drift
        return moved


def estimate_clocks(collectives: MatchedCollectives) -> ClockAlignment:
    """Estimate every rank's clock from matched collectives."""
    members = collectives.members
    ranks = np.unique(members.rank)
    if not ranks.size:
        return ClockAlignment(0, (), is_shared=True)
    origin = int(members.end_ns.min())
    number = np.searchsorted(ranks, members.rank)
    own = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    skew = _end_skew_ns(collectives)[members.call_index]
    first = _first_offsets(collectives, own, skew)
    offset, drift = first.offset, np.zeros(ranks.size)
    since = (members.end_ns - origin).astype(np.float64)
    for _ in range(ROUNDS):
        residual = _residual(collectives, since, number, offset, drift)
        steps = np.array([_median(residual[rows], skew[rows] ** -2.0) for rows in own])
        offset += steps
        if np.abs(steps).max() < 1:
            break
    drift = _drifts(collectives, since, own, offset)
    residual = _residual(collectives, since, number, offset, drift)
    spread = np.array(
        [1.4826 * np.median(np.abs(residual[r] - np.median(residual[r]))) for r in own]
    )
    uncertain = np.maximum(spread, first.skew)
    shared = _agree(
        since, own, (offset, drift), first.skew + 3 * spread / np.sqrt([r.size for r in own])
    )
    # Relative to the first rank: nobody knows the true time.
    offset = np.where(first.reached, offset - offset[0], offset)
    drift = np.where(first.reached, drift - drift[0], drift)
    clocks = tuple(
        RankClock(
            rank=name,
            offset_ns=round(float(offset[rank])),
            drift=float(drift[rank]),
            uncertainty_ns=int(np.ceil(uncertain[rank])),
            num_collectives=own[rank].size,
            is_aligned=bool(first.reached[rank]),
        )
        for rank, name in enumerate(ranks.tolist())
    )
    return ClockAlignment(origin, clocks, is_shared=shared)


def align_collectives(
    collectives: MatchedCollectives, clocks: ClockAlignment
) -> MatchedCollectives:
    """Return the collectives on the first rank's clock."""
    members = collectives.members
    return shift_members(
        collectives,
        {
            one.rank: clocks.offset_at(one.rank, members.end_ns[members.rank == one.rank])
            for one in clocks.clocks
        },
    )


class AlignedRanks(NamedTuple):
    """Ranks that were recorded apart, put together on the first one's clock."""

    timeline: Timeline
    collectives: MatchedCollectives
    clocks: ClockAlignment


@memoize
def align_ranks(first: Timeline, *others: Timeline) -> AlignedRanks:
    """Put ranks together on the first one's clock, with their collectives matched."""
    whole = Timeline.concat([first, *others])
    found = match_collectives(whole, (first, *others))
    clocks = estimate_clocks(found)
    if clocks.is_shared:
        return AlignedRanks(whole, found, clocks)
    return AlignedRanks(align_timeline(whole, clocks), align_collectives(found, clocks), clocks)


def align_timeline(timeline: Timeline, clocks: ClockAlignment | None = None) -> Timeline:
    """Return the timeline on the first rank's clock; itself where clocks are shared."""
    found = estimate_clocks(match_collectives(timeline)) if clocks is None else clocks
    if found.is_shared:
        return timeline
    start, rank = timeline.column("start_ns").copy(), timeline.column("rank")
    for one in found.clocks:
        own = rank == one.rank
        start[own] -= found.offset_at(one.rank, start[own])
    place = timeline.spans.column_names.index("start_ns")
    moved = timeline.spans.set_column(
        place, timeline.spans.schema.field(place), to_number_array(start)
    )
    return msgspec.structs.replace(timeline, spans=moved)


def _agree(since: Ints, own: list[Ints], clocks: tuple[Ints, Ints], limit: Ints) -> bool:
    """Whether no clock is further from the middle one than ends lie apart anyway.

    That is asked of the first and of the last collective of each rank, as clocks may drift.
    """
    offset, drift = clocks
    ends = np.array([[since[rows].min(), since[rows].max()] for rows in own])
    shown = offset[:, None] + drift[:, None] * ends
    return bool(np.all(np.abs(shown - np.median(shown, axis=0)) <= limit[:, None]))


def _end_skew_ns(collectives: MatchedCollectives) -> Ints:
    """How far apart members of each collective may end on one clock."""
    transfer = collectives.transfer_ns
    part = np.where(np.isin(collectives.calls.op, _TOGETHER), END_SKEW_SHARE, 1.0)
    skew: Ints = END_SKEW_NS + part * transfer
    return skew


def _median(values: Ints, weights: Ints) -> float:
    """The weighted median; between two values, their mean."""
    order = np.argsort(values)
    reach = np.cumsum(weights[order])
    half = reach[-1] / 2
    low = np.searchsorted(reach, half * (1 - 1e-9))
    high = np.searchsorted(reach, half * (1 + 1e-9))
    return float((values[order[low]] + values[order[min(high, order.size - 1)]]) / 2)


def _middle(collectives: MatchedCollectives, ends: Ints) -> Ints:
    """The median end of each collective."""
    calls = collectives.calls
    order = np.lexsort((ends, collectives.members.call_index))
    low = calls.first_member + (calls.num_members - 1) // 2
    high = calls.first_member + calls.num_members // 2
    middle: Ints = (ends[order][low] + ends[order][high]) / 2
    return middle


def _residual(
    collectives: MatchedCollectives, since: Ints, number: Ints, offset: Ints, drift: Ints
) -> Ints:
    """How far each end lies from the middle of its collective, clocks corrected."""
    ends = since - offset[number] - drift[number] * since
    residual: Ints = ends - _middle(collectives, ends)[collectives.members.call_index]
    return residual


class _First(NamedTuple):
    """Clocks as pairs of ranks show them, one value per rank."""

    offset: Ints
    reached: Ints
    """Whether collectives tie it to the first rank."""
    skew: Ints
    """How sure that is: how far apart ends may lie on the way to the first rank."""


def _first_offsets(collectives: MatchedCollectives, own: list[Ints], skew: Ints) -> _First:
    """Walk from the first rank over shared collectives; of those of a pair, the surest tell."""
    members = collectives.members
    count = len(own)
    found = _First(np.zeros(count), np.zeros(count, dtype=np.bool_), np.zeros(count))
    for start in range(count):  # Ranks that nothing ties to the first are walked among themselves.
        if found.skew[start]:
            continue
        found.skew[start] = skew[own[start]].min()
        waiting = [start]
        while waiting:
            known = waiting.pop(0)
            found.reached[known] = start == 0
            for other in np.flatnonzero(found.skew == 0).tolist():
                here, there = own[known], own[other]
                _, a, b = np.intersect1d(
                    members.call_index[here],
                    members.call_index[there],
                    assume_unique=True,
                    return_indices=True,
                )
                if not a.size:
                    continue
                sure = skew[here[a]]
                limit = 2 * np.sort(sure)[min(MIN_COLLECTIVES_FOR_OFFSET, sure.size) - 1]
                a, b, sure = a[sure <= limit], b[sure <= limit], sure[sure <= limit]
                apart = members.end_ns[there[b]] - members.end_ns[here[a]]
                found.offset[other] = found.offset[known] + np.median(apart)
                found.skew[other] = max(found.skew[known], float(np.median(sure)))
                waiting.append(other)
    return found


def _drifts(collectives: MatchedCollectives, since: Ints, own: list[Ints], offset: Ints) -> Ints:
    """The slope of each rank's residual over time, where it is more than noise.

    A drifting rank pulls the middle of its collectives along, so the first slopes are too small;
    a few rounds find the rest. Offsets are mended with them.
    """
    drift = np.zeros(offset.size)
    number = np.empty(since.size, dtype=np.int64)
    for rank, rows in enumerate(own):
        number[rows] = rank
    for _ in range(DRIFT_ROUNDS):
        residual = _residual(collectives, since, number, offset, drift)
        for rank, rows in enumerate(own[1:], start=1):
            length = np.ptp(since[rows])
            if rows.size < MIN_COLLECTIVES_FOR_DRIFT or length == 0:
                continue
            slope = _slope(since[rows], residual[rows])
            left = residual[rows] - slope * since[rows]
            noise = 1.4826 * np.median(np.abs(left - np.median(left)))
            total = drift[rank] + slope
            if abs(total) <= MAX_DRIFT and abs(total) * length > 4 * noise:
                drift[rank] = total
                offset[rank] += np.median(left)
    return drift


def _slope(x: Ints, y: Ints) -> float:
    """Median slope between points of the first and of the last third (Siegel's idea, halved)."""
    order = np.argsort(x)
    third = max(1, x.size // 3)
    every = -(-third // MAX_COLLECTIVES_FOR_DRIFT)
    head, tail = order[:third:every], order[-third::every]
    rise = y[tail][None, :] - y[head][:, None]
    run = x[tail][None, :] - x[head][:, None]
    return float(np.median(rise[run > 0] / run[run > 0])) if np.any(run > 0) else 0.0
