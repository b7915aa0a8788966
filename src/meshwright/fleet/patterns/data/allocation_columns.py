"""Which GPU was whose, and when: as it was recorded, or as whole nodes show it.

Accounting keeps the nodes of a job but not the GPUs. Where nobody recorded them, a job that has all
GPUs of its nodes has each of them; of a part of a node nothing is assumed.
"""

from typing import Any, NamedTuple

import numpy as np

from meshwright.fleet.columns import read_floats
from meshwright.fleet.patterns.data.group_math import Flags, Floats, Ints
from meshwright.fleet.patterns.data.job_columns import JobColumns
from meshwright.fleet.patterns.data.node_index import NodeIndex

__all__ = ["AllocationColumns", "NodeIndex", "build_allocations", "find_fully_known_nodes"]


class AllocationColumns(NamedTuple):
    """One row for each GPU of each job, clipped to the time looked at."""

    job: Ints
    node: Ints
    gpu: Ints
    start_s: Floats
    end_s: Floats
    gpu_fraction: Floats

    def select(self, which: "Flags | Ints") -> "AllocationColumns":
        """Some of the rows."""
        return AllocationColumns(
            self.job[which], self.node[which], self.gpu[which], self.start_s[which],
            self.end_s[which], self.gpu_fraction[which],
        )  # fmt: skip

    @property
    def gpu_hours(self) -> Floats:
        """GPU-hours of each."""
        hours: Floats = self.gpu_fraction * (self.end_s - self.start_s) / 3600
        return hours


def build_allocations(
    table: Any,
    jobs: JobColumns,
    places: NodeIndex,
    node_gpus: Floats,
    *,
    since_s: float,
    until_s: float,
) -> AllocationColumns:
    """What the table says; for jobs that it does not name, what their nodes show."""
    job = jobs.match_rows(table)
    start = np.maximum(read_floats(table, "start_s"), since_s)
    end = np.nan_to_num(read_floats(table, "end_s"), nan=until_s)
    # A job that is over holds nothing, whatever a record that was never closed says.
    end = np.minimum(
        end, np.where(job >= 0, jobs.end_s[job], until_s) if jobs.num_jobs else until_s
    )
    recorded = AllocationColumns(
        job,
        places.codes(table),
        np.nan_to_num(read_floats(table, "gpu"), nan=-1).astype(np.int64),
        start,
        np.fmin(end, until_s),
        np.nan_to_num(read_floats(table, "gpu_fraction"), nan=1.0),
    )
    kept = (recorded.job >= 0) & (recorded.end_s > recorded.start_s) & (recorded.gpu >= 0)
    recorded = recorded.select(kept)
    assumed = _whole_nodes(jobs, recorded.job, node_gpus, since_s, until_s)
    return AllocationColumns(
        *(np.concatenate(both) for both in zip(recorded, assumed, strict=True))
    )


def _whole_nodes(
    jobs: JobColumns, recorded: Ints, node_gpus: Floats, since_s: float, until_s: float
) -> AllocationColumns:
    size = (
        np.where(jobs.placement_node >= 0, node_gpus[jobs.placement_node], np.nan)
        if node_gpus.size
        else (np.full(jobs.placement_node.size, np.nan))
    )
    total = np.bincount(jobs.placement_job, size, minlength=jobs.num_jobs)
    wanted = (jobs.gpus > 0) & (jobs.gpus == total) & ~np.isnan(jobs.start_s)
    wanted[recorded] = False
    rows = wanted[jobs.placement_job]
    count = size[rows].astype(np.int64)
    job = np.repeat(jobs.placement_job[rows], count)
    node = np.repeat(jobs.placement_node[rows], count)
    first = np.repeat(np.cumsum(count) - count, count)
    start = np.maximum(jobs.start_s[job], since_s)
    end = np.minimum(jobs.end_s[job], until_s)
    allocations = AllocationColumns(
        job, node, np.arange(job.size) - first, start, end, np.ones(job.size)
    )
    return allocations.select(end > start)


def find_fully_known_nodes(
    jobs: JobColumns, allocations: AllocationColumns, places: NodeIndex
) -> Flags:
    """Nodes of which it is known, for every job on them, which GPUs it had."""
    known = np.ones(places.num_nodes, dtype=np.bool_)
    told = np.zeros(jobs.num_jobs, dtype=np.bool_)
    told[allocations.job] = True
    doubtful = (jobs.gpus > 0) & ~np.isnan(jobs.start_s) & ~told
    rows = doubtful[jobs.placement_job] & (jobs.placement_node >= 0)
    known[jobs.placement_node[rows]] = False
    # Jobs whose nodes are not told could be anywhere.
    placed = np.bincount(jobs.placement_job, minlength=jobs.num_jobs) > 0
    if (doubtful & ~placed).any() or not allocations.job.size:
        known[:] = False
    return known
