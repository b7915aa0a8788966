"""Every node of a store judged: the health of a fleet at a moment."""

import math
from typing import NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.fleet.health import peers
from meshwright.observe.fleet.health.clearing import Clearing, Place
from meshwright.observe.fleet.health.faults import COLUMNS, Fault, faults_of
from meshwright.observe.fleet.health.lemons import incidents, lemons
from meshwright.observe.fleet.health.peers import Sign
from meshwright.observe.fleet.health.score import ORDER, Node, by_place, node_of
from meshwright.observe.fleet.health.xids import catalogue
from meshwright.observe.fleet.store import Store

RECENT_S = 86_400.0
"""Clocks and throttling are judged over the last day that is known."""


class Health(NamedTuple):
    """The health of a fleet at a moment."""

    since_s: float
    until_s: float
    nodes: tuple[Node, ...]
    """Worst first."""
    programs: int
    """Xids that programs caused, which say nothing of nodes."""

    def of(self, action: str) -> tuple[Node, ...]:
        """Return the nodes for which this is advised."""
        return tuple(node for node in self.nodes if node.action == action)


def examine(store: Store, since_s: float, until_s: float, cluster: str | None = None) -> Health:
    """Judge every node that a store knows, from what is known up to a moment."""
    now_s, until_s = until_s, math.nextafter(until_s, math.inf)  # the last that is known counts
    name = (cluster or "").replace("'", "''")
    where = f"cluster = '{name}'" if cluster else None
    held = store.held()

    def rows(table: str, columns: tuple[str, ...]) -> pa.Table | None:
        return store.table(table, columns, since_s, until_s, where) if held[table].rows else None

    events = store.table("events", COLUMNS, since_s, until_s, where)
    nodes = rows("nodes", ("cluster", "node", "since_s", "until_s", "state", "gpus"))
    gpus = rows("gpus", ("cluster", "node", "gpu", "uuid", "since_s"))
    jobs = rows("jobs", ("cluster", "state", "nodes", "end_s"))
    clearing = Clearing(events, nodes, gpus, until_s)
    week_s = max(since_s, until_s - 7 * RECENT_S)  # who is silent for longer is gone
    measured = {
        place: last
        for place, last in peers.last_windows(store, week_s, until_s).items()
        if cluster in (None, place[0])
    }
    faults = tuple(_indexed(fault, gpus) for fault in faults_of(events))
    worked = _places_of(jobs)
    told = set(zip(events["cluster"].to_pylist(), events["node"].to_pylist(), strict=True))
    known = told | worked | measured.keys()
    places = known | clearing.places()
    signs = (
        *peers.counted(events, max(_devices(gpus), _told_gpus(nodes)), len(places)),
        *peers.of_windows(store, max(since_s, until_s - RECENT_S), until_s, cluster),
        *_silent(measured, clearing),
    )
    moments = [((one.cluster, one.node), one.last_s) for one in faults if one.verdict.mend]
    of = incidents([*moments, *clearing.down, *_node_failures(jobs)])
    bad = {
        place: rate
        for place, rate in lemons(of, len(places)).items()
        if not clearing.checked_after(place, of[place][-1])
    }
    own_faults, own_signs = by_place(faults), by_place(signs)
    made = [
        node_of(
            place, cast(tuple[Fault, ...], tuple(own_faults[place])),
            cast(tuple[Sign, ...], tuple(own_signs[place])), clearing, now_s,
            incidents=len(of.get(place, ())), rate=bad.get(place), known=place in known,
        )
        for place in sorted(places)
    ]  # fmt: skip
    made.sort(key=lambda one: (ORDER.index(one.action), one.score or 0.0, one.cluster, one.node))
    return Health(since_s, now_s, tuple(made), _programs(events))


def _devices(gpus: pa.Table | None) -> int:
    if gpus is None or not gpus.num_rows:
        return 0
    return int(gpus.group_by(["cluster", "node", "gpu"]).aggregate([]).num_rows)


def _told_gpus(nodes: pa.Table | None) -> int:
    """How many GPUs the scheduler says there are."""
    if nodes is None or not nodes.num_rows:
        return 0
    most = nodes.group_by(["cluster", "node"]).aggregate([("gpus", "max")])
    return int(pc.sum(most["gpus_max"]).as_py() or 0)


def _indexed(fault: Fault, gpus: pa.Table | None) -> Fault:
    """Say which index a GPU had that a kernel's log names by its UUID."""
    if fault.gpu is not None or gpus is None or "GPU-" not in fault.text:
        return fault
    uuid = "GPU-" + fault.text.partition("GPU-")[2].partition(":")[0].split(",")[0].strip()
    own = gpus.filter(
        pc.and_(
            pc.and_(pc.equal(gpus["cluster"], fault.cluster), pc.equal(gpus["node"], fault.node)),
            pc.fill_null(pc.equal(gpus["uuid"], uuid), False),
        )
    )
    indexes = {row["gpu"] for row in own.to_pylist() if (row["since_s"] or 0.0) <= fault.last_s}
    return fault._replace(gpu=indexes.pop()) if len(indexes) == 1 else fault


def _silent(measured: dict[Place, float], clearing: Clearing) -> list[Sign]:
    """Nodes in service that were measured, and no longer are while others of the cluster are."""
    newest: dict[str, float] = {}
    for (cluster, _), last_s in measured.items():
        newest[cluster] = max(newest.get(cluster, last_s), last_s)
    return [
        Sign(*place, None, "silent", f"not measured for the last {late_s / 3600:.0f} h", 0.35)
        for place, last_s in sorted(measured.items())
        if (late_s := newest[place[0]] - last_s) > peers.SILENT_S
        and clearing.state(place) not in ("down", "draining")
    ]


def _places_of(jobs: pa.Table | None) -> set[Place]:
    if jobs is None or not jobs.num_rows:
        return set()
    own = jobs.filter(pc.is_valid(jobs["nodes"]))
    at = pc.list_parent_indices(own["nodes"].combine_chunks())
    pairs = pa.table(
        {
            "cluster": own["cluster"].combine_chunks().take(at),
            "node": pc.list_flatten(own["nodes"].combine_chunks()),
        }
    )
    found = pairs.group_by(["cluster", "node"]).aggregate([]).to_pylist()
    return {(row["cluster"], row["node"]) for row in found if row["node"]}


def _node_failures(jobs: pa.Table | None) -> list[tuple[Place, float]]:
    """Jobs that their node's failure ended; of several nodes nobody says which it was."""
    if jobs is None or not jobs.num_rows:
        return []
    alone = pc.fill_null(pc.equal(pc.list_value_length(jobs["nodes"]), 1), False)
    own = jobs.filter(pc.and_(pc.equal(jobs["state"], "node_fail"), alone)).to_pylist()
    return [((row["cluster"], row["nodes"][0]), row["end_s"]) for row in own if row["end_s"]]


def _programs(events: pa.Table) -> int:
    """Count Xids whose fault is a program's."""
    codes = [one.code for one in catalogue().values() if one.fault == "application"]
    own = pc.and_(
        pc.equal(events["kind"], "xid"),
        pc.is_in(pc.fill_null(events["code"], -1), value_set=pa.array(codes, pa.int32())),
    )
    return int(pc.sum(pc.cast(own, pa.int64())).as_py() or 0)
