"""`simulate_collective`: duration, link loads and bottlenecks of a `Collective` on a network."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.contract import find_shape_problems
from meshwright.policy.collective.verification.step_hazards import find_first_out_of_bounds
from meshwright.predict.collective.cluster_network import build_cluster_network
from meshwright.predict.collective.graph_network import build_graph_network
from meshwright.predict.collective.message_costs import MessageCosts
from meshwright.predict.collective.sim_network import CollectiveCall, Floats, SimNetwork
from meshwright.predict.collective.step_runner import CollectiveRun, MoveTimes
from meshwright.spec.cluster import Cluster, LinkGraph

if TYPE_CHECKING:
    from meshwright.timeline import Timeline

MAX_SPANS = 2_000_000
"""Above this a timeline is too large to draw."""


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one link carried."""

    link: str
    """What it joins, such as `gpu0→nvswitch0`."""
    carried_bytes: float
    busy_s: float
    """Time it needs for them at its full rate."""
    utilization: float
    """The same over the whole time."""


class SimulatedCollective(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A collective, carried out on a virtual clock."""

    algorithm: str
    op: CollectiveOp
    ranks: int
    nbytes: float
    network: str
    costs: str
    seconds: float
    bound_s: float
    """The least time that the wires allow, whatever the algorithm; 0 where none is known."""
    steps: int
    moves: int
    finish_s: tuple[float, ...]
    """When each rank has nothing more to do."""
    bottleneck: LinkLoad | None
    """The link that is busy longest; None where no link is used."""
    link_bytes: Floats
    """By link of the network, what it carried."""
    busy_s: Floats
    """By link, the time it needs for that at its full rate."""
    sim_network: SimNetwork
    """What it ran on: `sim_network.link_name(index)` names a link."""
    move_times: tuple[MoveTimes, ...] | None = None
    """Every move with its times, where they were asked for."""
    chunk_bytes: float = 0.0
    """Size of one chunk."""
    base_s: float = 0.0
    """What the call costs before its first move."""

    @property
    def algbw_bytes_per_s(self) -> float:
        """Message size over time, as nccl-tests prints it."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """The same, comparable between numbers of ranks."""
        return self.algbw_bytes_per_s * bus_factor(self.op, self.ranks)

    def list_link_loads(self, most: int | None = None) -> tuple[LinkLoad, ...]:
        """Return the links that carried something, the busiest first."""
        used = np.flatnonzero(self.link_bytes > 0)
        order = used[np.argsort(-self.busy_s[used], kind="stable")][:most]
        return tuple(_load(self.sim_network, self, int(link)) for link in order)

    def build_timeline(self) -> "Timeline":
        """Return every move as a span, one lane per channel and peer."""
        from meshwright.predict.collective.collective_timeline import build_collective_timeline

        if self.move_times is None:
            what = "no moves were kept"
            raise InputError([Problem("timeline", what, "simulate with keep_moves=True")])
        return build_collective_timeline(self)


def _load(network: SimNetwork, result: SimulatedCollective, link: int) -> LinkLoad:
    busy_s = float(result.busy_s[link])
    return LinkLoad(
        link=network.link_name(link),
        carried_bytes=float(result.link_bytes[link]),
        busy_s=busy_s,
        utilization=busy_s / result.seconds if result.seconds else 0.0,
    )


def build_network(
    system: Cluster | LinkGraph | SimNetwork, members: Sequence[int] | None = None
) -> SimNetwork:
    """Return the links and ways of a cluster or graph, for some of its GPUs (all, where None)."""
    if isinstance(system, Cluster):
        return build_cluster_network(system)
    return build_graph_network(system, members=members) if isinstance(system, LinkGraph) else system


def simulate_collective(
    collective: Collective,
    system: Cluster | LinkGraph | SimNetwork,
    nbytes: float,
    *,
    members: Sequence[int] | None = None,
    costs: MessageCosts | None = None,
    keep_moves: bool = False,
) -> SimulatedCollective:
    """Carry out a collective of `nbytes` on a virtual clock.

    `members` are the GPUs of its ranks; rank r is GPU r where they are left out. `keep_moves`
    keeps every move, for a timeline.
    """
    network, costs = build_network(system, members), costs or MessageCosts.physical()
    problems = find_shape_problems(collective)
    if not 0 <= nbytes < float("inf"):
        problems.append(Problem("nbytes", f"{nbytes!r} is not a size", "use 0 or more bytes"))
    if keep_moves and collective.moves > MAX_SPANS:
        what = f"{collective.moves:,} moves are too many for a timeline"
        problems.append(Problem("keep_moves", what, "use fewer ranks, channels or pieces"))
    outside = None if problems else find_first_out_of_bounds(collective)
    if outside is not None:
        problems.append(outside)
    if problems:
        raise InputError(problems)
    ends = network.get_endpoints(members, collective.ranks, collective.switches)
    waves: list[MoveTimes] | None = [] if keep_moves else None
    chunk_bytes = nbytes / collective.chunks
    run = CollectiveRun(
        collective, network, ends, chunk_bytes=chunk_bytes, costs=costs, move_times=waves
    )
    run.run()
    finish = run.finish_s[: collective.ranks] + costs.base_s
    gpus = tuple(int(end) for end in ends[: collective.ranks])
    reduces = bool(collective.switches)
    busy = run.link_clocks.busy_s
    ask = CollectiveCall(collective.op, gpus, nbytes, gpus[collective.root], reduces)
    result = SimulatedCollective(
        algorithm=collective.name,
        op=collective.op,
        ranks=collective.ranks,
        nbytes=float(nbytes),
        network=network.name,
        costs=costs.name,
        seconds=float(run.finish_s.max(initial=0.0)) + costs.base_s,
        bound_s=network.bound_s(ask),
        steps=collective.steps,
        moves=collective.moves,
        finish_s=tuple(finish.tolist()),
        bottleneck=None,
        link_bytes=run.link_clocks.carried_bytes,
        busy_s=busy,
        sim_network=network,
        move_times=None if waves is None else tuple(waves),
        chunk_bytes=chunk_bytes,
        base_s=costs.base_s,
    )
    if not len(busy) or not busy.max():
        return result
    slowest = _load(network, result, int(np.argmax(busy)))
    return msgspec.structs.replace(result, bottleneck=slowest)
