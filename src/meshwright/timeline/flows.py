"""Pairs the ends of flows across ranks, for viewers that draw them as arrows.

A viewer reads events in the order of time and wants the start of an arrow before its end. A
receive is often posted before its send begins; such a pair is turned round, so that the arrow is
drawn at all. Ends without a partner are left out. Pure arithmetic on numpy arrays.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from meshwright.timeline.nesting import Ints


class FlowEnds(NamedTuple):
    """Spans of one rank that start or end a flow, one row for each end."""

    rank: int
    position: Ints
    """Where the span is drawn, among the spans of its rank."""
    start_ns: Ints
    flow: Ints
    """The flow's id."""
    outgoing: Ints
    """Whether the flow starts at this span."""


class Arrows(NamedTuple):
    """The ends of arrows on one rank, in drawing order."""

    position: Ints
    """The span at which the end is drawn."""
    id: Ints
    """The same for both ends of an arrow."""
    begins: Ints
    """Whether the arrow begins here."""
    turned: Ints
    """Whether the arrow points against the flow, because the flow's end starts earlier."""


def ends_of(rank: int, order: Ints, start_ns: Ints, flow_out: Ints, flow_in: Ints) -> FlowEnds:
    """The flow ends of a rank's spans, which are drawn in this order; -1 is no flow."""
    start, out, into = start_ns[order], flow_out[order], flow_in[order]
    begins, ends = np.flatnonzero(out >= 0), np.flatnonzero(into >= 0)
    position = np.concatenate([begins, ends])
    return FlowEnds(
        rank=rank,
        position=position,
        start_ns=start[position],
        flow=np.concatenate([out[begins], into[ends]]),
        outgoing=np.arange(position.size) < begins.size,
    )


def pair(ranks: Iterable[FlowEnds]) -> dict[int, Arrows]:
    """The arrows to draw, per rank."""
    parts = list(ranks)
    if not parts:
        return {}
    which = np.concatenate([np.full(part.position.size, part.rank) for part in parts])
    position, start, flow, outgoing = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("position", "start_ns", "flow", "outgoing")
    )
    # Time, and the order of writing where times are equal: what a viewer reads first.
    sequence = np.empty(which.size, dtype=np.int64)
    sequence[np.lexsort((position, which, start))] = np.arange(which.size)
    source, target = _match(flow, outgoing, sequence)
    turned = sequence[target] < sequence[source]
    straight_source = np.unique(source[~turned])
    # A turned arrow gets an id of its own, because several may lead to one source.
    rows = np.concatenate([straight_source, target[~turned], target[turned], source[turned]])
    own = target[turned]
    ids = np.concatenate([flow[straight_source], flow[target[~turned]], own, own])
    count = [straight_source.size, int((~turned).sum()), own.size, own.size]
    begins = np.repeat([True, False, True, False], count)
    is_turned = np.repeat([False, False, True, True], count)
    arrows = {}
    for part in parts:
        mine = np.flatnonzero(which[rows] == part.rank)
        mine = mine[np.argsort(position[rows[mine]], kind="stable")]
        arrows[part.rank] = Arrows(position[rows[mine]], ids[mine], begins[mine], is_turned[mine])
    return arrows


def _match(flow: Ints, outgoing: Ints, sequence: Ints) -> tuple[Ints, Ints]:
    """Rows of the source and of the target for each end that has a source.

    Where several spans claim to start a flow, the first in time does.
    """
    sources, targets = np.flatnonzero(outgoing), np.flatnonzero(~outgoing)
    sources = sources[np.lexsort((sequence[sources], flow[sources]))]
    ids, first = np.unique(flow[sources], return_index=True)
    if not ids.size:
        return sources[:0], targets[:0]
    at = np.minimum(np.searchsorted(ids, flow[targets]), ids.size - 1)
    has_source = ids[at] == flow[targets]
    return sources[first][at[has_source]], targets[has_source]
