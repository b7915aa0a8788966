"""GPUs that stand free and cannot be had: fragments, forgotten drains, unused reservations."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Flags, Floats, group_means
from meshwright.fleet.patterns.evidence_text import (
    format_duration,
    format_gpus,
    format_hours,
    make_job_detections,
)
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    defer_evidence,
    register_fleet_pattern,
)

GRID_S = 300.0
MAX_GRID_POINTS = 10_000
"""Free GPUs are looked at so often at most, however long the time is."""
LONG_WAIT_S = 1800.0
MIN_FORGOTTEN_S = 2 * 86400.0


@register_fleet_pattern(
    FleetPattern(
        "spread-job",
        "A job is spread over more nodes than it needs",
        "placement",
        "a job of an hour or more has GPUs on more nodes than would hold them all",
        "not in GPU-hours: its traffic leaves the node, and whole nodes are broken for others",
        "ask for GPUs by node",
    )
)
def find_spread_jobs(fleet: FleetData) -> Iterator[FleetDetection]:
    """Two GPUs on two nodes."""
    jobs = fleet.jobs
    nodes = np.bincount(jobs.placement_job, minlength=jobs.num_jobs)
    size = group_means(
        np.where(jobs.placement_node >= 0, fleet.node_gpus[jobs.placement_node], np.nan)
        if fleet.node_gpus.size else np.full(jobs.placement_node.size, np.nan),
        jobs.placement_job, jobs.num_jobs,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        needed = np.ceil(jobs.gpus / size)
    yield from make_job_detections(
        (nodes >= 2) & (nodes > needed) & (jobs.run_s >= 3660) & (jobs.gpus > 0),
        np.full(jobs.num_jobs, np.nan),
        lambda row: (
            f"job {jobs.format_label(row)}: {format_gpus(jobs.gpus[row])} on {nodes[row]} nodes of "
            f"{size[row]:g}, for {format_duration(jobs.run_s[row])}",
        ),
        lambda row: (
            f"--nodes={needed[row]:.0f} --gpus-per-node={np.ceil(jobs.gpus[row] / needed[row]):.0f}"
        ),
    )


@register_fleet_pattern(
    FleetPattern(
        "queue-starved-by-fragmentation",
        "Jobs wait though enough GPUs are free, in pieces",
        "placement",
        "a job waits an hour or more in which its partition has enough free GPUs and no nodes with "
        "enough of them each",
        "measured: GPU-hours free in that time, at most as many as the largest such job wants",
        "pack small jobs: SelectTypeParameters=CR_Core_Memory with pack_serial_at_end, a partition "
        "of some nodes for jobs below a node; mw queue compare shows what packing gives",
        owner="operators",
        min_gpu_hours=2.0,
    )
)
def find_fragmentation(fleet: FleetData) -> Iterator[FleetDetection]:
    """Pending while enough is free in pieces; one hit for each partition."""
    jobs = fleet.jobs
    if not fleet.node_states.node.size or not fleet.allocations.job.size:
        return
    grid_s = max(GRID_S, (fleet.until_s - fleet.since_s) / MAX_GRID_POINTS)
    times = np.arange(fleet.since_s, fleet.until_s, grid_s)
    free = _free(fleet, times)
    waits = np.where(np.isnan(jobs.start_s), fleet.until_s, jobs.start_s)
    ready = np.fmax(np.where(np.isnan(jobs.eligible_s), jobs.submit_s, jobs.eligible_s),
                    fleet.since_s)  # fmt: skip
    pending = (jobs.gpus > 0) & (waits - ready >= LONG_WAIT_S)
    for (cluster, partition), nodes in _partitions(fleet).items():
        mine = jobs.partition.equals(partition) & jobs.cluster.equals(cluster)
        own = np.flatnonzero(pending & mine)
        here = free[nodes]
        size = float(np.nanmax(fleet.node_gpus[nodes], initial=0))
        starved: list[tuple[int, float]] = []
        wanted = np.zeros(times.size)
        shapes: dict[float, Flags] = {}
        for row in own.tolist():
            gpus = float(jobs.gpus[row])
            if gpus not in shapes:
                count = max(1.0, np.ceil(gpus / max(size, 1)))
                fits = (here >= gpus / count).sum(axis=0) >= count
                shapes[gpus] = (here.sum(axis=0) >= gpus) & ~fits
            first, last = np.searchsorted(times, (ready[row], waits[row]))
            broken = shapes[gpus][first:last]
            if broken.sum() * grid_s >= 3600:
                starved.append((row, float(broken.sum() * grid_s)))
                wanted[first:last] = np.fmax(wanted[first:last], np.where(broken, gpus, 0.0))
        if starved:
            worst, longest = max(starved, key=lambda pair: pair[1])
            cost = float(np.minimum(wanted, here.sum(axis=0)).sum()) * grid_s / 3600
            yield FleetDetection(
                cost,
                defer_evidence(
                    lambda starved, worst, longest, partition: (
                        f"partition {partition}: {len(starved)} jobs waited though enough GPUs "
                        "were free",
                        f"job {jobs.format_label(worst)} wants "
                        f"{format_gpus(float(jobs.gpus[worst]))}: "
                        f"{format_duration(longest)} with enough of them free, in pieces",
                    ),
                    starved,
                    worst,
                    longest,
                    partition,
                ),
                jobs=np.array([row for row, _ in starved]),
            )


def _partitions(fleet: FleetData) -> dict[tuple[str, str], list[int]]:
    """The nodes of each partition of each cluster."""
    found: dict[tuple[str, str], set[int]] = {}
    clusters = fleet.node_index.clusters
    for node, names in zip(
        fleet.node_states.node.tolist(), fleet.node_states.partitions, strict=True
    ):
        for name in names:
            found.setdefault((clusters[node], name), set()).add(node)
    return {name: sorted(nodes) for name, nodes in found.items()}


def _free(fleet: FleetData, times: Floats) -> Floats:
    """Free GPUs of every node that is up, at every time."""
    allocations, standing = fleet.allocations, fleet.node_states
    change = np.zeros((fleet.node_index.num_nodes, times.size + 1))
    up = np.zeros((fleet.node_index.num_nodes, times.size + 1))
    first = np.searchsorted(times, allocations.start_s)
    last = np.searchsorted(times, allocations.end_s)
    np.add.at(change, (allocations.node, first), allocations.gpu_fraction)
    np.add.at(change, (allocations.node, last), -allocations.gpu_fraction)
    good = standing.state.equals("up")
    gpus = np.nan_to_num(standing.gpus)[good]
    np.add.at(up, (standing.node[good], np.searchsorted(times, standing.since_s[good])), gpus)
    np.add.at(up, (standing.node[good], np.searchsorted(times, standing.until_s[good])), -gpus)
    free: Floats = np.cumsum(up - change, axis=1)[:, :-1]
    return np.maximum(free, 0)


def _unheld(fleet: FleetData, rows: Flags) -> tuple[Floats, Floats]:
    """For stretches of nodes: GPU-hours there were, and those that no job held."""
    standing, allocations = fleet.node_states, fleet.allocations
    there = np.nan_to_num(standing.gpus) * (standing.until_s - standing.since_s) / 3600
    taken = np.zeros(there.size)
    for row in np.flatnonzero(rows).tolist():
        own = allocations.node == standing.node[row]
        inside = np.minimum(allocations.end_s[own], standing.until_s[row]) - np.maximum(
            allocations.start_s[own], standing.since_s[row]
        )
        taken[row] = float((np.maximum(inside, 0) * allocations.gpu_fraction[own]).sum()) / 3600
    return there, np.maximum(there - taken, 0)


def _stretches(fleet: FleetData, which: Flags, least_s: float) -> Iterator[FleetDetection]:
    standing = fleet.node_states
    which = which & (standing.until_s - standing.since_s >= least_s) & (standing.node >= 0)
    there, left = _unheld(fleet, which)
    for row in np.flatnonzero(which & (left >= 0.9 * there)).tolist():
        name = fleet.node_index.names[int(standing.node[row])]
        yield FleetDetection(
            float(left[row]),
            defer_evidence(
                lambda row, name: (
                    f"{name}: {standing.state.at(row)} for "
                    f"{format_duration(float(standing.until_s[row] - standing.since_s[row]))}, "
                    f"{format_hours(float(left[row]))} GPU-hours unused"
                    + (f"; reason: {standing.reason.at(row)}" if standing.reason.at(row) else ""),
                ),
                row,
                name,
            ),
            nodes=(name,),
        )


@register_fleet_pattern(
    FleetPattern(
        "forgotten-drain",
        "A node is drained or down, and nobody brings it back",
        "placement",
        "a node is down or draining for two days or more without a job on it",
        "measured: its GPU-hours in that time",
        "mend it or bring it back: scontrol update nodename=NODE state=resume after dcgmi diag -r "
        "3, kubectl uncordon NODE",
        owner="operators",
    )
)
def find_forgotten_drains(fleet: FleetData) -> Iterator[FleetDetection]:
    """Down for days."""
    yield from _stretches(
        fleet, fleet.node_states.state.equals("down", "draining"), MIN_FORGOTTEN_S
    )


@register_fleet_pattern(
    FleetPattern(
        "reservation-unused",
        "Reserved nodes stand empty",
        "placement",
        "a node is reserved for a day or more and less than 10 % of it is used",
        "measured: its GPU-hours in that time that no job held",
        "end it (scontrol delete reservationname=NAME) or let others in until it is needed: "
        "flags=FLEX with a partition of preemptible jobs",
        owner="operators",
    )
)
def find_unused_reservations(fleet: FleetData) -> Iterator[FleetDetection]:
    """Reserved for nobody."""
    yield from _stretches(fleet, fleet.node_states.state.equals("reserved"), 86400.0)
