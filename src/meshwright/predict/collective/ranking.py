"""`rank` and `best`: the library's algorithms on a network, the fastest first."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective import ALGORITHMS, Algorithm, Collective, Op, build
from meshwright.policy.collective.streaming import WHOLE, streamed
from meshwright.predict.collective.costs import Costs
from meshwright.predict.collective.network import Network
from meshwright.predict.collective.simulation import Simulated, network_of, simulate
from meshwright.spec.cluster import Cluster, LinkGraph

MOST_MOVES = 4_000_000
"""Moves up to which an algorithm that has to be simulated step by step is tried."""
MOST_STREAMED = 150_000
"""The same for algorithms cut into parts."""
_PARTS = 8
_IN_NETWORK = ("nvls", "nvls_tree", "sharp")


class Ranked(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One way to carry out a collective, and how long it takes."""

    name: str
    """The algorithm."""
    channels: int
    parts: int
    """Parts of the message that follow each other."""
    result: Simulated
    collective: Collective

    @property
    def seconds(self) -> float:
        """The simulated time."""
        return self.result.seconds


class Group(NamedTuple):
    """Where ranks lie, as far as algorithms ask."""

    network: Network
    members: tuple[int, ...]
    per_node: int | None
    """Ranks of each node, where all have as many and follow each other."""
    nodes_per_pod: int | None
    """Nodes of each pod, where they fill pods."""
    in_network: tuple[str, ...]
    """Algorithms whose switches there are."""


def best(
    system: Cluster | LinkGraph | Network,
    op: Op,
    nbytes: float,
    *,
    members: Sequence[int] | None = None,
    costs: Costs | None = None,
) -> Ranked:
    """Return the library's fastest algorithm for a collective on a network."""
    return rank(system, op, nbytes, members=members, costs=costs)[0]


def rank(
    system: Cluster | LinkGraph | Network,
    op: Op,
    nbytes: float,
    *,
    members: Sequence[int] | None = None,
    costs: Costs | None = None,
    orders: Sequence[Sequence[int]] | None = None,
) -> list[Ranked]:
    """Return every algorithm that fits, each with its best channels and parts, fastest first.

    `orders` are orders of ranks around a ring, tried beside the library's own.
    """
    group = _group(system, members)
    found: list[Ranked] = []
    for algorithm in ALGORITHMS:
        tried = [
            _tried(group, algorithm, op, nbytes, costs=costs, channels=channels, orders=orders)
            for channels in _channels(group)
        ]
        fitting = [one for several in tried for one in several]
        if fitting:
            found.append(min(fitting, key=_seconds))
    if not found:
        what = (
            f"no algorithm of the library does {op} on {len(group.members)} ranks of this network"
        )
        raise InputError([Problem("op", what, "use another collective, or build one yourself")])
    return sorted(found, key=_seconds)


def _seconds(ranked: Ranked) -> float:
    return ranked.seconds


def _channels(group: Group) -> tuple[int, ...]:
    return (1,) if group.per_node is None else (1, group.per_node)


def _tried(
    group: Group,
    algorithm: Algorithm,
    op: Op,
    nbytes: float,
    *,
    costs: Costs | None,
    channels: int,
    orders: Sequence[Sequence[int]] | None,
) -> list[Ranked]:
    """Return an algorithm in one piece and in parts, where it can be built."""
    if op not in algorithm.ops or op in ("all_to_all_v", "send_recv"):
        return []
    if algorithm.name in _IN_NETWORK and algorithm.name not in group.in_network:
        return []
    given = {"per_node": group.per_node, "nodes_per_pod": group.nodes_per_pod}
    if any(given.get(name) is None for name in algorithm.needs):
        return []
    found = []
    for order in (None, *((orders,) if orders and algorithm.name == "ring" else ())):
        plain = build(
            algorithm.name,
            op,
            len(group.members),
            per_node=group.per_node,
            nodes_per_pod=group.nodes_per_pod if "nodes_per_pod" in algorithm.needs else None,
            channels=channels,
            orders=order,
        )
        regular = algorithm.name == "ring"
        if plain.moves > MOST_MOVES and not regular:
            continue
        found.append((1, plain))
        if op in WHOLE and plain.moves * _PARTS <= MOST_STREAMED:
            found.append((_PARTS, streamed(plain, _PARTS)))
    results = []
    for parts, collective in found:
        if any(name not in group.network.switches for name in collective.switches):
            continue
        result = simulate(collective, group.network, nbytes, members=group.members, costs=costs)
        results.append(
            Ranked(
                name=algorithm.name,
                channels=channels,
                parts=parts,
                result=result,
                collective=collective,
            )
        )
    return results


def _group(system: Cluster | LinkGraph | Network, members: Sequence[int] | None) -> Group:
    network = network_of(system, members)
    gpus = tuple(range(network.gpus)) if members is None else tuple(int(gpu) for gpu in members)
    network.ends(gpus, len(gpus), ())
    able: tuple[str, ...] = ()
    per_node, pods = _per_node(network, gpus), None
    if isinstance(system, Cluster):
        inside = system.scale_up.in_network_reduction
        able += ("nvls", "nvls_tree") if inside else ()
        several = len({int(network.units[gpu]) for gpu in gpus}) > 1
        reduces = inside and system.fabric.in_network_reduction
        # Inside one unit nothing goes through the fabric.
        able += ("sharp",) if reduces and several else ()
        pods = _per_pod(system, len(gpus) // (per_node or 1))
    return Group(network, gpus, per_node, pods, able)


def _per_pod(cluster: Cluster, nodes: int) -> int | None:
    """Return the nodes of a pod (what one leaf joins), where the group's nodes fill pods."""
    size = cluster.fabric.tiers[0].nodes if cluster.fabric.tiers else None
    return size if size and nodes % size == 0 else None


def _per_node(network: Network, members: tuple[int, ...]) -> int | None:
    """Return how many ranks each unit has, where they are equal and neighbours in number."""
    units = [int(network.units[gpu]) for gpu in members]
    width = units.count(units[0])
    even = all(len(set(units[first : first + width])) == 1 for first in range(0, len(units), width))
    distinct = len(set(units)) * width == len(units)
    return width if even and distinct and 1 < width < len(units) else None
