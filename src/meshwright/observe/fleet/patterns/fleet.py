"""`Fleet`: what detectors ask, as columns: jobs, what each of their GPUs and nodes did, and faults.

Samples are read once, in parts, and only what they say of each GPU of each job is kept (`uses`), so
that a week of a large fleet needs no more memory than its jobs do.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.fleet.patterns.arrays import (
    Flags,
    Floats,
    Ints,
    Words,
    by_group,
    floats,
    most_of,
    sums_of,
    together,
    words,
)
from meshwright.observe.fleet.patterns.held import Held, Places, held_by, known_nodes
from meshwright.observe.fleet.patterns.hosts import Hosts, hosts_of
from meshwright.observe.fleet.patterns.jobs import Jobs, jobs_of
from meshwright.observe.fleet.patterns.uses import Stray, Uses, join_uses, uses_of

BUSY_S = 1800.0
"""From so long under load on, clocks and the like of a GPU are judged."""


class Faults(msgspec.Struct, frozen=True, eq=False):
    """Events, as columns."""

    node: Ints
    gpu: Ints
    """-1: of the node."""
    time_s: Floats
    kind: Words
    code: Ints
    count: Floats
    text: Words


class Standing(NamedTuple):
    """How nodes stood, one row for each stretch of time."""

    node: Ints
    since_s: Floats
    until_s: Floats
    state: Words
    reason: Words
    gpus: Floats
    kind: Words
    cpus: Floats
    memory: Floats
    partitions: tuple[tuple[str, ...], ...]


class Progress(NamedTuple):
    """What jobs tell of themselves."""

    job: Ints
    start_s: Floats
    end_s: Floats
    phase: Words
    step: Floats

    def seconds(self, phase: str, jobs: int) -> Floats:
        """The time each job spent in a phase."""
        own = self.phase.equals(phase) & (self.job >= 0)
        spent = (self.end_s - self.start_s)[own]
        return np.bincount(self.job[own], spent, minlength=jobs).astype(np.float64)


class Fleet(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A fleet over some time."""

    since_s: float
    until_s: float
    places: Places
    """The names of nodes."""
    jobs: Jobs
    held: Held
    uses: Uses
    stray: Stray
    hosts: Hosts
    faults: Faults
    standing: Standing
    progress: Progress

    @cached_property
    def seen(self) -> Flags:
        """Uses of which at least half of the time is sampled."""
        wanted = (self.uses.end_s - self.uses.start_s) / 2
        enough: Flags = (self.uses["seen_s"] >= wanted) & (self.uses["seen_s"] > 0)
        return enough

    @cached_property
    def num_seen(self) -> Floats:
        """How many GPUs of each job are sampled."""
        return np.bincount(self.uses.job[self.seen], minlength=self.jobs.number).astype(float)

    @cached_property
    def whole(self) -> Flags:
        """Jobs all of whose GPUs are sampled, so that "none of them" can be said."""
        enough: Flags = (self.num_seen > 0) & (self.num_seen >= np.floor(self.jobs.gpus - 1e-6))
        return enough

    def of_jobs(self, name: str) -> Floats:
        """A figure of the uses as the mean of each job, weighted by time."""
        weight = np.where(self.seen, self.uses.hours, 0.0)
        return by_group(self.uses[name], self.uses.job, self.jobs.number, weight)

    def total(self, name: str) -> Floats:
        """A figure of the uses added up for each job."""
        value = np.where(self.seen, self.uses[name], np.nan)
        return sums_of(value, self.uses.job, self.jobs.number)

    def most(self, name: str) -> Floats:
        """The largest figure of a job's uses."""
        value = np.where(self.seen, self.uses[name], np.nan)
        return most_of(value, self.uses.job, self.jobs.number)

    def least(self, name: str) -> Floats:
        """The smallest figure of a job's uses."""
        value = np.where(self.seen, self.uses[name], np.nan)
        return -most_of(-value, self.uses.job, self.jobs.number)

    @cached_property
    def kinds(self) -> Words:
        """The kind of GPU of each use: that of its node, or of its job."""
        told, asked = self.standing.kind, self.jobs.gpu_kind
        values = tuple(sorted({"", *told.values, *asked.values}))
        place = {value: at for at, value in enumerate(values)}
        of_told, of_asked = (
            np.array([*(place[value] for value in one.values), place[""]]) for one in (told, asked)
        )
        of_node = np.zeros(self.places.number + 1, dtype=np.int64)
        rows = np.flatnonzero((told.codes >= 0) & (self.standing.node >= 0))
        of_node[self.standing.node[rows]] = of_told[told.codes[rows]]
        mine = of_asked[asked.codes[self.uses.job]] if self.jobs.number else self.uses.job
        node = of_node[self.uses.node]
        return Words(np.where(node > 0, node, mine), values)

    @cached_property
    def by_start(self) -> Ints:
        """Rows of jobs in the order in which they began."""
        return np.argsort(np.nan_to_num(self.jobs.start_s, nan=np.inf), kind="stable")

    @cached_property
    def scripts(self) -> Ints:
        """What each job is a run of, by user and name; -1 where one of them is not told."""
        return together(self.jobs.user.codes, self.jobs.name.codes)

    @cached_property
    def loaded(self) -> Flags:
        """Uses that worked long enough for their clocks to be judged."""
        enough: Flags = self.seen & (self.uses["busy_s"] >= BUSY_S)
        return enough

    @cached_property
    def node_gpus(self) -> Floats:
        """GPUs of each node; nan where that is not known."""
        return most_of(self.standing.gpus, self.standing.node, self.places.number)

    @cached_property
    def node_memory(self) -> Floats:
        """Host memory of each node."""
        return most_of(self.standing.memory, self.standing.node, self.places.number)

    @cached_property
    def node_cpus(self) -> Floats:
        """Cores of each node."""
        return most_of(self.standing.cpus, self.standing.node, self.places.number)


def fleet_of(
    tables: Mapping[str, Any],
    *,
    since_s: float,
    until_s: float,
    samples: Iterable[Any] | None = None,
    nodes: Any | None = None,
) -> Fleet:
    """A fleet from tables of pyarrow, named as in `tables.TABLES`; any of them may be missing.

    `samples`, where given, are parts of that table, raw or rolled up as the store does, each with
    all samples of its GPUs in the time; `nodes` then names every cluster and node in them.
    """
    from meshwright.observe.fleet.tables import TABLES

    have = {name: tables.get(name, schema.empty_table()) for name, schema in TABLES.items()}
    places = Places.of(have if nodes is None else {**have, "samples": nodes})
    jobs = jobs_of(have["jobs"], places, since_s, until_s)
    standing = _standing(have["nodes"], places, since_s, until_s)
    gpus = most_of(standing.gpus, standing.node, places.number)
    held = held_by(have["held"], jobs, places, gpus, since_s=since_s, until_s=until_s)
    known = known_nodes(jobs, held, places)
    parts = [have["samples"]] if samples is None else samples
    found = [uses_of(part, held, places, known) for part in parts if part.num_rows]
    uses, stray = join_uses(found, held)
    return Fleet(
        since_s=since_s,
        until_s=until_s,
        places=places,
        jobs=jobs,
        held=held,
        uses=uses,
        stray=stray,
        hosts=hosts_of(have["node_samples"], held, places),
        faults=_faults(have["events"], places, since_s, until_s),
        standing=standing,
        progress=_progress(have["progress"], jobs, since_s, until_s),
    )


def _standing(table: Any, places: Places, since_s: float, until_s: float) -> Standing:
    since = np.maximum(floats(table, "since_s"), since_s)
    until = np.minimum(np.nan_to_num(floats(table, "until_s"), nan=until_s), until_s)
    partitions = tuple(tuple(one or ()) for one in table.column("partitions").to_pylist())
    return Standing(
        places.codes(table),
        since,
        np.maximum(until, since),
        words(table, "state"),
        words(table, "reason"),
        floats(table, "gpus"),
        words(table, "gpu_kind"),
        floats(table, "cpus"),
        floats(table, "memory"),
        partitions,
    )


def _faults(table: Any, places: Places, since_s: float, until_s: float) -> Faults:
    import pyarrow.compute as pc

    time = table.column("time_s")
    table = table.filter(pc.and_(pc.greater_equal(time, since_s), pc.less(time, until_s)))
    return Faults(
        places.codes(table),
        np.nan_to_num(floats(table, "gpu"), nan=-1).astype(np.int64),
        floats(table, "time_s"),
        words(table, "kind"),
        np.nan_to_num(floats(table, "code"), nan=-1).astype(np.int64),
        np.nan_to_num(floats(table, "count"), nan=1.0),
        words(table, "text"),
    )


def _progress(table: Any, jobs: Jobs, since_s: float, until_s: float) -> Progress:
    start = np.maximum(floats(table, "start_s"), since_s)
    end = np.minimum(np.nan_to_num(floats(table, "end_s"), nan=until_s), until_s)
    return Progress(
        jobs.rows_of(table),
        start,
        np.maximum(end, start),
        words(table, "phase"),
        floats(table, "step"),
    )
