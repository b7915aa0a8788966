"""`rank_algorithms` and `find_best_algorithm`: the library on a network, fastest first."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective import (
    ALGORITHMS,
    AlgorithmInfo,
    Collective,
    CollectiveOp,
    build_algorithm,
)
from meshwright.policy.collective.phase_pipelining import UNPARTITIONED_OPS, pipeline_phases
from meshwright.predict.collective.message_costs import MessageCosts
from meshwright.predict.collective.sim_network import SimNetwork
from meshwright.predict.collective.simulation import (
    SimulatedCollective,
    build_network,
    simulate_collective,
)
from meshwright.spec.cluster import Cluster, LinkGraph

MAX_STEPPED_MOVES = 4_000_000
"""Moves up to which an algorithm that has to be simulated step by step is tried."""
MAX_PIPELINED_MOVES = 150_000
"""The same for algorithms cut into parts."""
_PARTS = 8
_IN_NODES = ("nvls", "nvls_tree")
_IN_NETWORK = (*_IN_NODES, "sharp")


class RankedAlgorithm(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One way to carry out a collective, and how long it takes."""

    name: str
    """The algorithm."""
    channels: int
    message_parts: int
    """Parts of the message that follow each other."""
    result: SimulatedCollective
    collective: Collective

    @property
    def seconds(self) -> float:
        """The simulated time."""
        return self.result.seconds


class RankGroup(NamedTuple):
    """Where ranks lie, as far as algorithms ask."""

    network: SimNetwork
    members: tuple[int, ...]
    domains: tuple[int, ...]
    """The nodes (or larger scale-up domains) they are in, in their order."""
    per_node: int | None
    """Ranks of each node, where all but the last have as many and follow each other; None also
    inside one node."""
    has_equal_nodes: bool
    """Whether every node has as many."""
    nodes_per_pod: int | None
    """Nodes of each pod, where they fill pods."""
    in_network: tuple[str, ...]
    """Algorithms whose switches there are."""


def find_best_algorithm(
    system: Cluster | LinkGraph | SimNetwork,
    op: CollectiveOp,
    nbytes: float,
    *,
    members: Sequence[int] | None = None,
    costs: MessageCosts | None = None,
) -> RankedAlgorithm:
    """Return the library's fastest algorithm for a collective on a network."""
    return rank_algorithms(system, op, nbytes, members=members, costs=costs)[0]


def rank_algorithms(
    system: Cluster | LinkGraph | SimNetwork,
    op: CollectiveOp,
    nbytes: float,
    *,
    members: Sequence[int] | None = None,
    costs: MessageCosts | None = None,
    orders: Sequence[Sequence[int]] | None = None,
) -> list[RankedAlgorithm]:
    """Return every algorithm that fits, each with its best channels and parts, fastest first.

    `orders` are orders of ranks around a ring, tried beside the library's own.
    """
    group = _group(system, members)
    found: list[RankedAlgorithm] = []
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


def _seconds(ranked: RankedAlgorithm) -> float:
    return ranked.seconds


def _channels(group: RankGroup) -> tuple[int, ...]:
    """Return one channel, and one for each rank of a node: every card then has its own.

    Where the last node has fewer, it has fewer cards too.
    """
    if group.per_node is None:
        return (1,)
    fewest = len(group.members) % group.per_node or group.per_node
    return tuple(sorted({1, fewest, group.per_node}))


def _needs_alike(algorithm: AlgorithmInfo, op: CollectiveOp) -> bool:
    """Tell whether nodes of unlike size are more than an algorithm can be built for."""
    if algorithm.name == "sharp":
        return op not in ("broadcast", "reduce")
    return algorithm.name in _IN_NODES or "per_node" in algorithm.needs


def _fits(group: RankGroup, algorithm: AlgorithmInfo, op: CollectiveOp) -> bool:
    """Tell whether an algorithm does an operation on ranks that lie like this."""
    if op not in algorithm.ops or op in ("all_to_all_v", "send_recv"):
        return False
    if algorithm.name in _IN_NETWORK and algorithm.name not in group.in_network:
        return False
    if not group.has_equal_nodes and _needs_alike(algorithm, op):
        return False
    # With one rank per node there is nothing to do inside of nodes.
    given = {
        "per_node": group.per_node if group.per_node != 1 else None,
        "nodes_per_pod": group.nodes_per_pod,
    }
    if algorithm.name in _IN_NODES and len(group.domains) > 1 and given["per_node"] is None:
        return False
    return all(given.get(name) is not None for name in algorithm.needs)


def _tried(
    group: RankGroup,
    algorithm: AlgorithmInfo,
    op: CollectiveOp,
    nbytes: float,
    *,
    costs: MessageCosts | None,
    channels: int,
    orders: Sequence[Sequence[int]] | None,
) -> list[RankedAlgorithm]:
    """Return an algorithm in one piece and in parts, where it can be built."""
    if not _fits(group, algorithm, op):
        return []
    found = []
    for order in (None, *((orders,) if orders and algorithm.name == "ring" else ())):
        plain = build_algorithm(
            algorithm.name,
            op,
            len(group.members),
            per_node=group.per_node,
            nodes_per_pod=group.nodes_per_pod if "nodes_per_pod" in algorithm.needs else None,
            channels=channels,
            orders=order,
        )
        plain = _at_home(plain, group)
        regular = algorithm.name == "ring"
        if plain.moves > MAX_STEPPED_MOVES and not regular:
            continue
        found.append((1, plain))
        if op in UNPARTITIONED_OPS and plain.moves * _PARTS <= MAX_PIPELINED_MOVES:
            found.append((_PARTS, pipeline_phases(plain, _PARTS)))
    results = []
    for parts, collective in found:
        if any(name not in group.network.switches for name in collective.switches):
            continue
        result = simulate_collective(
            collective, group.network, nbytes, members=group.members, costs=costs
        )
        results.append(
            RankedAlgorithm(
                name=algorithm.name,
                channels=channels,
                message_parts=parts,
                result=result,
                collective=collective,
            )
        )
    return results


def _group(system: Cluster | LinkGraph | SimNetwork, members: Sequence[int] | None) -> RankGroup:
    network = build_network(system, members)
    gpus = tuple(range(network.gpus)) if members is None else tuple(int(gpu) for gpu in members)
    network.get_endpoints(gpus, len(gpus), ())
    able: tuple[str, ...] = ()
    numbers = [int(network.domains[gpu]) for gpu in gpus]
    units = tuple(dict.fromkeys(numbers))
    per_node, alike = _per_node(numbers)
    pods = None
    if isinstance(system, Cluster):
        inside = system.scale_up.in_network_reduction
        able += _IN_NODES if inside else ()
        reduces = inside and system.fabric.in_network_reduction
        # Inside one unit nothing goes through the fabric.
        able += ("sharp",) if reduces and len(units) > 1 else ()
        pods = _per_pod(system, len(gpus) // (per_node or 1))
    return RankGroup(network, gpus, units, per_node, alike, pods, able)


def _at_home(collective: Collective, group: RankGroup) -> Collective:
    """Return a collective whose first node is the group's first: the library counts from 0."""
    network = group.network
    ends = {name: int(network.domains[network.gpus + i]) for i, name in enumerate(network.switches)}
    homes = {unit: name for name, unit in ends.items() if unit >= 0}
    own = {f"nvswitch{node}": homes.get(unit) for node, unit in enumerate(group.domains)}
    switches = tuple(own.get(name) or name for name in collective.switches)
    return msgspec.structs.replace(collective, switches=switches)


def _per_pod(cluster: Cluster, nodes: int) -> int | None:
    """Return the nodes of a pod (what one leaf joins), where the group's nodes fill pods."""
    size = cluster.fabric.tiers[0].nodes if cluster.fabric.tiers else None
    return size if size and nodes % size == 0 else None


def _per_node(units: Sequence[int]) -> tuple[int | None, bool]:
    """Return how many ranks each unit has (the last may have fewer), and whether all are alike."""
    widths = [len(list(ranks)) for _, ranks in groupby(units)]
    if len(widths) == 1:
        return None, True
    apart = len(widths) == len(set(units))
    if not apart or set(widths[:-1]) != {widths[0]} or widths[-1] > widths[0]:
        return None, False
    return widths[0], widths[-1] == widths[0]
