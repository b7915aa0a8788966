"""`synthesize`: a schedule made for one network, near the most that its links allow.

For bandwidth: bound → links counted in trees → switches split off → trees packed → chunks streamed
through them. For latency: the fewest rounds in which everyone gets everything. It knows links and
their rates; what a transfer costs beside them, and how long the whole takes, `predict` knows.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.synthesis.bandwidth_bound import (
    BandwidthBound,
    check_op,
    find_network_bound,
)
from meshwright.policy.collective.synthesis.capacity_network import (
    CapacityNetwork,
    build_capacity_network,
    select_gpus,
)
from meshwright.policy.collective.synthesis.link_loads import SteadyLinkLoads, compute_link_loads
from meshwright.policy.collective.synthesis.round_schedules import build_round_schedule
from meshwright.policy.collective.synthesis.tree_collective import (
    build_tree_collective,
    compute_tree_depth,
)
from meshwright.policy.collective.synthesis.tree_packing import SpanningTree
from meshwright.policy.collective.synthesis.tree_scaling import ROUNDING_TOLERANCE
from meshwright.policy.collective.synthesis.tree_search import find_best_trees
from meshwright.spec.cluster.link_graph import LinkGraph

SynthesisGoal = Literal["bandwidth", "latency"]


class WeightedTree(msgspec.Struct, frozen=True, kw_only=True):
    """A spanning tree that carries part of the message."""

    root: int
    """The rank that its part comes from, or is summed at."""
    edges: tuple[tuple[int, int], ...]
    """Parent and child, parents first."""
    weight: float
    """The share of the message that it carries."""


class SynthesizedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule made for one network, and how good it is."""

    collective: Collective
    members: tuple[str, ...]
    """The GPU of every rank."""
    goal: SynthesisGoal
    bound: BandwidthBound
    """The most that any schedule can reach here, and the cut that says so."""
    link_loads: SteadyLinkLoads
    """What this one puts on the links, and the rate that follows."""
    trees: tuple[WeightedTree, ...]
    """Where the chunks go; empty for schedules in rounds."""
    notes: tuple[str, ...]
    """What a reader should know about it."""

    @property
    def rate_bytes_per_s(self) -> float:
        """Message bytes over seconds, once chunks stream."""
        return self.link_loads.rate_bytes_per_s

    @property
    def bound_share(self) -> float:
        """The rate as a share of the bound."""
        return self.rate_bytes_per_s / self.bound.rate_bytes_per_s


def synthesize(
    graph: LinkGraph,
    op: CollectiveOp,
    *,
    gpus: tuple[str, ...] | None = None,
    root: int = 0,
    goal: SynthesisGoal = "bandwidth",
    pieces: int | None = None,
) -> SynthesizedCollective:
    """Return a schedule of an operation over some GPUs of a graph (all, where None).

    `pieces` is how often the part of each tree is cut, so that its levels work at the same time.
    """
    members = select_gpus(graph, gpus)
    check_op(op, root, len(members))
    _check(goal, pieces)
    network = build_capacity_network(graph, members)
    bound = find_network_bound(network, op, root)
    if goal == "latency":
        collective, note = build_round_schedule(network.routing_table, op, root)
        trees: list[SpanningTree] = []
    else:
        trees, summing = find_best_trees(network, bound, root)
        collective = build_tree_collective(
            trees, op, len(members), root=root, pieces=pieces, summing=summing
        )
        note = f"{len(trees)} trees, {max(compute_tree_depth(tree) for tree in trees)} hops deep"
    loads = compute_link_loads(network.routing_table, collective)
    return SynthesizedCollective(
        collective=collective,
        members=members,
        goal=goal,
        bound=bound,
        link_loads=loads,
        trees=_shares(trees),
        notes=(note, *(_notes(network, bound, loads) if trees else ())),
    )


def _check(goal: str, pieces: int | None) -> None:
    problems = []
    if goal not in get_args(SynthesisGoal):
        known = " or ".join(get_args(SynthesisGoal))
        problems.append(Problem("goal", f"{goal!r} is not a goal", f"use {known}"))
    if pieces is not None and pieces < 1:
        problems.append(Problem("pieces", f"{pieces} pieces", "use 1 or more"))
    if problems:
        raise InputError(problems)


def _shares(grown: list[SpanningTree]) -> tuple[WeightedTree, ...]:
    total = sum(tree.weight for tree in grown)
    return tuple(
        WeightedTree(root=tree.root, edges=tree.edges, weight=tree.weight / total) for tree in grown
    )


def _notes(
    network: CapacityNetwork, bound: BandwidthBound, loads: SteadyLinkLoads
) -> Iterator[str]:
    idle = len(network.capacity) - len(loads.bytes_per_byte)
    if idle > 0:
        yield f"{idle} of {len(network.capacity)} links on best ways carry nothing"
    if loads.rate_bytes_per_s < bound.rate_bytes_per_s * (1 - 2 * ROUNDING_TOLERANCE):
        yield (
            "the bound lets data take any way; transfers take their best, and meet on "
            f"{loads.busiest_link[0]} to {loads.busiest_link[1]}"
        )
