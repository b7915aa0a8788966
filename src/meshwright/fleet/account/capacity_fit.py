"""Fits what jobs claim into what there is: a GPU cannot be held twice, nor a node that is down.

Where claims together exceed what there is, each keeps the same share of its own, moment by moment.
What is cut is counted apart; it is no part of the fleet's hours.
"""

from typing import NamedTuple

import numpy as np

from meshwright.fleet.account.inventory import DOWN, RESERVED, UNKNOWN, UP, NodeStateSpans
from meshwright.fleet.account.segments import AllocationSegments
from meshwright.fleet.account.ticks import PARTS_PER_GPU, Floats, Ints, round_down


class CapacityFit(NamedTuple):
    """What pieces keep."""

    fitted_part_ms: Ints
    """Of each piece, parts times milliseconds."""
    inferred_part_ms: Ints
    """Of what is kept, what lies where nobody tells what GPUs there were."""


def fit_to_capacity(
    segments: AllocationSegments, stretches: NodeStateSpans, pool: Ints, pools_told: Ints
) -> CapacityFit:
    """Fit pieces into GPUs, nodes and pools.

    `pool` is the pool of each piece; `pools_told` is from when on each pool has told nodes, a
    time beyond the window where it has none.
    """
    span = np.maximum(1, segments.end_ms - segments.start_ms)
    rate = segments.part_ms / span
    part = _on_gpus(segments, rate)
    placed = np.flatnonzero(segments.span >= 0)
    if len(placed):
        at = segments.span[placed]
        size = np.where(stretches.state == DOWN, 0, stretches.gpu_parts).astype(np.float64)
        part[placed] *= _shares(
            at, segments.start_ms[placed], segments.end_ms[placed], (rate * part)[placed], size[at]
        )
    # Where nobody tells what there was, what was held is what there was.
    inferred = np.where(segments.span < 0, part, 0.0)
    loose = np.flatnonzero(segments.node < 0)
    if len(loose):
        share, before = _in_pools(
            segments, loose, rate * part, stretches, pool=pool, told=pools_told
        )
        part[loose] *= share
        inferred[loose] = before
    kept = np.where(part == 1.0, segments.part_ms, round_down(rate * part * span, segments.part_ms))
    kept = _never_more(kept, segments.span, stretches)
    return CapacityFit(
        kept, np.where(inferred == part, kept, round_down(rate * inferred * span, kept))
    )


def _never_more(kept: Ints, stretch: Ints, stretches: NodeStateSpans) -> Ints:
    """Take back the last ticks that rounding gave beyond what a node has."""
    placed = np.flatnonzero(stretch >= 0)
    sums = np.zeros(len(stretches.node), np.int64)
    np.add.at(sums, stretch[placed], kept[placed])
    open_to = np.where(stretches.state == DOWN, 0, stretches.gpu_parts)
    over = sums - open_to * (stretches.until_ms - stretches.since_ms)
    for crowded in np.flatnonzero(over > 0):
        mine = np.flatnonzero(stretch == crowded)
        mine = mine[np.argsort(-kept[mine], kind="stable")]
        reached = np.minimum(np.cumsum(kept[mine]), over[crowded])
        kept[mine] -= np.diff(reached, prepend=0)
    return kept


def _on_gpus(segments: AllocationSegments, rate: Floats) -> Floats:
    """What is kept where two claim the same GPU."""
    share = np.ones(segments.size)
    at = np.flatnonzero((segments.gpu >= 0) & (segments.node >= 0))
    if len(at):
        key = segments.node[at] * (int(segments.gpu[at].max()) + 1) + segments.gpu[at]
        share[at] = _shares(
            key,
            segments.start_ms[at],
            segments.end_ms[at],
            rate[at],
            np.full(len(at), float(PARTS_PER_GPU)),
        )
    return share


def _shares(key: Ints, start: Ints, end: Ints, rate: Floats, size: Floats) -> Floats:
    """Return what part of each claim fits into the size of its key, the same for all of a key."""
    share = np.ones(len(key))
    keys = np.concatenate([key, key])
    times = np.concatenate([start, end])
    order = np.lexsort((times, keys))
    change = np.concatenate([rate, -rate])[order]
    keys, times = keys[order], times[order]
    total = np.cumsum(change)
    sizes = np.concatenate([size, size])[order]
    lasts = np.zeros(len(order), np.int64)
    lasts[:-1] = np.where(keys[1:] == keys[:-1], times[1:] - times[:-1], 0)
    over = (total > sizes * (1 + 1e-9) + 1e-6) & (lasts > 0)
    crowded = np.unique(keys[over])
    if len(crowded) == 0:
        return share
    factor = np.divide(sizes, total, out=np.ones(len(order)), where=over)
    reached = np.concatenate([[0.0], np.cumsum(factor * lasts)])[:-1]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    count = len(key)
    within = np.isin(key, crowded) & (end > start)
    usable = reached[place[count:]] - reached[place[:count]]
    share[within] = np.clip(usable[within] / (end - start)[within], 0.0, 1.0)
    return share


def _in_pools(
    segments: AllocationSegments,
    loose: Ints,
    rate: Floats,
    stretches: NodeStateSpans,
    *,
    pool: Ints,
    told: Ints,
) -> tuple[Floats, Floats]:
    """Return what part of claims without a node fits, and what part lies before any told node."""
    start, end, of = segments.start_ms[loose], segments.end_ms[loose], pool[loose]
    span = np.maximum(1, end - start)
    before = np.clip(np.minimum(end, told[of]) - start, 0, None) / span
    share = np.ones(len(loose))
    open_to = np.isin(stretches.state, (UP, RESERVED, UNKNOWN))
    on_nodes = segments.span >= 0
    usable = np.zeros(segments.size, np.bool_)
    usable[on_nodes] = open_to[segments.span[on_nodes]]
    for one in np.unique(of[before < 1]):
        mine = np.flatnonzero((of == one) & (before < 1))
        nodes = open_to & (stretches.pool == one)
        others = usable & (pool == one)
        free = _Steps(
            np.concatenate([stretches.since_ms[nodes], segments.end_ms[others]]),
            np.concatenate([stretches.until_ms[nodes], segments.start_ms[others]]),
            np.concatenate([stretches.gpu_parts[nodes].astype(float), rate[others]]),
        )
        wanted = _Steps(start[mine], end[mine], rate[loose[mine]])
        times = np.unique(np.concatenate([free.times, wanted.times, [told[one]]]))
        room, asked = free.at(times), wanted.at(times)
        fits = np.clip(np.divide(room, asked, out=np.ones(len(times)), where=asked > 1e-9), 0, 1)
        fits[times < told[one]] = 1.0
        reached = np.concatenate([[0.0], np.cumsum(fits[:-1] * np.diff(times))])
        gained = np.interp(end[mine], times, reached) - np.interp(start[mine], times, reached)
        share[mine] = np.clip(gained / span[mine], 0.0, 1.0)
    return share, np.minimum(before, share)


class _Steps:
    """A sum of rates, each from one moment to another; backwards ones count as negative."""

    def __init__(self, start: Ints, end: Ints, rate: Floats) -> None:
        times = np.concatenate([start, end])
        order = np.argsort(times, kind="stable")
        self.times = times[order]
        self._sums = np.concatenate([[0.0], np.cumsum(np.concatenate([rate, -rate])[order])])

    def at(self, times: Ints) -> Floats:
        """Return the sum right after each moment."""
        found: Floats = self._sums[np.searchsorted(self.times, times, "right")]
        return found
