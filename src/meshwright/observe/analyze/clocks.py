"""Aligns the clocks of ranks by the collectives they share.

All members of a collective end it within its transfer, whatever their clocks say. So the typical
difference of two ranks' ends is the offset of their clocks, and its change over time their drift.
Ranks that share no collective are reached through others that share one with both.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.collectives import Collectives, match_collectives, shifted
from meshwright.observe.analyze.spans import Ints
from meshwright.timeline.once import once
from meshwright.timeline.readers.arrow_arrays import numbers
from meshwright.timeline.timeline import Timeline

ROUNDS = 20
DRIFT_ROUNDS = 5
LEAST_FOR_DRIFT = 16
"""Collectives that a rank must share before a drift is looked for."""
SHARED_PART = 0.9
"""Clocks are one where so many ends lie within the transfer of their collective."""
MOST_DRIFT = 200e-6
"""Quartz is good to 100 parts in a million; two clocks drift apart by twice that at most."""


class Clock(NamedTuple):
    """A rank's clock beside that of the first rank."""

    rank: int
    offset_ns: int
    """What it shows too much, at `Clocks.origin_ns`."""
    drift: float
    """What it gains per ns."""
    uncertainty_ns: int
    """Half the spread of the ends that is left; a smaller offset cannot be told from none."""
    collectives: int
    """How many it was told by."""
    aligned: bool
    """Whether collectives tie it to the first rank."""


class Clocks(NamedTuple):
    """The clocks of all ranks."""

    origin_ns: int
    clocks: tuple[Clock, ...]
    shared: bool
    """Whether all ranks show one clock already, as the ranks of one host do."""
    impossible: int
    """Members that end before the last one arrives, after alignment: a measure of what is wrong."""

    def offset_at(self, rank: int, moment_ns: Ints) -> Ints:
        """What a rank's clock shows too much at these moments; 0 where clocks are shared."""
        clock = next((one for one in self.clocks if one.rank == rank), None)
        if clock is None or self.shared:
            return np.zeros(np.shape(moment_ns), dtype=np.int64)
        drift = np.rint(clock.drift * (moment_ns - self.origin_ns)).astype(np.int64)
        moved: Ints = clock.offset_ns + drift
        return moved


def clocks_of(collectives: Collectives) -> Clocks:
    """Estimate every rank's clock from matched collectives."""
    members = collectives.members
    ranks = np.unique(members.rank)
    if not ranks.size:
        return Clocks(0, (), shared=True, impossible=0)
    origin = int(members.end_ns.min())
    number = np.searchsorted(ranks, members.rank)
    offset, reached = _first_offsets(collectives, number, ranks.size)
    drift = np.zeros(ranks.size)
    since = (members.end_ns - origin).astype(np.float64)
    for _ in range(ROUNDS):
        residual = _residual(collectives, since, number, offset, drift)
        steps = np.zeros(ranks.size)
        for rank in range(ranks.size):
            own = number == rank
            steps[rank] = np.median(residual[own])
        offset += steps
        if np.abs(steps).max() < 1:
            break
    drift = _drifts(collectives, since, number, offset)
    residual = _residual(collectives, since, number, offset, drift)
    # Relative to the first rank: nobody knows the true time.
    offset, drift = offset - offset[0], drift - drift[0]
    clocks = []
    for rank, name in enumerate(ranks.tolist()):
        own = residual[number == rank]
        spread = 1.4826 * np.median(np.abs(own - np.median(own)))
        clocks.append(
            Clock(
                rank=name,
                offset_ns=round(float(offset[rank])),
                drift=float(drift[rank]),
                uncertainty_ns=int(np.ceil(spread)),
                collectives=own.size,
                aligned=bool(reached[rank]),
            )
        )
    shared = _agree(collectives)
    found = Clocks(origin, tuple(clocks), shared=shared, impossible=0)
    moved = collectives if shared else aligned_collectives(collectives, found)
    early = moved.members.end_ns < moved.arrival_ns[moved.members.call]
    return found._replace(impossible=int(early.sum()))


def aligned_collectives(collectives: Collectives, clocks: Clocks) -> Collectives:
    """Return the collectives on the first rank's clock."""
    members = collectives.members
    return shifted(
        collectives,
        {
            one.rank: clocks.offset_at(one.rank, members.end_ns[members.rank == one.rank])
            for one in clocks.clocks
        },
    )


class OneClock(NamedTuple):
    """Ranks that were recorded apart, put together on the first one's clock."""

    whole: Timeline
    collectives: Collectives
    clocks: Clocks


@once
def on_one_clock(first: Timeline, *others: Timeline) -> OneClock:
    """Put ranks together on the first one's clock, with their collectives matched."""
    whole = Timeline.concat([first, *others])
    found = match_collectives(whole)
    clocks = clocks_of(found)
    if clocks.shared:
        return OneClock(whole, found, clocks)
    return OneClock(align(whole, clocks), aligned_collectives(found, clocks), clocks)


def align(timeline: Timeline, clocks: Clocks | None = None) -> Timeline:
    """Return the timeline on the first rank's clock; itself where clocks are shared."""
    found = clocks_of(match_collectives(timeline)) if clocks is None else clocks
    if found.shared:
        return timeline
    start, rank = timeline.column("start_ns").copy(), timeline.column("rank")
    for one in found.clocks:
        own = rank == one.rank
        start[own] -= found.offset_at(one.rank, start[own])
    place = timeline.spans.column_names.index("start_ns")
    moved = timeline.spans.set_column(place, timeline.spans.schema.field(place), numbers(start))
    return msgspec.structs.replace(timeline, spans=moved)


def _agree(collectives: Collectives) -> bool:
    """Whether ends lie within the transfers as they are."""
    members = collectives.members
    middle = _middle(collectives, members.end_ns.astype(np.float64))
    near = np.abs(members.end_ns - middle[members.call]) <= collectives.transfer_ns[members.call]
    parts = [near[members.rank == rank].mean() for rank in np.unique(members.rank)]
    return bool(np.min(parts) >= SHARED_PART)


def _middle(collectives: Collectives, ends: Ints) -> Ints:
    """The median end of each collective."""
    calls = collectives.calls
    order = np.lexsort((ends, collectives.members.call))
    low = calls.first + (calls.members - 1) // 2
    high = calls.first + calls.members // 2
    middle: Ints = (ends[order][low] + ends[order][high]) / 2
    return middle


def _residual(
    collectives: Collectives, since: Ints, number: Ints, offset: Ints, drift: Ints
) -> Ints:
    """How far each end lies from the middle of its collective, clocks corrected."""
    ends = since - offset[number] - drift[number] * since
    residual: Ints = ends - _middle(collectives, ends)[collectives.members.call]
    return residual


def _first_offsets(collectives: Collectives, number: Ints, count: int) -> tuple[Ints, Ints]:
    """Offsets by walking from the first rank over shared collectives, and who was reached."""
    members = collectives.members
    offset, reached = np.zeros(count), np.zeros(count, dtype=np.bool_)
    by_rank = [np.flatnonzero(number == rank) for rank in range(count)]
    reached[0] = True
    waiting = [0]
    while waiting:
        known = waiting.pop(0)
        own = by_rank[known]
        for other in np.flatnonzero(~reached).tolist():
            _, here, there = np.intersect1d(
                members.call[own], members.call[by_rank[other]], return_indices=True
            )
            if here.size:
                apart = members.end_ns[by_rank[other][there]] - members.end_ns[own[here]]
                offset[other] = offset[known] + np.median(apart)
                reached[other] = True
                waiting.append(other)
    return offset, reached


def _drifts(collectives: Collectives, since: Ints, number: Ints, offset: Ints) -> Ints:
    """The slope of each rank's residual over time, where it is more than noise.

    A drifting rank pulls the middle of its collectives along, so the first slopes are too small;
    a few rounds find the rest. Offsets are mended with them.
    """
    drift = np.zeros(offset.size)
    for _ in range(DRIFT_ROUNDS):
        residual = _residual(collectives, since, number, offset, drift)
        for rank in range(1, offset.size):
            own = np.flatnonzero(number == rank)
            if own.size < LEAST_FOR_DRIFT or np.ptp(since[own]) == 0:
                continue
            slope = _slope(since[own], residual[own])
            left = residual[own] - slope * since[own]
            noise = 1.4826 * np.median(np.abs(left - np.median(left)))
            total = drift[rank] + slope
            if abs(total) <= MOST_DRIFT and abs(total) * np.ptp(since[own]) > 4 * noise:
                drift[rank] = total
                offset[rank] += np.median(left)
    return drift


def _slope(x: Ints, y: Ints) -> float:
    """Median slope between points of the first and of the last third (Siegel's idea, halved)."""
    order = np.argsort(x)
    third = max(1, x.size // 3)
    head, tail = order[:third], order[-third:]
    rise = y[tail][None, :] - y[head][:, None]
    run = x[tail][None, :] - x[head][:, None]
    return float(np.median(rise[run > 0] / run[run > 0])) if np.any(run > 0) else 0.0
