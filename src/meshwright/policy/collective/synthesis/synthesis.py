"""`synthesize`: a schedule made for one network, near the most that its links allow.

For bandwidth: bound → links counted in trees → switches split off → trees packed → chunks streamed
through them. For latency: the fewest rounds in which everyone gets everything. It knows links and
their rates; what a transfer costs beside them, and how long the whole takes, `predict` knows.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective, Op
from meshwright.policy.collective.synthesis.bound import Bound, check_op, network_bound
from meshwright.policy.collective.synthesis.growing import grow
from meshwright.policy.collective.synthesis.loads import Loads, loads_on
from meshwright.policy.collective.synthesis.network import (
    Network,
    chosen_gpus,
    joined,
)
from meshwright.policy.collective.synthesis.packing import Grown
from meshwright.policy.collective.synthesis.rounds import in_rounds
from meshwright.policy.collective.synthesis.scaling import NEAR
from meshwright.policy.collective.synthesis.streaming import depth, stream
from meshwright.spec.cluster.links import LinkGraph

Aim = Literal["bandwidth", "latency"]


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """A spanning tree that carries part of the message."""

    root: int
    """The rank that its part comes from, or is summed at."""
    edges: tuple[tuple[int, int], ...]
    """Parent and child, parents first."""
    weight: float
    """The share of the message that it carries."""


class Synthesis(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule made for one network, and how good it is."""

    collective: Collective
    members: tuple[str, ...]
    """The GPU of every rank."""
    aim: Aim
    bound: Bound
    """The most that any schedule can reach here, and the cut that says so."""
    loads: Loads
    """What this one puts on the links, and the rate that follows."""
    trees: tuple[Tree, ...]
    """Where the chunks go; empty for schedules in rounds."""
    notes: tuple[str, ...]
    """What a reader should know about it."""

    @property
    def rate_bytes_per_s(self) -> float:
        """Message bytes over seconds, once chunks stream."""
        return self.loads.rate_bytes_per_s

    @property
    def of_bound(self) -> float:
        """The rate as a share of the bound."""
        return self.rate_bytes_per_s / self.bound.rate_bytes_per_s


def synthesize(
    graph: LinkGraph,
    op: Op,
    *,
    gpus: tuple[str, ...] | None = None,
    root: int = 0,
    aim: Aim = "bandwidth",
    pieces: int | None = None,
) -> Synthesis:
    """Return a schedule of an operation over some GPUs of a graph (all, where None).

    `pieces` is how often the part of each tree is cut, so that its levels work at the same time.
    """
    members = chosen_gpus(graph, gpus)
    check_op(op, root, len(members))
    _check(aim, pieces)
    network = joined(graph, members)
    bound = network_bound(network, op, root)
    if aim == "latency":
        collective, note = in_rounds(network.ways, op, root)
        trees: list[Grown] = []
    else:
        trees, summing = grow(network, bound, root)
        collective = stream(trees, op, len(members), root=root, pieces=pieces, summing=summing)
        note = f"{len(trees)} trees, {max(depth(tree) for tree in trees)} hops deep"
    loads = loads_on(network.ways, collective)
    return Synthesis(
        collective=collective,
        members=members,
        aim=aim,
        bound=bound,
        loads=loads,
        trees=_shares(trees),
        notes=(note, *(_notes(network, bound, loads) if trees else ())),
    )


def _check(aim: str, pieces: int | None) -> None:
    problems = []
    if aim not in get_args(Aim):
        known = " or ".join(get_args(Aim))
        problems.append(Problem("aim", f"{aim!r} is not an aim", f"use {known}"))
    if pieces is not None and pieces < 1:
        problems.append(Problem("pieces", f"{pieces} pieces", "use 1 or more"))
    if problems:
        raise InputError(problems)


def _shares(grown: list[Grown]) -> tuple[Tree, ...]:
    total = sum(tree.weight for tree in grown)
    return tuple(
        Tree(root=tree.root, edges=tree.edges, weight=tree.weight / total) for tree in grown
    )


def _notes(network: Network, bound: Bound, loads: Loads) -> Iterator[str]:
    idle = len(network.capacity) - len(loads.bytes_per_byte)
    if idle > 0:
        yield f"{idle} of {len(network.capacity)} links on best ways carry nothing"
    if loads.rate_bytes_per_s < bound.rate_bytes_per_s * (1 - 2 * NEAR):
        yield (
            "the bound lets data take any way; transfers take their best, and meet on "
            f"{loads.busiest[0]} to {loads.busiest[1]}"
        )
