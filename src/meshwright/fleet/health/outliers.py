"""Nodes against their peers: counters that rise faster, clocks that are lower, heat, silence."""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.health.node_faults import COUNTER_KINDS
from meshwright.fleet.statistics.robust import find_count_outliers, robust_z_scores
from meshwright.fleet.store import FleetStore

LOAD_THRESHOLD: Final = 0.5
"""A GPU this busy is under load."""
MIN_WINDOWS: Final = 12
"""Five minutes each: an hour under load, else nothing is said of a GPU."""
MIN_PEERS: Final = 8
THERMAL_BITS, BRAKE_BITS = 0x20 | 0x40, 0x08 | 0x80
"""Bits of DCGM: slowed by heat; slowed by the hardware or by the power brake."""
MAX_SILENCE_S: Final = 3600.0


class NodeAnomaly(NamedTuple):
    """Something about a node that is not as with its peers."""

    cluster: str
    node: str
    gpu: int | None
    kind: str
    description: str
    weight: float


def find_counter_outliers(events: pa.Table, gpus: int, nodes: int) -> tuple[NodeAnomaly, ...]:
    """Find devices whose counters rise more often than chance allows, against all others.

    Of each kind: hours with a rise for each device, held against the mean of the calmer 95 %, with
    its overdispersion; 1 % false discovery (Benjamini and Hochberg). Fewer than four hours are
    never told.
    """
    found = []
    for kind in COUNTER_KINDS:
        rows = events.filter(pc.equal(events["kind"], kind))
        if not rows.num_rows:
            continue
        hour = pc.cast(pc.floor(pc.divide(rows["time_s"], 3600.0)), pa.int64())
        hours = rows.select(["cluster", "node", "gpu"]).append_column("hour", hour)
        each = (
            hours.group_by(["cluster", "node", "gpu", "hour"])
            .aggregate([])
            .group_by(["cluster", "node", "gpu"])
            .aggregate([("hour", "count")])
            .sort_by([("cluster", "ascending"), ("node", "ascending"), ("gpu", "ascending")])
        )
        seen = each["hour_count"].to_numpy().astype(np.float64)
        of_gpus = each["gpu"].null_count < each.num_rows
        outliers = find_count_outliers(seen, gpus if of_gpus else nodes)
        for at in np.flatnonzero(outliers.is_outlier).tolist():
            row = each.slice(at, 1).to_pylist()[0]
            what = f"{kind} errors in {seen[at]:.0f} hours, {outliers.usual:.2g} are usual"
            found.append(NodeAnomaly(row["cluster"], row["node"], row["gpu"], kind, what, 0.3))
    return tuple(found)


def find_throttled_gpus(
    store: FleetStore, since_s: float, until_s: float, cluster: str | None
) -> tuple[NodeAnomaly, ...]:
    """Find GPUs that heat or power hold back, and those slower than their like under such load."""
    if not store.table_sizes()["gpu_rollups_5m"].num_rows:
        return ()
    name = (cluster or "").replace("'", "''")
    only = f" AND cluster = '{name}'" if cluster else ""
    found = store.sql(
        f"""
        WITH busy AS (
            SELECT cluster, node, gpu, time_s, throttle_any AS bits, sm_clock_mhz_mean AS clock,
                floor(least(coalesce(tensor_active_mean, 0), 0.99) * 10) AS tenth,
                round(memory_total_max / 1e9) AS size
            FROM gpu_rollups_5m WHERE time_s >= {since_s!r} AND time_s < {until_s!r}{only}
                AND coalesce(gpu_util_mean, engine_active_mean, sm_active_mean) >= {LOAD_THRESHOLD}
        ), usual AS (
            SELECT cluster, size, tenth, median(clock) AS clock, count(DISTINCT (node, gpu)) AS gpus
            FROM busy GROUP BY ALL
        )
        SELECT busy.cluster, busy.node, busy.gpu, any_value(busy.size) AS size,
            avg(((bits & {THERMAL_BITS}) != 0)::INT) AS heat,
            avg(((bits & {BRAKE_BITS}) != 0)::INT) AS brake,
            median(CASE WHEN usual.gpus >= {MIN_PEERS} THEN busy.clock / usual.clock END) AS pace
        FROM busy JOIN usual
            ON busy.cluster = usual.cluster AND busy.tenth = usual.tenth
            AND busy.size IS NOT DISTINCT FROM usual.size
        GROUP BY busy.cluster, busy.node, busy.gpu
        HAVING count(*) >= {MIN_WINDOWS} ORDER BY ALL
        """
    )
    return (*_held_back(found), *_slow(found))


def _held_back(found: pa.Table) -> list[NodeAnomaly]:
    signs = []
    for name, kind, what in (
        ("heat", "heat", "slowed by heat"),
        ("brake", "power_brake", "slowed by the power brake or the board"),
    ):
        share = pc.fill_null(found[name], 0.0).to_numpy()
        for at in np.flatnonzero(share >= 0.05).tolist():
            row = found.slice(at, 1).to_pylist()[0]
            told = f"{what} for {share[at]:.0%} of its time under load"
            weight = min(0.5, float(share[at]))
            signs.append(NodeAnomaly(row["cluster"], row["node"], row["gpu"], kind, told, weight))
    return signs


def _slow(found: pa.Table) -> list[NodeAnomaly]:
    pace = pc.fill_null(found["pace"], float("nan")).to_numpy().astype(np.float64)
    if not pace.size:
        return []
    size = pc.fill_null(found["size"], -1.0).to_numpy()
    group = np.unique(size, return_inverse=True)[1].astype(np.int64)
    with np.errstate(invalid="ignore"):
        odd = robust_z_scores(pace, np.where(np.isnan(pace), -1, group), 0.01)
        slow = (pace <= 0.95) & (odd <= -6)
    signs = []
    for at in np.flatnonzero(slow).tolist():
        row = found.slice(at, 1).to_pylist()[0]
        told = f"clock under load {1 - pace[at]:.0%} below that of its peers"
        weight = min(0.5, 4 * float(1 - pace[at]))
        signs.append(NodeAnomaly(row["cluster"], row["node"], row["gpu"], "slow", told, weight))
    return signs


def read_last_sample_times(
    store: FleetStore, since_s: float, until_s: float
) -> dict[tuple[str, str], float]:
    """Return when each node was last measured."""
    if not store.table_sizes()["gpu_rollups_5m"].num_rows:
        return {}
    rows = store.sql(
        "SELECT cluster, node, max(time_s) AS last_s FROM gpu_rollups_5m "
        f"WHERE time_s >= {since_s!r} AND time_s < {until_s!r} GROUP BY ALL"
    ).to_pylist()
    return {(row["cluster"], row["node"]): row["last_s"] for row in rows}
