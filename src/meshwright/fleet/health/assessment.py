"""Every node of a store judged: the health of a fleet at a moment."""

import math
from typing import NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.health import outliers
from meshwright.fleet.health.lemons import find_lemons, group_incidents
from meshwright.fleet.health.node_faults import EVENT_COLUMNS, NodeFault, merge_events
from meshwright.fleet.health.outliers import NodeAnomaly
from meshwright.fleet.health.recovery import NodeKey, RecoveryHistory
from meshwright.fleet.health.score import ACTION_ORDER, NodeHealth, assess_node, group_by_node
from meshwright.fleet.health.xids import load_xid_catalog
from meshwright.fleet.store import FleetStore

RECENT_S = 86_400.0
"""Clocks and throttling are judged over the last day that is known."""


class FleetHealth(NamedTuple):
    """The health of a fleet at a moment."""

    since_s: float
    until_s: float
    nodes: tuple[NodeHealth, ...]
    """Worst first."""
    num_application_xids: int
    """Xids that programs caused, which say nothing of nodes."""

    def select_by_action(self, action: str) -> tuple[NodeHealth, ...]:
        """Return the nodes for which this is advised."""
        return tuple(node for node in self.nodes if node.action == action)


def assess_fleet(
    store: FleetStore, since_s: float, until_s: float, cluster: str | None = None
) -> FleetHealth:
    """Judge every node that a store knows, from what is known up to a moment."""
    now_s, until_s = until_s, math.nextafter(until_s, math.inf)  # the last that is known counts
    name = (cluster or "").replace("'", "''")
    where = f"cluster = '{name}'" if cluster else None
    sizes = store.table_sizes()

    def rows(table: str, columns: tuple[str, ...]) -> pa.Table | None:
        return (
            store.read_table(table, columns, since_s, until_s, where)
            if sizes[table].num_rows
            else None
        )

    events = store.read_table("events", EVENT_COLUMNS, since_s, until_s, where)
    nodes = rows("nodes", ("cluster", "node", "since_s", "until_s", "state", "gpus"))
    gpus = rows("gpus", ("cluster", "node", "gpu", "uuid", "since_s"))
    jobs = rows("jobs", ("cluster", "state", "nodes", "end_s"))
    clearing = RecoveryHistory(events, nodes, gpus, until_s)
    week_s = max(since_s, until_s - 7 * RECENT_S)  # who is silent for longer is gone
    measured = {
        place: last
        for place, last in outliers.read_last_sample_times(store, week_s, until_s).items()
        if cluster in (None, place[0])
    }
    faults = tuple(_indexed(fault, gpus) for fault in merge_events(events))
    worked = _places_of(jobs)
    told = set(zip(events["cluster"].to_pylist(), events["node"].to_pylist(), strict=True))
    known = told | worked | measured.keys()
    places = known | clearing.list_nodes()
    signs = (
        *outliers.find_counter_outliers(
            events, max(_devices(gpus), _told_gpus(nodes)), len(places)
        ),
        *outliers.find_throttled_gpus(store, max(since_s, until_s - RECENT_S), until_s, cluster),
        *_silent(measured, clearing),
    )
    moments = [((one.cluster, one.node), one.last_s) for one in faults if one.advice.repair]
    of = group_incidents([*moments, *clearing.down_events, *_node_failures(jobs)])
    bad = {
        place: rate
        for place, rate in find_lemons(of, len(places)).items()
        if not clearing.was_checked_after(place, of[place][-1])
    }
    own_faults, own_signs = group_by_node(faults), group_by_node(signs)
    made = [
        assess_node(
            place, cast(tuple[NodeFault, ...], tuple(own_faults[place])),
            cast(tuple[NodeAnomaly, ...], tuple(own_signs[place])), clearing, now_s,
            incidents=len(of.get(place, ())), rate=bad.get(place), known=place in known,
        )
        for place in sorted(places)
    ]  # fmt: skip
    made.sort(
        key=lambda one: (ACTION_ORDER.index(one.action), one.score or 0.0, one.cluster, one.node)
    )
    return FleetHealth(since_s, now_s, tuple(made), _programs(events))


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


def _indexed(fault: NodeFault, gpus: pa.Table | None) -> NodeFault:
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


def _silent(measured: dict[NodeKey, float], clearing: RecoveryHistory) -> list[NodeAnomaly]:
    """Nodes in service that were measured, and no longer are while others of the cluster are."""
    newest: dict[str, float] = {}
    for (cluster, _), last_s in measured.items():
        newest[cluster] = max(newest.get(cluster, last_s), last_s)
    return [
        NodeAnomaly(
            *place, None, "silent", f"not measured for the last {late_s / 3600:.0f} h", 0.35
        )
        for place, last_s in sorted(measured.items())
        if (late_s := newest[place[0]] - last_s) > outliers.MAX_SILENCE_S
        and clearing.find_node_state(place) not in ("down", "draining")
    ]


def _places_of(jobs: pa.Table | None) -> set[NodeKey]:
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


def _node_failures(jobs: pa.Table | None) -> list[tuple[NodeKey, float]]:
    """Jobs that their node's failure ended; of several nodes nobody says which it was."""
    if jobs is None or not jobs.num_rows:
        return []
    alone = pc.fill_null(pc.equal(pc.list_value_length(jobs["nodes"]), 1), False)
    own = jobs.filter(pc.and_(pc.equal(jobs["state"], "node_fail"), alone)).to_pylist()
    return [((row["cluster"], row["nodes"][0]), row["end_s"]) for row in own if row["end_s"]]


def _programs(events: pa.Table) -> int:
    """Count Xids whose fault is a program's."""
    codes = [one.code for one in load_xid_catalog().values() if one.origin == "application"]
    own = pc.and_(
        pc.equal(events["kind"], "xid"),
        pc.is_in(pc.fill_null(events["code"], -1), value_set=pa.array(codes, pa.int32())),
    )
    return int(pc.sum(pc.cast(own, pa.int64())).as_py() or 0)
