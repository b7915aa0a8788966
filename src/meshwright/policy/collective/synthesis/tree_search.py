"""`find_best_trees`: the trees that carry most over the ways that a network gives to transfers.

The bound lets data take any way. Where trees need ways that transfers do not get, they collide and
carry less than planned; so several networks and lower plans are tried, and what each would really
carry decides.
"""

from itertools import product

from meshwright.policy.collective.collective import CollectiveOp
from meshwright.policy.collective.synthesis.bandwidth_bound import (
    BandwidthBound,
    find_network_bound,
)
from meshwright.policy.collective.synthesis.capacity_network import CapacityNetwork
from meshwright.policy.collective.synthesis.edge_splitting import split_off_switches
from meshwright.policy.collective.synthesis.link_loads import compute_link_loads
from meshwright.policy.collective.synthesis.subnetworks import list_subnetworks
from meshwright.policy.collective.synthesis.tree_collective import build_tree_collective
from meshwright.policy.collective.synthesis.tree_packing import SpanningTree, pack_trees
from meshwright.policy.collective.synthesis.tree_scaling import ROUNDING_TOLERANCE, scale_to_trees

_LEAST_PLAN = 0.5
"""The part of a network's own bound below which plans are not lowered any more."""

Trees = list[SpanningTree]


def find_best_trees(
    network: CapacityNetwork, bound: BandwidthBound, root: int
) -> tuple[Trees, Trees | None]:
    """Return the trees, and others for the sums where those take trees of their own."""
    op = bound.op
    best, rate = _best(network, bound, root)
    if op == "all_reduce" and not _near(rate, bound.rate_bytes_per_s) and _lopsided(network, best):
        spread, _ = _best(network, find_network_bound(network, "all_gather", root), root)
        summed, _ = _best(network, find_network_bound(network, "reduce_scatter", root), root)
        spread, summed = _times(spread, _each(summed)), _times(summed, _each(spread))
        plain = build_tree_collective(spread, op, network.gpus, pieces=1, summing=summed)
        if compute_link_loads(network.routing_table, plain).rate_bytes_per_s > rate:
            return spread, summed
    return best, None


def _near(rate: float, most: float) -> bool:
    return rate >= most * (1 - 1.5 * ROUNDING_TOLERANCE)


def _lopsided(network: CapacityNetwork, trees: Trees) -> bool:
    """Say whether trees used in both directions may waste links, or there are none."""
    rates = network.capacity.items()
    return not trees or any(network.get_reverse_rate(arc) != rate for arc, rate in rates)


def _best(network: CapacityNetwork, bound: BandwidthBound, root: int) -> tuple[Trees, float]:
    op = bound.op
    # Shares summed by all-gather's trees, then spread by them, are an all-reduce too.
    ways_to: tuple[CollectiveOp, ...] = (
        ("all_gather", "all_reduce") if op == "all_reduce" else (op,)
    )
    best: Trees = []
    best_rate = 0.0
    for part, planned in product(list_subnetworks(network), ways_to):
        passes = 2 if planned != op else 1
        most = find_network_bound(part, planned, root).rate_bytes_per_s
        plan = most
        while (
            plan / passes > best_rate * (1 + ROUNDING_TOLERANCE / 2) and plan > _LEAST_PLAN * most
        ):
            trees = _plan(part, planned, root, plan)
            rate = _steady(network, trees, op, root)
            if rate > best_rate:
                best, best_rate = trees, rate
            if not trees or _near(rate, plan / passes):
                break
            plan *= 1 - 2 * ROUNDING_TOLERANCE
        if _near(best_rate, bound.rate_bytes_per_s):
            break
    if not best and op != "all_reduce":
        best = _shortest(network, op, root)
        best_rate = _steady(network, best, op, root)
    return best, best_rate


def _plan(network: CapacityNetwork, op: CollectiveOp, root: int, rate_bytes_per_s: float) -> Trees:
    """Return trees that would carry a rate if each had the ways it was given; none if they fail."""
    scaled = scale_to_trees(network, op, root, rate_bytes_per_s)
    if scaled is None:
        return []
    uses = network.list_pairs_by_arc(op in ("reduce_scatter", "reduce"))
    between = split_off_switches(scaled, network.gpus, uses)
    return [] if between is None else pack_trees(between, scaled.trees_by_root)


def _steady(network: CapacityNetwork, trees: Trees, op: CollectiveOp, root: int) -> float:
    if not trees:
        return 0.0
    plain = build_tree_collective(trees, op, network.gpus, root=root, pieces=1)
    return compute_link_loads(network.routing_table, plain).rate_bytes_per_s


def _shortest(network: CapacityNetwork, op: CollectiveOp, root: int) -> Trees:
    """Return for each root the tree of fewest hops: for networks too lopsided for anything else."""
    ways, gpus = network.routing_table, network.gpus
    backwards = op in ("reduce_scatter", "reduce")
    trees = []
    for start in range(gpus) if op in ("all_gather", "reduce_scatter") else (root,):
        reached = [start]
        edges = []
        for u in reached:
            for t in range(gpus):
                if t not in reached and (
                    ways.find_direct_path(t, u) if backwards else ways.find_direct_path(u, t)
                ):
                    reached.append(t)
                    edges.append((u, t))
        trees.append(SpanningTree(start, tuple(edges), 1))
    return trees


def _each(trees: Trees) -> int:
    """Return how many trees begin at each GPU, it being the same for all."""
    return sum(tree.weight for tree in trees if tree.root == trees[0].root)


def _times(trees: Trees, factor: int) -> Trees:
    return [tree._replace(weight=tree.weight * factor) for tree in trees]
