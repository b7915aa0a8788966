"""Fixed bounds in place of the statistics of some patterns: what operators use without them.

The same fleets are judged by both, so that the page can say whether a statistic earns its place.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from meshwright.observe.fleet.patterns.arrays import by_group, most_of
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.lost import holders
from validation.fleet_patterns.world import World


class Bound(NamedTuple):
    """A rule with a fixed bound."""

    pattern: str
    rule: str
    jobs: Callable[[Fleet], Iterable[str]] | None = None
    nodes: Callable[[Fleet], Iterable[str]] | None = None


class Tally(NamedTuple):
    """How often a rule was right."""

    true: int
    false: int
    missed: int


def _job_names(fleet: Fleet, which: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> list[str]:
    return [fleet.jobs.job.at(int(row)) for row in np.flatnonzero(which)]


def _node_names(fleet: Fleet, which: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> list[str]:
    return [fleet.places.names[int(row)] for row in np.flatnonzero(which)]


def _slow_gpu(fleet: Fleet) -> list[str]:
    kinds, uses = fleet.kinds, fleet.uses
    top = most_of(uses["peak_sm_clock_mhz"], kinds.codes, len(kinds.values))[kinds.codes]
    slow = fleet.loaded & (uses["busy_sm_clock_mhz"] < 0.9 * top)
    found = np.bincount(uses.job[slow], minlength=fleet.jobs.number) > 0
    return _job_names(fleet, found & (fleet.num_seen >= 4))


def _slow_node(fleet: Fleet) -> list[str]:
    kinds, uses = fleet.kinds, fleet.uses
    clock = np.where(fleet.loaded, uses["busy_sm_clock_mhz"], np.nan)
    mean = by_group(clock, kinds.codes, len(kinds.values))[kinds.codes]
    return _node_names(fleet, by_group(clock / mean, uses.node, fleet.places.number) < 0.97)


def _slower(fleet: Fleet) -> list[str]:
    """The last quarter of the run well below the first: by the halves that the change splits."""
    uses = fleet.uses
    with np.errstate(divide="ignore", invalid="ignore"):
        drop = 1 - uses["after"] / uses["before"]
    drop = np.where(fleet.seen, drop, np.nan)
    mean = by_group(drop, uses.job, fleet.jobs.number)
    return _job_names(fleet, (mean >= 0.12) & (fleet.jobs.run_s >= 3 * 3600))


def _metadata(fleet: Fleet) -> list[str]:
    hosts = fleet.hosts
    rate = by_group(hosts["metadata"], hosts.job, fleet.jobs.number)
    return _job_names(fleet, rate >= 300)


def _errors(fleet: Fleet) -> list[str]:
    faults = fleet.faults
    kinds = faults.kind.equals("ecc", "row_remap", "pcie", "nvlink", "infiniband")
    count = np.bincount(faults.node[kinds & (faults.node >= 0)], minlength=fleet.places.number)
    return _node_names(fleet, count >= 5)


def _lemon(fleet: Fleet) -> list[str]:
    jobs = fleet.jobs
    bad = jobs.state.equals("failed", "node_fail")[jobs.on_job] & (jobs.on_node >= 0)
    return _node_names(fleet, np.bincount(jobs.on_node[bad], minlength=fleet.places.number) >= 4)


def _before(*kinds: str) -> Callable[[Fleet], list[str]]:
    def found(fleet: Fleet) -> list[str]:
        rows = np.flatnonzero(fleet.faults.kind.equals(*kinds))
        job = holders(fleet, rows, 3600.0)
        failed = fleet.jobs.state.equals("failed", "node_fail", "requeued", "out_of_memory")
        return [fleet.jobs.job.at(int(row)) for row in np.unique(job[job >= 0]) if failed[row]]

    return found


BOUNDS = (
    Bound("straggler-gpu", "a GPU below 90 % of the top clock of its kind", jobs=_slow_gpu),
    Bound("slow-node", "mean clock 3 % below the mean of its kind", nodes=_slow_node),
    Bound("slower-since", "12 % less after the change than before, however gradual", jobs=_slower),
    Bound("metadata-storm", "300 operations a second or more", jobs=_metadata),
    Bound("errors-rising", "five errors or more on a node", nodes=_errors),
    Bound("lemon-node", "four failed jobs or more on a node", nodes=_lemon),
    Bound("infiniband-errors-before-failure", "any error in the hour before a failure",
          jobs=_before("infiniband")),
)  # fmt: skip


def tallied(bound: Bound, fleet: Fleet, world: World) -> Tally:
    """Judge a fixed bound on one fleet, by the same labels and allowances as the pattern."""
    labels = [label for label in world.labels if label.pattern == bound.pattern]
    allowed = [label for label in world.labels if bound.pattern in label.also]
    told = set((bound.jobs or bound.nodes or (lambda _: ()))(fleet))

    def subjects(label: object) -> frozenset[str]:
        return getattr(label, "jobs" if bound.jobs else "nodes")  # type: ignore[no-any-return]

    hit = [label for label in labels if subjects(label) & told]
    known = frozenset().union(*(subjects(label) for label in (*labels, *allowed)))
    return Tally(len(hit), len(told - known), len(labels) - len(hit))
