"""Everything one reading of a Slurm cluster came to, put together into rows of the tables.

Accounting, controller and prologs each tell a part of the same jobs: what accounting has not heard
of yet the controller knows, what the controller forgets accounting keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.columns import to_floats
from meshwright.fleet.sources.job_checks import find_job_faults
from meshwright.fleet.sources.slurm.formats import json_objects, scontrol
from meshwright.fleet.sources.slurm.formats.hostlist import expand_hostlist
from meshwright.fleet.sources.slurm.formats.states import parse_job_state
from meshwright.fleet.sources.slurm.job_records import make_records_from_rows
from meshwright.fleet.sources.slurm.tables import nodes
from meshwright.fleet.sources.slurm.tables.allocations import (
    SlurmAllocation,
    assign_to_nodes,
    build_allocation_rows,
)
from meshwright.fleet.sources.slurm.tables.jobs import build_job_rows
from meshwright.fleet.sources.source import RowBatch, SourceOptions
from meshwright.spec.units import format_quantity

BATCH_ROWS: Final = 200_000
_CLOCK_CHANGE_S: Final = 3700.0
"""In the hour that clocks repeat, local times without a zone run back."""


@dataclass
class SlurmSnapshot:
    """What was read so far."""

    time_zone: str = "UTC"
    node_renames: Mapping[str, str] = field(default_factory=dict)
    cluster_alias: str = ""
    """What the user calls the cluster, whatever it calls itself."""
    cluster: str = ""
    """Name of those that do not tell theirs."""
    tracks_gpus: bool | None = None
    accounting_jobs: list[pa.Table] = field(default_factory=list)
    controller_jobs: list[pa.Table] = field(default_factory=list)
    node_states: list[nodes.SlurmNode] = field(default_factory=list)
    node_events: list[nodes.SlurmNode] = field(default_factory=list)
    live_allocations: list[SlurmAllocation] = field(default_factory=list)
    """GPUs that jobs hold now, as the controller tells."""
    prolog_allocations: list[SlurmAllocation] = field(default_factory=list)
    """GPUs that jobs held, as prologs tell; of those `job` is the scheduler's number."""
    notes: list[str] = field(default_factory=list)

    def add_json(self, document: Mapping[str, Any]) -> float | None:
        """Take a document of any of Slurm's commands or of slurmrestd; return when it was told."""
        self.cluster = self.cluster or json_objects.find_cluster(document)
        jobs = json_objects.get_objects(document, "jobs")
        if jobs and json_objects.is_accounting(jobs[0]):
            self.accounting_jobs.append(
                make_records_from_rows(json_objects.parse_accounting_jobs(jobs))
            )
        elif jobs:
            self.controller_jobs.append(
                make_records_from_rows(json_objects.parse_controller_jobs(jobs))
            )
            self.live_allocations += [hold for job in jobs for hold in self._held_by(job)]
        self.node_states += nodes.nodes_from_json(json_objects.get_objects(document, "nodes"), "")
        self.node_states += nodes.nodes_from_sinfo_json(
            json_objects.get_objects(document, "sinfo"), ""
        )
        return json_objects.find_update_time(document)

    def add_blocks(self, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Take what `scontrol show job` or `show node` printed."""
        self.node_states += nodes.nodes_from_scontrol(blocks, "", self.time_zone)
        jobs = [block for block in blocks if "JobId" in block]
        if not jobs:
            return
        table = scontrol.parse_job_records(jobs, self.time_zone)
        self.controller_jobs.append(table)
        starts, restarts = table["start_s"].to_pylist(), table["restarts"].to_pylist()
        for job, start, attempt in zip(jobs, starts, restarts, strict=True):
            if parse_job_state(job.get("JobState", "")) != "running":
                continue
            name = scontrol.format_job_id(job)
            for where, gres in job.get("gres", ()):
                self.live_allocations += [
                    SlurmAllocation("", name, int(attempt or 0), node, gpus, start, None)
                    for node, gpus in assign_to_nodes(where, gres)
                ]

    def find_snapshot_time(self) -> float | None:
        """Return the moment at which jobs had run for as long as is told; None: nobody says.

        A copy of a file is younger than what it says, and a job that ran then may not run now.
        """
        moments = []
        for table in (*self.accounting_jobs, *self.controller_jobs):
            runs = pc.fill_null(pc.match_substring_regex(table["state"], "^RUNNING"), False)
            here = table.filter(runs)
            moments.append(pc.max(pc.add(here["start_s"], here["elapsed_s"])).as_py())
        return max((moment for moment in moments if moment is not None), default=None)

    def build_rows(self, seen_s: float) -> dict[str, pa.Table]:
        """Return the rows of the tables of jobs, of held GPUs and of nodes."""
        name = self.cluster or self._told_cluster() or self.cluster_alias or "slurm"
        # The richest list of fields comes last, where it counts among equals.
        accounted = sorted(self.accounting_jobs, key=_told_columns)
        records = [*sorted(self.controller_jobs, key=_told_columns), *accounted]
        tables: dict[str, pa.Table] = {}
        if records:
            jobs = build_job_rows(
                pa.concat_tables(records), seen_s, name, self.node_renames, self.tracks_gpus
            )
            tables["jobs"] = self._drop_impossible(jobs.rows)
            self.notes += jobs.notes
        holds = (
            [*self._logged(tables.get("jobs"), name)]
            if self.prolog_allocations
            else self.live_allocations
        )
        if holds:
            named = [hold._replace(cluster=hold.cluster or name) for hold in holds]
            unique = {
                (hold.cluster, hold.job, hold.attempt, hold.node, hold.start_s): hold
                for hold in named
            }
            tables["allocations"] = build_allocation_rows(
                [*unique.values()], seen_s, self.node_renames
            )
        found = [node._replace(cluster=node.cluster or name) for node in self.node_states]
        events = [node._replace(cluster=node.cluster or name) for node in self.node_events]
        if found or events:
            latest: dict[tuple[str, str], nodes.SlurmNode] = {}
            for node in found:
                before = latest.get((node.cluster, node.node), node)
                told = {name: value for name, value in node._asdict().items() if value is not None}
                latest[node.cluster, node.node] = before._replace(**told)
            stretched = nodes.merge_node_history(latest.values(), events, seen_s)
            tables["nodes"] = nodes.build_node_rows(stretched, seen_s, self.node_renames)
        return self._called(tables) if self.cluster_alias else tables

    def _drop_impossible(self, jobs: pa.Table) -> pa.Table:
        """Leave out jobs that cannot be as they are told, and say so."""
        told = [to_floats(jobs[name]) for name in ("submit_s", "start_s", "end_s", "gpus")]
        faults = find_job_faults(*told, skew_s=_CLOCK_CHANGE_S)
        faulty = np.zeros(jobs.num_rows, dtype=np.bool_)
        for fault in faults:
            first = jobs["job"][int(np.flatnonzero(fault.rows)[0])].as_py()
            count = format_quantity(int(fault.rows.sum()), "job")
            self.notes.append(f"{count} left out: {fault.column} {fault.what} (job {first})")
            faulty |= fault.rows
        return jobs.filter(pa.array(~faulty)) if faulty.any() else jobs

    def _called(self, tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
        """Give the one cluster that was read the name the user has for it."""
        told = {
            name for table in tables.values() for name in pc.unique(table["cluster"]).to_pylist()
        }
        if len(told) > 1:
            self.notes.append(f"several clusters keep their own names: {', '.join(sorted(told))}")
            return tables
        return {
            name: table.set_column(
                0,
                table.schema.field("cluster"),
                pa.array([self.cluster_alias] * table.num_rows, pa.string()),
            )
            for name, table in tables.items()
        }

    def _held_by(self, job: Mapping[str, Any]) -> Iterator[SlurmAllocation]:
        if parse_job_state(json_objects.parse_state_words(job.get("job_state"))) != "running":
            return
        (record,) = json_objects.parse_controller_jobs([job])
        where = expand_hostlist(record["nodelist"])
        for node, gres in zip(where, json_objects.get_list(job, "gres_detail"), strict=False):
            for name, gpus in assign_to_nodes(node, str(gres)):
                yield SlurmAllocation(
                    record["cluster"] or "", record["id"], int(record["restarts"] or 0), name, gpus,
                    record["start_s"], None,
                )  # fmt: skip

    def _told_cluster(self) -> str:
        """Return the one name that records tell, where they tell one."""
        told = {
            name
            for table in (*self.accounting_jobs, *self.controller_jobs)
            for name in pc.unique(table["cluster"]).to_pylist()
            if name
        }
        return told.pop() if len(told) == 1 else ""

    def _logged(self, jobs: pa.Table | None, cluster: str) -> Iterator[SlurmAllocation]:
        """Give logged holds under the names of their jobs, as far as those are known."""
        names: dict[tuple[str, str], str] = {}
        if jobs is not None:
            columns = (jobs[name].to_pylist() for name in ("cluster", "scheduler_id", "job"))
            names = {(where, number): job for where, number, job in zip(*columns, strict=True)}
        for hold in self.prolog_allocations:
            where = hold.cluster or cluster
            yield hold._replace(cluster=where, job=names.get((where, hold.job), hold.job))


def split_batches(
    tables: Mapping[str, pa.Table], asked: SourceOptions, cursor: str, notes: Sequence[str]
) -> Iterator[RowBatch]:
    """Give rows in batches of a size, the last with the cursor."""
    told = tuple(dict.fromkeys(notes))
    pieces = [
        (name, table.slice(start, BATCH_ROWS))
        for name, table in tables.items()
        for kept in [_within(name, table, asked)]
        for table in [kept]
        for start in range(0, table.num_rows, BATCH_ROWS)
    ]
    for place, (name, table) in enumerate(pieces):
        last = place + 1 == len(pieces)
        yield RowBatch(name, table, cursor if last else None, told if not place else ())
    if not pieces:
        yield RowBatch(
            "jobs", tables["jobs"].slice(0, 0) if "jobs" in tables else _no_jobs(), cursor, told
        )


def parse_json(text: bytes) -> Mapping[str, Any] | None:
    """Parse a document; None where it is no object."""
    document = msgspec.json.decode(text)
    return document if isinstance(document, dict) else None


def _no_jobs() -> pa.Table:
    from meshwright.fleet.tables import JOBS

    return JOBS.empty_table()


def _within(name: str, table: pa.Table, asked: SourceOptions) -> pa.Table:
    """Keep rows of which some part lies in what is asked for."""
    first = {"jobs": "submit_s", "allocations": "start_s", "nodes": "since_s"}[name]
    last = {"jobs": "end_s", "allocations": "end_s", "nodes": "until_s"}[name]
    keep = None
    if asked.since_s is not None:
        keep = pc.fill_null(pc.greater_equal(table[last], asked.since_s), True)
    if asked.until_s is not None:
        early = pc.fill_null(pc.less(table[first], asked.until_s), True)
        keep = early if keep is None else pc.and_(keep, early)
    return table if keep is None else table.filter(keep)


def _told_columns(table: pa.Table) -> int:
    return sum(column.null_count < len(column) for column in table.columns)
