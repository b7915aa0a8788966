"""Attempts of jobs as columns of whole numbers, what contradicts itself set right or aside.

An attempt ends where the next one of the same job begins. One that runs holds its GPUs until a
later look at its cluster does not show it. One that has ended nobody knows when holds nothing, and
is counted.
"""

import re
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.account.ticks import (
    NEVER,
    Floats,
    Longs,
    Names,
    gpu_parts,
    joined,
    moments,
    names,
    numbers,
)
from meshwright.observe.fleet.tables import WAIT_NOT_TOLD

LOST_STATES: Final = (
    "failed", "out_of_memory", "node_fail", "timeout", "preempted", "requeued",
)  # fmt: skip
"""Ends after which work counts as lost unless a checkpoint kept it. `cancelled` is none of them:
somebody chose it."""

FREE, LIMITED, NOT_ASKING, NOT_TOLD = range(4)
"""Why a job waits: nobody says, a limit or quota, it does not want to run yet; or its wait is not
known at all, as of traces that tell only how long jobs ran."""
_LOOK_MS = 3_600_000
_LIMIT = re.compile(
    r"qos|assoc|quota|limit|max\w*per|licen[cs]e|exceeded|suspended|inactive", re.IGNORECASE
)
_NO_LIMIT = re.compile(r"^(timelimit|.*exit.*)$", re.IGNORECASE)
_LATER = re.compile(
    r"depend|begintime|held|hold|prolog|cleaning|reservationdeleted|schedulinggated", re.IGNORECASE
)


class Attempts(NamedTuple):
    """All attempts, in the order of their job and number."""

    start: Longs
    """When it began to hold GPUs; NEVER where it did not, or nobody knows for how long."""
    end: Longs
    waits: Longs
    """Since when it wanted to run; NEVER where nobody tells."""
    waited: Longs
    """Until when it did."""
    parts: Longs
    """Of GPUs."""
    num_nodes: Longs
    """0 where it is not told."""
    reason: Longs
    """One of FREE, LIMITED, NOT_ASKING, NOT_TOLD."""
    gpu_util: Floats
    """By accounting; NaN where it does not keep it."""
    attempt: Longs
    key: Longs
    """The same for attempts of one job."""
    cluster: Names
    job: Names
    number: Names
    """The scheduler's own, which telemetry may tell instead of `job`."""
    state: Names
    user: Names
    team: Names
    partition: Names
    work: Names
    gpu_kind: Names
    nodes: pa.Array
    """Lists of names."""
    oddities: dict[str, int]
    """What was set right or aside, and how often."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.start)


def attempts(jobs: pa.Table, until: int) -> Attempts:
    """Read the jobs as they are known at the end of a window."""
    oddities: dict[str, int] = {}
    jobs = _one_each(jobs, oddities)
    cluster, job, state = names(jobs["cluster"]), names(jobs["job"]), names(jobs["state"])
    key = joined(job.codes, cluster.codes, len(cluster.values))
    seen = _stands_until(moments(jobs["seen_s"]), cluster, until)
    start, end = _held(jobs, state, key, seen, oddities)
    waits, waited = _waits(jobs, state, key, end, seen)
    count = numbers(jobs["num_nodes"])
    reason = names(jobs["reason"])
    kinds = np.array([_reason(text) for text in reason.values] + [FREE], np.int64)[reason.codes]
    waits = np.where(kinds == NOT_TOLD, NEVER, waits)
    waited = np.where(kinds == NOT_TOLD, NEVER, waited)
    return Attempts(
        start, end, waits, waited,
        gpu_parts(numbers(jobs["gpus"])),
        np.where(np.isfinite(count) & (count > 0), count, 0).astype(np.int64),
        kinds,
        numbers(jobs["gpu_util"]),
        jobs["attempt"].fill_null(0).to_numpy().astype(np.int64),
        key, cluster, job, names(jobs["number"]), state,
        names(jobs["user"]), names(jobs["team"]), names(jobs["partition"]), names(jobs["work"]),
        names(jobs["gpu_kind"]), _whole(jobs["nodes"]), oddities,
    )  # fmt: skip


def _stands_until(seen: Longs, cluster: Names, until: int) -> Longs:
    """Until when what had not ended when it was seen is taken to go on.

    What was seen when the cluster was last looked at, or within an hour before, goes on for a day
    at most; what later looks did not show had ended by then.
    """
    latest = np.full(len(cluster.values) + 1, NEVER)
    np.maximum.at(latest, cluster.codes, seen)
    fresh = seen >= latest[cluster.codes] - _LOOK_MS
    lasts = np.where(fresh, seen + 24 * _LOOK_MS, seen)
    return np.where(seen == NEVER, until, np.minimum(lasts, until))


def _one_each(jobs: pa.Table, oddities: dict[str, int]) -> pa.Table:
    """Order by job and attempt; of rows with the same key the one seen last holds."""
    cluster, job = names(jobs["cluster"]), names(jobs["job"])
    key = joined(job.codes, cluster.codes, len(cluster.values))
    attempt = jobs["attempt"].fill_null(0).to_numpy().astype(np.int64)
    seen = moments(jobs["seen_s"])
    order = np.lexsort((seen, attempt, key))
    last = np.ones(len(order), np.bool_)
    last[:-1] = (np.diff(key[order]) != 0) | (np.diff(attempt[order]) != 0)
    if not last.all():
        oddities["rows of an attempt that a later row replaces"] = int((~last).sum())
    if last.all() and (np.diff(order) == 1).all():
        return jobs
    return jobs.take(order[last])


def _held(
    jobs: pa.Table, state: Names, key: Longs, seen: Longs, oddities: dict[str, int]
) -> tuple[Longs, Longs]:
    """Return from when to when attempts held what they asked for."""
    start, end = moments(jobs["start_s"]), moments(jobs["end_s"])
    runs = _is(state, "running") & (end == NEVER)
    end = np.where(runs, np.maximum(seen, start), end)
    backwards = (start != NEVER) & (end != NEVER) & (end < start)
    endless = (start != NEVER) & (end == NEVER)
    for what, where in (
        ("attempts that end before they start, left out", backwards),
        ("attempts that ended nobody knows when, left out", endless),
    ):
        if where.any():
            oddities[what] = int(where.sum())
    held = (start != NEVER) & ~backwards & ~endless
    start, end = np.where(held, start, NEVER), np.where(held, end, NEVER)
    cut = _next_starts(start, key)
    late = (cut != NEVER) & held & (cut < end) & (cut >= start)
    if late.any():
        oddities["attempts cut where the next of the same job begins"] = int(late.sum())
    return start, np.where(late, cut, end)


def _next_starts(start: Longs, key: Longs) -> Longs:
    """When the next attempt of the same job begins; NEVER where there is none."""
    following = np.full(len(start), NEVER)
    following[:-1] = np.where(key[1:] == key[:-1], start[1:], NEVER)
    return following


def _waits(
    jobs: pa.Table, state: Names, key: Longs, end: Longs, seen: Longs
) -> tuple[Longs, Longs]:
    """Return from when to when attempts wanted to run and did not."""
    eligible, submit = moments(jobs["eligible_s"]), moments(jobs["submit_s"])
    waits = np.where(eligible != NEVER, eligible, submit)
    previous = np.full(len(end), NEVER)
    previous[1:] = np.where(key[1:] == key[:-1], end[:-1], NEVER)
    waits = np.where(waits == NEVER, NEVER, np.maximum(waits, previous))
    told_start, told_end = moments(jobs["start_s"]), moments(jobs["end_s"])
    waited = np.where(told_start != NEVER, told_start, told_end)
    waited = np.where(_is(state, "pending") & (waited == NEVER), seen, waited)
    asks = (waits != NEVER) & (waited != NEVER) & (waited >= waits)
    return np.where(asks, waits, NEVER), np.where(asks, waited, NEVER)


def _is(column: Names, *values: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = np.array([value in values for value in column.values] + [False], np.bool_)
    return found[column.codes]


def in_states(found: Attempts, *states: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell which attempts stand in one of the states."""
    return _is(found.state, *states)


def _reason(text: str) -> int:
    if text == WAIT_NOT_TOLD:
        return NOT_TOLD
    if _LATER.search(text):
        return NOT_ASKING
    return LIMITED if _LIMIT.search(text) and not _NO_LIMIT.match(text) else FREE


def _whole(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
