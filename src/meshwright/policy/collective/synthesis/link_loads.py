"""`compute_steady_loads`: steady-state rate of a schedule, from the bytes that each link carries.

A message of one byte puts some bytes on every link; the link that needs longest for its own sets
the rate. Waiting for steps and latency are not counted, so this flatters a schedule that does not
pipeline; `predict` knows those.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.synthesis.capacity_network import select_gpus
from meshwright.spec.cluster.link_graph import LinkGraph
from meshwright.spec.cluster.routing_table import Arc, RoutingTable


class SteadyLinkLoads(msgspec.Struct, frozen=True, kw_only=True):
    """What a collective puts on the links of a graph."""

    rate_bytes_per_s: float
    """Message bytes over seconds that the busiest link allows; 0 where a move has no way."""
    busiest_link: tuple[str, str]
    """The ends of that link, or of the move that has no way."""
    bytes_per_byte: dict[tuple[str, str], float]
    """Bytes on each link for every byte of the message."""


def compute_steady_loads(
    graph: LinkGraph, collective: Collective, members: tuple[str, ...] | None = None
) -> SteadyLinkLoads:
    """Return what a collective over some GPUs reaches when only bandwidth counts."""
    gpus = select_gpus(graph, members)
    if len(gpus) != collective.ranks:
        what = f"{len(gpus)} GPUs for a collective of {collective.ranks} ranks"
        raise InputError([Problem("members", what, f"name {collective.ranks} GPUs")])
    return compute_link_loads(RoutingTable(graph, gpus), collective)


def compute_link_loads(ways: RoutingTable, collective: Collective) -> SteadyLinkLoads:
    """Return what a collective reaches over ways that are known."""
    places = [*range(collective.ranks), *(_switch(ways, name) for name in collective.switches)]
    sent = compute_traffic(collective)
    loads: dict[Arc, float] = {}
    for src, dst in zip(*np.nonzero(sent), strict=True):
        a, b = places[src], places[dst]
        way = ways.find_path(a, b)
        if way is None:
            ends = ways.names[a], ways.names[b]
            return SteadyLinkLoads(rate_bytes_per_s=0.0, busiest_link=ends, bytes_per_byte={})
        for arc, share in way.arc_shares:
            loads[arc] = loads.get(arc, 0.0) + share * float(sent[src, dst])
    if not loads:
        return SteadyLinkLoads(
            rate_bytes_per_s=float("inf"), busiest_link=("", ""), bytes_per_byte={}
        )
    worst = max(loads, key=lambda arc: loads[arc] / ways.arc_bytes_per_s[arc])
    names = ways.names
    return SteadyLinkLoads(
        rate_bytes_per_s=ways.arc_bytes_per_s[worst] / loads[worst],
        busiest_link=(names[worst[0]], names[worst[1]]),
        bytes_per_byte={(names[u], names[t]): load for (u, t), load in loads.items()},
    )


def compute_traffic(collective: Collective) -> NDArray[np.float64]:
    """Return the share of the message that goes from each place (row) to each place (column)."""
    sent = np.zeros((collective.num_endpoints, collective.num_endpoints))
    for sweep in collective.sweeps:
        if not sweep.shift.dst:
            np.add.at(sent, (sweep.moves.src, sweep.moves.dst), sweep.span * sweep.moves.count)
            continue
        for step in range(sweep.steps):
            moves = sweep.get_moves(step)
            np.add.at(sent, (moves.src, moves.dst), moves.count)
    np.fill_diagonal(sent, 0.0)
    return sent / collective.chunks


def _switch(ways: RoutingTable, name: str) -> int:
    if name not in ways.names:
        what = f"the collective reduces in {name}, which the graph does not draw"
        raise InputError([Problem("graph", what, "use a graph with that switch")])
    return ways.names.index(name)
