"""`find_bandwidth_bound`: the highest rate of any schedule on a network, with the limiting cut.

All-gather, reduce-scatter, broadcast and reduce are bound by one cut: what has to cross it, over
what it carries (ForestColl, arXiv 2402.06787). All-reduce is bound by a division of the
GPUs into p parts: to sum a chunk over p parts and tell all of them, at least 2(p-1) copies of it go
from part to part. This is the directed form of Nash-Williams' and Tutte's bound on edge-disjoint
spanning trees. No reduction or multicast inside switches is assumed.
"""

from math import inf

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.policy.collective.synthesis.capacity_network import (
    CapacityNetwork,
    build_capacity_network,
    select_gpus,
)
from meshwright.policy.collective.synthesis.max_flow import ResidualGraph, list_set_bits
from meshwright.spec.cluster.link_graph import LinkGraph
from meshwright.spec.cluster.routing_table import Arc

SUPPORTED_OPS: tuple[CollectiveOp, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
)
_CLOSE = 1e-9


class BandwidthBound(msgspec.Struct, frozen=True, kw_only=True):
    """The most a collective can reach, and why."""

    op: CollectiveOp
    rate_bytes_per_s: float
    """Message bytes over seconds (nccl-tests' algbw) that nothing can exceed."""
    cut_partition: tuple[tuple[str, ...], ...]
    """The vertices of the binding cut: the one side, or for all-reduce every part."""
    crossing_bytes_per_s: float
    """What the links carry that leave the one side, or lead from part to part."""
    reason: str
    """The bound as a sentence."""


def find_bandwidth_bound(
    graph: LinkGraph, op: CollectiveOp, gpus: tuple[str, ...] | None = None, *, root: int = 0
) -> BandwidthBound:
    """Return the most that a collective over some GPUs of a graph can reach."""
    members = select_gpus(graph, gpus)
    check_op(op, root, len(members))
    return find_network_bound(build_capacity_network(graph, members), op, root)


def check_op(op: str, root: int, ranks: int) -> None:
    """Refuse an operation that is not made of trees, or a root that does not exist."""
    problems = []
    if op not in SUPPORTED_OPS:
        known = ", ".join(SUPPORTED_OPS)
        problems.append(Problem("op", f"no trees carry out {op!r}", f"use one of {known}"))
    if not 0 <= root < ranks:
        what = f"there is no rank {root} among {ranks}"
        problems.append(Problem("root", what, f"use 0 to {ranks - 1}"))
    if problems:
        raise InputError(problems)


def find_network_bound(network: CapacityNetwork, op: CollectiveOp, root: int) -> BandwidthBound:
    """Return the most that a collective over a whole network can reach."""
    backwards = op in ("reduce_scatter", "reduce")
    if op == "all_reduce":
        found = [_all_reduce(network), *_one_way(network)]
        return min(found, key=lambda bound: bound.rate_bytes_per_s)
    if op in ("all_gather", "reduce_scatter"):
        return _all_gather(network, op, backwards)
    return _broadcast(network, op, root, backwards)


def _all_gather(network: CapacityNetwork, op: CollectiveOp, backwards: bool) -> BandwidthBound:
    """Newton's method: a rate that some cut forbids is lowered to what that cut allows."""
    matrix, gpus = network.to_matrix(backwards=backwards), network.gpus
    into = [sum(row[v] for row in matrix) for v in range(gpus)]
    tightest = min(range(gpus), key=into.__getitem__)
    side = (1 << network.size) - 1 & ~(1 << tightest)
    rate = into[tightest] / (gpus - 1)
    sink, content = tightest, 0
    while content < gpus:
        fed = ResidualGraph(add_source(matrix, [rate] * gpus), _CLOSE * rate)
        got = fed.send_flow(network.size, sink, gpus * rate)
        if got < gpus * rate * (1 - 100 * _CLOSE):
            side = fed.source_side(network.size) & ~(1 << network.size)
            rate = _crossing(matrix, side) / (side & (1 << gpus) - 1).bit_count()
            content = 0
        else:
            content += 1
            sink = (sink + 1) % gpus
    inside = (side & (1 << gpus) - 1).bit_count()
    crossing = _crossing(matrix, side)
    where = "into" if backwards else "out of"
    what = "sums owed to" if backwards else "shares of"
    reason = (
        f"the {what} {inside} of {gpus} GPUs go {where} the cut, which carries "
        f"{crossing / 1e9:.4g} GB/s that way"
    )
    return BandwidthBound(
        op=op,
        rate_bytes_per_s=gpus * rate,
        cut_partition=(network.get_names(side),),
        crossing_bytes_per_s=crossing,
        reason=reason,
    )


def _broadcast(
    network: CapacityNetwork, op: CollectiveOp, root: int, backwards: bool
) -> BandwidthBound:
    """Edmonds: as many trees leave a root as the narrowest cut between it and anyone carries."""
    matrix = network.to_matrix(backwards=backwards)
    best, side = float("inf"), 0
    for sink in range(network.gpus):
        if sink != root:
            fed = ResidualGraph(matrix, _CLOSE * max(max(row) for row in matrix))
            got = fed.send_flow(root, sink, best)
            if got < best:
                best, side = got, fed.source_side(root)
    where = "into" if backwards else "out of"
    reason = f"all of the message goes {where} the cut around {network.names[root]}"
    return BandwidthBound(
        op=op,
        rate_bytes_per_s=best,
        cut_partition=(network.get_names(side),),
        crossing_bytes_per_s=_crossing(matrix, side),
        reason=f"{reason}, which carries {best / 1e9:.4g} GB/s that way",
    )


def _one_way(network: CapacityNetwork) -> list[BandwidthBound]:
    """Return what all-reduce cannot exceed where links carry less in one direction.

    Everybody's data gets into every sum and every sum to everybody, so the whole message leaves
    each set of GPUs once. With as much there as back the division into parts says this already.
    """
    if all(network.get_reverse_rate(arc) == rate for arc, rate in network.capacity.items()):
        return []
    return [_broadcast(network, "all_reduce", 0, backwards) for backwards in (False, True)]


def _all_reduce(network: CapacityNetwork) -> BandwidthBound:
    matrix, gpus = network.to_matrix(), network.gpus
    # Half for summing, half for spreading; of each link the mean of its two directions.
    both: dict[Arc, float] = {}
    for arc, rate in network.capacity.items():
        both[arc] = both[network.reverse_arc(arc)] = rate + network.get_reverse_rate(arc)
    half = network.to_matrix({arc: rate / 4 for arc, rate in both.items()})
    parts = [1 << gpu for gpu in range(gpus)]
    rate = sum(_crossing(half, part) for part in parts) / (len(parts) - 1)
    while True:
        roots, tight = find_min_root_rates(half, gpus, rate, _CLOSE * rate)
        if sum(roots) <= rate * (1 + 1e3 * _CLOSE):
            break
        found = _apart(tight, gpus)
        if len(found) < 2:
            break
        lower = sum(_crossing(half, part) for part in found) / (len(found) - 1)
        if lower >= rate * (1 - _CLOSE):
            break
        rate, parts = lower, found
    crossing = sum(_crossing(matrix, part) for part in parts)
    count = len(parts)
    reason = (
        f"summing over {count} parts and telling all takes {2 * (count - 1)} crossings of the "
        f"message, and the links between them carry {crossing / 1e9:.4g} GB/s together"
    )
    return BandwidthBound(
        op="all_reduce",
        rate_bytes_per_s=rate,
        cut_partition=tuple(network.get_names(part) for part in parts),
        crossing_bytes_per_s=crossing,
        reason=reason,
    )


def find_min_root_rates(
    half: list[list[float]], gpus: int, rate: float, tolerance: float, floor: float = -inf
) -> tuple[list[float], list[int]]:
    """Return how much has to be rooted at each GPU so that trees of this total rate exist.

    A set U of vertices gets what is rooted in it and what comes in; both together have to reach the
    rate. Beginning with too much everywhere, each GPU in turn gives up what it can, down to a
    floor. The demands form an intersecting supermodular function, so this greedy order ends with
    the least sum (Frank, 1978). With a floor of 0 trees over these links exist if and only if that
    is no more than the rate; without one it is so if links may carry more one way and less the
    other. Also returned are the sets, as bits, that kept a GPU from giving up more.
    """
    roots: list[float] = [rate] * gpus
    tight = []
    size = len(half)
    unfed = ResidualGraph(add_source(half, roots), tolerance)
    for gpu in range(gpus):
        # What is rooted below zero is owed: it counts for every set that leaves it out.
        fed = unfed.copy()
        owed: float = 0
        for other, held in enumerate(roots):
            if held < 0:
                fed.adjust_capacity(other, gpu, -held)
                owed -= held
        spare = fed.send_flow(size, gpu, (2 * gpus + 1) * rate + owed) - owed - rate
        if spare < roots[gpu] - floor:
            tight.append(fed.sink_side(gpu))
        roots[gpu] = max(roots[gpu] - max(spare, 0), floor)
        unfed.adjust_capacity(size, gpu, max(roots[gpu], 0) - rate)
    return roots, tight


def _apart(sets: list[int], gpus: int) -> list[int]:
    """Join sets that share a GPU; switches that two sets share go to neither."""
    every = (1 << gpus) - 1
    groups: list[int] = []
    for joining in sets:
        merged, rest = joining, []
        for group in groups:
            if group & joining & every:
                merged |= group
            else:
                rest.append(group)
        groups = [*rest, merged]
    met = [sum(group >> v & 1 for group in groups) for v in range(max(groups).bit_length())]
    shared = sum(1 << v for v, times in enumerate(met) if times > 1)
    return [group & ~shared for group in groups]


def add_source(matrix: list[list[float]], supply: list[float]) -> list[list[float]]:
    """Add a vertex that feeds the GPUs."""
    rows = [[*row, 0] for row in matrix]
    rows.append([*supply, *([0] * (len(matrix) + 1 - len(supply)))])
    return rows


def _crossing(matrix: list[list[float]], side: int) -> float:
    inside = list(list_set_bits(side & (1 << len(matrix)) - 1))
    return sum(
        rate for u in inside for t, rate in enumerate(matrix[u]) if rate and not side >> t & 1
    )
