"""Which GPU was whose, and when: as it was recorded, or as whole nodes show it.

Accounting keeps the nodes of a job but not the GPUs. Where nobody recorded them, a job that has all
GPUs of its nodes has each of them; of a part of a node nothing is assumed.
"""

from typing import Any, NamedTuple

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Flags, Floats, Ints, floats
from meshwright.observe.fleet.patterns.jobs import Jobs
from meshwright.observe.fleet.patterns.places import Places

__all__ = ["Held", "Places", "held_by", "known_nodes"]


class Held(NamedTuple):
    """One row for each GPU of each job, clipped to the time looked at."""

    job: Ints
    node: Ints
    gpu: Ints
    start_s: Floats
    end_s: Floats
    share: Floats

    def only(self, which: "Flags | Ints") -> "Held":
        """Some of the rows."""
        return Held(
            self.job[which], self.node[which], self.gpu[which], self.start_s[which],
            self.end_s[which], self.share[which],
        )  # fmt: skip

    @property
    def hours(self) -> Floats:
        """GPU-hours of each."""
        hours: Floats = self.share * (self.end_s - self.start_s) / 3600
        return hours


def held_by(
    table: Any, jobs: Jobs, places: Places, node_gpus: Floats, *, since_s: float, until_s: float
) -> Held:
    """What the table says; for jobs that it does not name, what their nodes show."""
    job = jobs.rows_of(table)
    start = np.maximum(floats(table, "start_s"), since_s)
    end = np.nan_to_num(floats(table, "end_s"), nan=until_s)
    # A job that is over holds nothing, whatever a record that was never closed says.
    end = np.minimum(end, np.where(job >= 0, jobs.end_s[job], until_s) if jobs.number else until_s)
    recorded = Held(
        job,
        places.codes(table),
        np.nan_to_num(floats(table, "gpu"), nan=-1).astype(np.int64),
        start,
        np.fmin(end, until_s),
        np.nan_to_num(floats(table, "share"), nan=1.0),
    )
    kept = (recorded.job >= 0) & (recorded.end_s > recorded.start_s) & (recorded.gpu >= 0)
    recorded = recorded.only(kept)
    assumed = _whole_nodes(jobs, recorded.job, node_gpus, since_s, until_s)
    return Held(*(np.concatenate(both) for both in zip(recorded, assumed, strict=True)))


def _whole_nodes(
    jobs: Jobs, recorded: Ints, node_gpus: Floats, since_s: float, until_s: float
) -> Held:
    size = np.where(jobs.on_node >= 0, node_gpus[jobs.on_node], np.nan) if node_gpus.size else (
        np.full(jobs.on_node.size, np.nan)
    )  # fmt: skip
    total = np.bincount(jobs.on_job, size, minlength=jobs.number)
    wanted = (jobs.gpus > 0) & (jobs.gpus == total) & ~np.isnan(jobs.start_s)
    wanted[recorded] = False
    rows = wanted[jobs.on_job]
    count = size[rows].astype(np.int64)
    job = np.repeat(jobs.on_job[rows], count)
    node = np.repeat(jobs.on_node[rows], count)
    first = np.repeat(np.cumsum(count) - count, count)
    start = np.maximum(jobs.start_s[job], since_s)
    end = np.minimum(jobs.end_s[job], until_s)
    held = Held(job, node, np.arange(job.size) - first, start, end, np.ones(job.size))
    return held.only(end > start)


def known_nodes(jobs: Jobs, held: Held, places: Places) -> Flags:
    """Nodes of which it is known, for every job on them, which GPUs it had."""
    known = np.ones(places.number, dtype=np.bool_)
    told = np.zeros(jobs.number, dtype=np.bool_)
    told[held.job] = True
    doubtful = (jobs.gpus > 0) & ~np.isnan(jobs.start_s) & ~told
    rows = doubtful[jobs.on_job] & (jobs.on_node >= 0)
    known[jobs.on_node[rows]] = False
    # Jobs whose nodes are not told could be anywhere.
    placed = np.bincount(jobs.on_job, minlength=jobs.number) > 0
    if (doubtful & ~placed).any() or not held.job.size:
        known[:] = False
    return known
