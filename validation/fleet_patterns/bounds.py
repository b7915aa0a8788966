"""Fixed bounds in place of the statistics of some patterns: what operators use without them.

The same fleets are judged by both, so that the page can say whether a statistic earns its place.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import group_max, group_means
from meshwright.fleet.patterns.data.lost_work import find_allocated_jobs
from validation.fleet_patterns.world import World


class Bound(NamedTuple):
    """A rule with a fixed bound."""

    pattern: str
    rule: str
    jobs: Callable[[FleetData], Iterable[str]] | None = None
    nodes: Callable[[FleetData], Iterable[str]] | None = None


class Tally(NamedTuple):
    """How often a rule was right."""

    true: int
    false: int
    missed: int


def _job_names(fleet: FleetData, which: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> list[str]:
    return [fleet.jobs.job.at(int(row)) for row in np.flatnonzero(which)]


def _node_names(fleet: FleetData, which: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> list[str]:
    return [fleet.node_index.names[int(row)] for row in np.flatnonzero(which)]


def _slow_gpu(fleet: FleetData) -> list[str]:
    kinds, uses = fleet.gpu_kinds, fleet.utilization
    top = group_max(uses["peak_sm_clock_mhz"], kinds.codes, len(kinds.values))[kinds.codes]
    slow = fleet.loaded_uses & (uses["busy_sm_clock_mhz"] < 0.9 * top)
    found = np.bincount(uses.job[slow], minlength=fleet.jobs.num_jobs) > 0
    return _job_names(fleet, found & (fleet.num_sampled_gpus >= 4))


def _slow_node(fleet: FleetData) -> list[str]:
    kinds, uses = fleet.gpu_kinds, fleet.utilization
    clock = np.where(fleet.loaded_uses, uses["busy_sm_clock_mhz"], np.nan)
    mean = group_means(clock, kinds.codes, len(kinds.values))[kinds.codes]
    return _node_names(
        fleet, group_means(clock / mean, uses.node, fleet.node_index.num_nodes) < 0.97
    )


def _slower(fleet: FleetData) -> list[str]:
    """The last quarter of the run well below the first: by the halves that the change splits."""
    uses = fleet.utilization
    with np.errstate(divide="ignore", invalid="ignore"):
        drop = 1 - uses["after"] / uses["before"]
    drop = np.where(fleet.sampled_uses, drop, np.nan)
    mean = group_means(drop, uses.job, fleet.jobs.num_jobs)
    return _job_names(fleet, (mean >= 0.12) & (fleet.jobs.run_s >= 3 * 3600))


def _metadata(fleet: FleetData) -> list[str]:
    hosts = fleet.host_usage
    rate = group_means(hosts["metadata_ops"], hosts.job, fleet.jobs.num_jobs)
    return _job_names(fleet, rate >= 300)


def _errors(fleet: FleetData) -> list[str]:
    faults = fleet.faults
    kinds = faults.kind.equals("ecc", "row_remap", "pcie", "nvlink", "infiniband")
    count = np.bincount(
        faults.node[kinds & (faults.node >= 0)], minlength=fleet.node_index.num_nodes
    )
    return _node_names(fleet, count >= 5)


def _lemon(fleet: FleetData) -> list[str]:
    jobs = fleet.jobs
    bad = jobs.state.equals("failed", "node_fail")[jobs.placement_job] & (jobs.placement_node >= 0)
    return _node_names(
        fleet, np.bincount(jobs.placement_node[bad], minlength=fleet.node_index.num_nodes) >= 4
    )


def _before(*kinds: str) -> Callable[[FleetData], list[str]]:
    def found(fleet: FleetData) -> list[str]:
        rows = np.flatnonzero(fleet.faults.kind.equals(*kinds))
        job = find_allocated_jobs(fleet, rows, 3600.0)
        failed = fleet.jobs.state.equals("failed", "node_fail", "requeued", "out_of_memory")
        return [fleet.jobs.job.at(int(row)) for row in np.unique(job[job >= 0]) if failed[row]]

    return found


BOUNDS = (
    Bound("straggler-gpu", "a GPU below 90 % of the top clock of its kind", jobs=_slow_gpu),
    Bound("slow-node", "mean clock 3 % below the mean of its kind", nodes=_slow_node),
    Bound("lasting-slowdown", "12 % less after the change than before, however gradual",
    jobs=_slower),
    Bound("metadata-storm", "300 operations a second or more", jobs=_metadata),
    Bound("errors-rising", "five errors or more on a node", nodes=_errors),
    Bound("lemon-node", "four failed jobs or more on a node", nodes=_lemon),
    Bound("infiniband-errors-before-failure", "any error in the hour before a failure",
          jobs=_before("infiniband")),
)  # fmt: skip


def tallied(bound: Bound, fleet: FleetData, world: World) -> Tally:
    """Judge a fixed bound on one fleet, by the same labels and allowances as the pattern."""
    labels = [label for label in world.labels if label.pattern == bound.pattern]
    allowed = [label for label in world.labels if bound.pattern in label.also]
    told = set((bound.jobs or bound.nodes or (lambda _: ()))(fleet))

    def subjects(label: object) -> frozenset[str]:
        return getattr(label, "jobs" if bound.jobs else "nodes")  # type: ignore[no-any-return]

    hit = [label for label in labels if subjects(label) & told]
    known = frozenset().union(*(subjects(label) for label in (*labels, *allowed)))
    return Tally(len(hit), len(told - known), len(labels) - len(hit))
