"""Everything one reading of a Slurm cluster came to, put together into rows of the tables.

Accounting, controller and prologs each tell a part of the same jobs: what accounting has not heard
of yet the controller knows, what the controller forgets accounting keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.fleet.sources.slurm import control, nodes, objects
from meshwright.observe.fleet.sources.slurm.holding import Hold, held_rows, spread
from meshwright.observe.fleet.sources.slurm.hostlist import names_of
from meshwright.observe.fleet.sources.slurm.jobs import jobs_of
from meshwright.observe.fleet.sources.slurm.records import records_from
from meshwright.observe.fleet.sources.slurm.states import job_state
from meshwright.observe.fleet.sources.source import Asked, Batch

BATCH_ROWS: Final = 200_000


@dataclass
class Reading:
    """What was read so far."""

    zone: str = "UTC"
    renames: Mapping[str, str] = field(default_factory=dict)
    given: str = ""
    """What the user calls the cluster, whatever it calls itself."""
    cluster: str = ""
    """Name of those that do not tell theirs."""
    counts_gpus: bool | None = None
    accounted: list[pa.Table] = field(default_factory=list)
    controlled: list[pa.Table] = field(default_factory=list)
    snapshot: list[nodes.Node] = field(default_factory=list)
    events: list[nodes.Node] = field(default_factory=list)
    running: list[Hold] = field(default_factory=list)
    """GPUs that jobs hold now, as the controller tells."""
    logged: list[Hold] = field(default_factory=list)
    """GPUs that jobs held, as prologs tell; of those `job` is the scheduler's number."""
    notes: list[str] = field(default_factory=list)

    def take_json(self, document: Mapping[str, Any]) -> float | None:
        """Take a document of any of Slurm's commands or of slurmrestd; return when it was told."""
        self.cluster = self.cluster or objects.cluster_of(document)
        jobs = objects.listed(document, "jobs")
        if jobs and objects.is_accounting(jobs[0]):
            self.accounted.append(records_from(objects.accounted(jobs)))
        elif jobs:
            self.controlled.append(records_from(objects.controlled(jobs)))
            self.running += [hold for job in jobs for hold in self._held_by(job)]
        self.snapshot += nodes.from_objects(objects.listed(document, "nodes"), "")
        self.snapshot += nodes.from_sinfo(objects.listed(document, "sinfo"), "")
        return objects.told_at(document)

    def take_blocks(self, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Take what `scontrol show job` or `show node` printed."""
        self.snapshot += nodes.from_blocks(blocks, "", self.zone)
        jobs = [block for block in blocks if "JobId" in block]
        if not jobs:
            return
        table = control.job_records(jobs, self.zone)
        self.controlled.append(table)
        starts, restarts = table["start_s"].to_pylist(), table["restarts"].to_pylist()
        for job, start, attempt in zip(jobs, starts, restarts, strict=True):
            if job_state(job.get("JobState", "")) != "running":
                continue
            name = control.job_name(job)
            for where, gres in job.get("gres", ()):
                self.running += [
                    Hold("", name, int(attempt or 0), node, gpus, start, None)
                    for node, gpus in spread(where, gres)
                ]

    def told_s(self) -> float | None:
        """Return the moment at which jobs had run for as long as is told; None: nobody says.

        A copy of a file is younger than what it says, and a job that ran then may not run now.
        """
        moments = []
        for table in (*self.accounted, *self.controlled):
            runs = pc.fill_null(pc.match_substring_regex(table["state"], "^RUNNING"), False)
            here = table.filter(runs)
            moments.append(pc.max(pc.add(here["start_s"], here["elapsed_s"])).as_py())
        return max((moment for moment in moments if moment is not None), default=None)

    def rows(self, seen_s: float) -> dict[str, pa.Table]:
        """Return the rows of the tables of jobs, of held GPUs and of nodes."""
        name = self.cluster or self._told_cluster() or self.given or "slurm"
        # The richest list of fields comes last, where it counts among equals.
        accounted = sorted(self.accounted, key=_told_columns)
        records = [*sorted(self.controlled, key=_told_columns), *accounted]
        tables: dict[str, pa.Table] = {}
        if records:
            jobs = jobs_of(pa.concat_tables(records), seen_s, name, self.renames, self.counts_gpus)
            tables["jobs"] = jobs.rows
            self.notes += jobs.notes
        holds = [*self._logged(tables.get("jobs"), name)] if self.logged else self.running
        if holds:
            named = [hold._replace(cluster=hold.cluster or name) for hold in holds]
            unique = {
                (hold.cluster, hold.job, hold.attempt, hold.node, hold.start_s): hold
                for hold in named
            }
            tables["held"] = held_rows([*unique.values()], seen_s, self.renames)
        found = [node._replace(cluster=node.cluster or name) for node in self.snapshot]
        events = [node._replace(cluster=node.cluster or name) for node in self.events]
        if found or events:
            latest: dict[tuple[str, str], nodes.Node] = {}
            for node in found:
                before = latest.get((node.cluster, node.node), node)
                told = {name: value for name, value in node._asdict().items() if value is not None}
                latest[node.cluster, node.node] = before._replace(**told)
            stretched = nodes.stretches(latest.values(), events, seen_s)
            tables["nodes"] = nodes.node_rows(stretched, seen_s, self.renames)
        return self._called(tables) if self.given else tables

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
                pa.array([self.given] * table.num_rows, pa.string()),
            )
            for name, table in tables.items()
        }

    def _held_by(self, job: Mapping[str, Any]) -> Iterator[Hold]:
        if job_state(objects.words(job.get("job_state"))) != "running":
            return
        (record,) = objects.controlled([job])
        where = names_of(record["nodelist"])
        for node, gres in zip(where, objects.entries(job, "gres_detail"), strict=False):
            for name, gpus in spread(node, str(gres)):
                yield Hold(
                    record["cluster"] or "", record["id"], int(record["restarts"] or 0), name, gpus,
                    record["start_s"], None,
                )  # fmt: skip

    def _told_cluster(self) -> str:
        """Return the one name that records tell, where they tell one."""
        told = {
            name
            for table in (*self.accounted, *self.controlled)
            for name in pc.unique(table["cluster"]).to_pylist()
            if name
        }
        return told.pop() if len(told) == 1 else ""

    def _logged(self, jobs: pa.Table | None, cluster: str) -> Iterator[Hold]:
        """Give logged holds under the names of their jobs, as far as those are known."""
        names: dict[tuple[str, str], str] = {}
        if jobs is not None:
            columns = (jobs[name].to_pylist() for name in ("cluster", "number", "job"))
            names = {(where, number): job for where, number, job in zip(*columns, strict=True)}
        for hold in self.logged:
            where = hold.cluster or cluster
            yield hold._replace(cluster=where, job=names.get((where, hold.job), hold.job))


def batches(
    tables: Mapping[str, pa.Table], asked: Asked, cursor: str, notes: Sequence[str]
) -> Iterator[Batch]:
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
        yield Batch(name, table, cursor if last else None, told if not place else ())
    if not pieces:
        yield Batch(
            "jobs", tables["jobs"].slice(0, 0) if "jobs" in tables else _no_jobs(), cursor, told
        )


def read_json(text: bytes) -> Mapping[str, Any] | None:
    """Parse a document; None where it is no object."""
    document = msgspec.json.decode(text)
    return document if isinstance(document, dict) else None


def _no_jobs() -> pa.Table:
    from meshwright.observe.fleet.tables import JOBS

    return JOBS.empty_table()


def _within(name: str, table: pa.Table, asked: Asked) -> pa.Table:
    """Keep rows of which some part lies in what is asked for."""
    first = {"jobs": "submit_s", "held": "start_s", "nodes": "since_s"}[name]
    last = {"jobs": "end_s", "held": "end_s", "nodes": "until_s"}[name]
    keep = None
    if asked.since_s is not None:
        keep = pc.fill_null(pc.greater_equal(table[last], asked.since_s), True)
    if asked.until_s is not None:
        early = pc.fill_null(pc.less(table[first], asked.until_s), True)
        keep = early if keep is None else pc.and_(keep, early)
    return table if keep is None else table.filter(keep)


def _told_columns(table: pa.Table) -> int:
    return sum(column.null_count < len(column) for column in table.columns)
