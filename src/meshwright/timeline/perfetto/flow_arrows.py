"""Pairs the ends of flows across ranks, for viewers that draw them as arrows.

A viewer reads events in the order of time and wants the start of an arrow before its end. A
receive is often posted before its send begins; such a pair is turned round, so that the arrow is
drawn at all. Profilers count launches on each rank anew, so an end belongs to a start of its own
rank where there is one. Ends without a partner are left out. Pure arithmetic on numpy arrays.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from meshwright.timeline.perfetto.track_rows import Ints


class FlowEnds(NamedTuple):
    """Spans of one rank that start or end a flow, one row for each end."""

    rank: int
    position: Ints
    """Where the span is drawn, among the spans of its rank."""
    start_ns: Ints
    flow: Ints
    """The flow's id."""
    is_outgoing: Ints
    """Whether the flow starts at this span."""


class FlowArrows(NamedTuple):
    """The ends of arrows on one rank, in drawing order."""

    position: Ints
    """The span at which the end is drawn."""
    id: Ints
    """The same for both ends of an arrow."""
    is_start: Ints
    """Whether the arrow begins here."""
    is_reversed: Ints
    """Whether the arrow points against the flow, because the flow's end starts earlier."""


def find_flow_ends(
    rank: int, order: Ints, start_ns: Ints, flow_out: Ints, flow_in: Ints
) -> FlowEnds:
    """The flow ends of a rank's spans, which are drawn in this order; -1 is no flow."""
    start, out, into = start_ns[order], flow_out[order], flow_in[order]
    begins, ends = np.flatnonzero(out >= 0), np.flatnonzero(into >= 0)
    position = np.concatenate([begins, ends])
    return FlowEnds(
        rank=rank,
        position=position,
        start_ns=start[position],
        flow=np.concatenate([out[begins], into[ends]]),
        is_outgoing=np.arange(position.size) < begins.size,
    )


def pair_flows(ranks: Iterable[FlowEnds]) -> dict[int, FlowArrows]:
    """The arrows to draw, per rank."""
    parts = list(ranks)
    if not parts:
        return {}
    which = np.concatenate([np.full(part.position.size, part.rank) for part in parts])
    position, start, flow, outgoing = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("position", "start_ns", "flow", "is_outgoing")
    )
    # Time, and the order of writing where times are equal: what a viewer reads first.
    sequence = np.empty(which.size, dtype=np.int64)
    sequence[np.lexsort((position, which, start))] = np.arange(which.size)
    source, target = _match(which, flow, outgoing, sequence)
    turned = sequence[target] < sequence[source]
    straight_source = np.unique(source[~turned])
    # A turned arrow gets an id of its own, because several may lead to one source; so does a flow
    # whose id is that of another as well.
    free = np.setdiff1d(np.arange(2 * flow.size), flow)
    names, times = np.unique(flow[straight_source], return_counts=True)
    named = np.where(np.isin(flow, names[times > 1]), free[: flow.size], flow)
    rows = np.concatenate([straight_source, target[~turned], target[turned], source[turned]])
    own = free[target[turned]]
    ids = np.concatenate([named[straight_source], named[source[~turned]], own, own])
    count = [straight_source.size, int((~turned).sum()), own.size, own.size]
    begins = np.repeat([True, False, True, False], count)
    is_turned = np.repeat([False, False, True, True], count)
    arrows = {}
    for part in parts:
        mine = np.flatnonzero(which[rows] == part.rank)
        mine = mine[np.argsort(position[rows[mine]], kind="stable")]
        arrows[part.rank] = FlowArrows(
            position[rows[mine]], ids[mine], begins[mine], is_turned[mine]
        )
    return arrows


def _match(rank: Ints, flow: Ints, outgoing: Ints, sequence: Ints) -> tuple[Ints, Ints]:
    """Rows of the source and of the target for each end that has a source.

    A source of the end's own rank comes first. Where several spans claim to start a flow, the
    first in time does.
    """
    sources, targets = np.flatnonzero(outgoing), np.flatnonzero(~outgoing)
    anyone = _first_of(flow, sources, targets, sequence)
    # Ranks and flows counted through, so that a pair of them is one number.
    number = np.unique(rank, return_inverse=True)[1] * flow.size
    number += np.unique(flow, return_inverse=True)[1]
    mine = _first_of(number, sources, targets, sequence)
    found = np.where(mine >= 0, mine, anyone)
    return found[found >= 0], targets[found >= 0]


def _first_of(key: Ints, sources: Ints, targets: Ints, sequence: Ints) -> Ints:
    """For each target the source of its key that is first in time; -1 where there is none."""
    if not sources.size:
        return np.full(targets.size, -1)
    sources = sources[np.lexsort((sequence[sources], key[sources]))]
    keys, first = np.unique(key[sources], return_index=True)
    at = np.minimum(np.searchsorted(keys, key[targets]), keys.size - 1)
    return np.where(keys[at] == key[targets], sources[first][at], -1)
