"""`FleetData`: columns for the detectors: jobs, use of their GPUs and nodes, and faults.

Samples are read once, in parts, and only what they say of each GPU of each job is kept
(`utilization`), so that a week of a large fleet needs no more memory than its jobs do.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.fleet.columns import CodedColumn, group_codes, read_floats, read_text
from meshwright.fleet.patterns.data.allocation_columns import (
    AllocationColumns,
    NodeIndex,
    build_allocations,
    find_fully_known_nodes,
)
from meshwright.fleet.patterns.data.group_math import (
    Flags,
    Floats,
    Ints,
    group_max,
    group_means,
    group_sums,
)
from meshwright.fleet.patterns.data.host_usage import HostUsage, build_host_usage
from meshwright.fleet.patterns.data.job_columns import JobColumns, build_job_columns
from meshwright.fleet.patterns.data.utilization import (
    GpuUtilization,
    UnallocatedUse,
    build_utilization,
    join_utilization,
)

MIN_LOADED_S = 1800.0
"""From so long under load on, clocks and the like of a GPU are judged."""


class FaultColumns(msgspec.Struct, frozen=True, eq=False):
    """Events, as columns."""

    node: Ints
    gpu: Ints
    """-1: of the node."""
    time_s: Floats
    kind: CodedColumn
    code: Ints
    count: Floats
    text: CodedColumn


class NodeStateColumns(NamedTuple):
    """How nodes stood, one row for each stretch of time."""

    node: Ints
    since_s: Floats
    until_s: Floats
    state: CodedColumn
    reason: CodedColumn
    gpus: Floats
    gpu_kind: CodedColumn
    cpus: Floats
    memory_bytes: Floats
    partitions: tuple[tuple[str, ...], ...]


class ProgressColumns(NamedTuple):
    """What jobs tell of themselves."""

    job: Ints
    start_s: Floats
    end_s: Floats
    phase: CodedColumn
    step: Floats

    def sum_phase_seconds(self, phase: str, jobs: int) -> Floats:
        """The time each job spent in a phase."""
        own = self.phase.equals(phase) & (self.job >= 0)
        spent = (self.end_s - self.start_s)[own]
        return np.bincount(self.job[own], spent, minlength=jobs).astype(np.float64)


class FleetData(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A fleet over some time."""

    since_s: float
    until_s: float
    node_index: NodeIndex
    """The names of nodes."""
    jobs: JobColumns
    allocations: AllocationColumns
    utilization: GpuUtilization
    unallocated_use: UnallocatedUse
    host_usage: HostUsage
    faults: FaultColumns
    node_states: NodeStateColumns
    progress: ProgressColumns

    @cached_property
    def sampled_uses(self) -> Flags:
        """Uses of which at least half of the time is sampled."""
        wanted = (self.utilization.end_s - self.utilization.start_s) / 2
        enough: Flags = (self.utilization["seen_s"] >= wanted) & (self.utilization["seen_s"] > 0)
        return enough

    @cached_property
    def num_sampled_gpus(self) -> Floats:
        """How many GPUs of each job are sampled."""
        return np.bincount(
            self.utilization.job[self.sampled_uses], minlength=self.jobs.num_jobs
        ).astype(float)

    @cached_property
    def fully_sampled_jobs(self) -> Flags:
        """Jobs all of whose GPUs are sampled, so that "none of them" can be said."""
        enough: Flags = (self.num_sampled_gpus > 0) & (
            self.num_sampled_gpus >= np.floor(self.jobs.gpus - 1e-6)
        )
        return enough

    def mean_by_job(self, name: str) -> Floats:
        """A figure of the uses as the mean of each job, weighted by time."""
        weight = np.where(self.sampled_uses, self.utilization.gpu_hours, 0.0)
        return group_means(self.utilization[name], self.utilization.job, self.jobs.num_jobs, weight)

    def sum_by_job(self, name: str) -> Floats:
        """A figure of the uses added up for each job."""
        value = np.where(self.sampled_uses, self.utilization[name], np.nan)
        return group_sums(value, self.utilization.job, self.jobs.num_jobs)

    def max_by_job(self, name: str) -> Floats:
        """The largest figure of a job's uses."""
        value = np.where(self.sampled_uses, self.utilization[name], np.nan)
        return group_max(value, self.utilization.job, self.jobs.num_jobs)

    def min_by_job(self, name: str) -> Floats:
        """The smallest figure of a job's uses."""
        value = np.where(self.sampled_uses, self.utilization[name], np.nan)
        return -group_max(-value, self.utilization.job, self.jobs.num_jobs)

    @cached_property
    def gpu_kinds(self) -> CodedColumn:
        """The kind of GPU of each use: that of its node, or of its job."""
        told, asked = self.node_states.gpu_kind, self.jobs.gpu_kind
        values = tuple(sorted({"", *told.values, *asked.values}))
        place = {value: at for at, value in enumerate(values)}
        of_told, of_asked = (
            np.array([*(place[value] for value in one.values), place[""]]) for one in (told, asked)
        )
        of_node = np.zeros(self.node_index.num_nodes + 1, dtype=np.int64)
        rows = np.flatnonzero((told.codes >= 0) & (self.node_states.node >= 0))
        of_node[self.node_states.node[rows]] = of_told[told.codes[rows]]
        mine = (
            of_asked[asked.codes[self.utilization.job]]
            if self.jobs.num_jobs
            else self.utilization.job
        )
        node = of_node[self.utilization.node]
        return CodedColumn(np.where(node > 0, node, mine), values)

    @cached_property
    def jobs_by_start(self) -> Ints:
        """Rows of jobs in the order in which they began."""
        return np.argsort(np.nan_to_num(self.jobs.start_s, nan=np.inf), kind="stable")

    @cached_property
    def script_codes(self) -> Ints:
        """What each job is a run of, by user and name; -1 where one of them is not told."""
        return group_codes(self.jobs.user.codes, self.jobs.name.codes)

    @cached_property
    def loaded_uses(self) -> Flags:
        """Uses that worked long enough for their clocks to be judged."""
        enough: Flags = self.sampled_uses & (self.utilization["busy_s"] >= MIN_LOADED_S)
        return enough

    @cached_property
    def node_gpus(self) -> Floats:
        """GPUs of each node; nan where that is not known."""
        return group_max(self.node_states.gpus, self.node_states.node, self.node_index.num_nodes)

    @cached_property
    def node_memory_bytes(self) -> Floats:
        """Host memory of each node."""
        return group_max(
            self.node_states.memory_bytes, self.node_states.node, self.node_index.num_nodes
        )

    @cached_property
    def node_cpus(self) -> Floats:
        """Cores of each node."""
        return group_max(self.node_states.cpus, self.node_states.node, self.node_index.num_nodes)


def build_fleet_data(
    tables: Mapping[str, Any],
    *,
    since_s: float,
    until_s: float,
    samples: Iterable[Any] | None = None,
    nodes: Any | None = None,
) -> FleetData:
    """A fleet from tables of pyarrow, named as in `tables.TABLES`; any of them may be missing.

    `samples`, where given, are parts of that table, raw or rolled up as the store does, each with
    all samples of its GPUs in the time; `nodes` then names every cluster and node in them.
    """
    from meshwright.fleet.tables import TABLE_SCHEMAS

    have = {name: tables.get(name, schema.empty_table()) for name, schema in TABLE_SCHEMAS.items()}
    places = NodeIndex.from_tables(have if nodes is None else {**have, "gpu_samples": nodes})
    jobs = build_job_columns(have["jobs"], places, since_s, until_s)
    standing = _standing(have["nodes"], places, since_s, until_s)
    gpus = group_max(standing.gpus, standing.node, places.num_nodes)
    allocations = build_allocations(
        have["allocations"], jobs, places, gpus, since_s=since_s, until_s=until_s
    )
    known = find_fully_known_nodes(jobs, allocations, places)
    parts = [have["gpu_samples"]] if samples is None else samples
    found = [build_utilization(part, allocations, places, known) for part in parts if part.num_rows]
    uses, stray = join_utilization(found, allocations)
    return FleetData(
        since_s=since_s,
        until_s=until_s,
        node_index=places,
        jobs=jobs,
        allocations=allocations,
        utilization=uses,
        unallocated_use=stray,
        host_usage=build_host_usage(have["node_samples"], allocations, places),
        faults=_faults(have["events"], places, since_s, until_s),
        node_states=standing,
        progress=_progress(have["progress"], jobs, since_s, until_s),
    )


def _standing(table: Any, places: NodeIndex, since_s: float, until_s: float) -> NodeStateColumns:
    since = np.maximum(read_floats(table, "since_s"), since_s)
    until = np.minimum(np.nan_to_num(read_floats(table, "until_s"), nan=until_s), until_s)
    partitions = tuple(tuple(one or ()) for one in table.column("partitions").to_pylist())
    return NodeStateColumns(
        places.codes(table),
        since,
        np.maximum(until, since),
        read_text(table, "state"),
        read_text(table, "reason"),
        read_floats(table, "gpus"),
        read_text(table, "gpu_kind"),
        read_floats(table, "cpus"),
        read_floats(table, "memory"),
        partitions,
    )


def _faults(table: Any, places: NodeIndex, since_s: float, until_s: float) -> FaultColumns:
    import pyarrow.compute as pc

    time = table.column("time_s")
    table = table.filter(pc.and_(pc.greater_equal(time, since_s), pc.less(time, until_s)))
    return FaultColumns(
        places.codes(table),
        np.nan_to_num(read_floats(table, "gpu"), nan=-1).astype(np.int64),
        read_floats(table, "time_s"),
        read_text(table, "kind"),
        np.nan_to_num(read_floats(table, "code"), nan=-1).astype(np.int64),
        np.nan_to_num(read_floats(table, "count"), nan=1.0),
        read_text(table, "text"),
    )


def _progress(table: Any, jobs: JobColumns, since_s: float, until_s: float) -> ProgressColumns:
    start = np.maximum(read_floats(table, "start_s"), since_s)
    end = np.minimum(np.nan_to_num(read_floats(table, "end_s"), nan=until_s), until_s)
    return ProgressColumns(
        jobs.match_rows(table),
        start,
        np.maximum(end, start),
        read_text(table, "phase"),
        read_floats(table, "step"),
    )
