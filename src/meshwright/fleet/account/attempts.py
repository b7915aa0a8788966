"""Attempts of jobs as columns of whole numbers, what contradicts itself set right or aside.

An attempt ends where the next one of the same job begins. One that runs holds its GPUs until a
later look at its cluster does not show it. One that has ended nobody knows when holds nothing, and
is counted.
"""

import re
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.account.ticks import UNKNOWN_TIME, Floats, Ints, to_gpu_parts, to_ticks
from meshwright.fleet.columns import CodedColumn, combine_codes, encode_text, to_floats
from meshwright.fleet.tables import UNKNOWN_WAIT

LOST_STATES: Final = (
    "failed", "out_of_memory", "node_fail", "timeout", "preempted", "requeued",
)  # fmt: skip
"""Ends after which work counts as lost unless a checkpoint kept it. `cancelled` is none of them:
somebody chose it."""

WAIT_UNEXPLAINED, WAIT_FOR_LIMIT, WAIT_NOT_ELIGIBLE, WAIT_UNKNOWN = range(4)
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


class JobAttempts(NamedTuple):
    """All attempts, in the order of their job and number."""

    start_ms: Ints
    """When it began to hold GPUs; NEVER where it did not, or nobody knows for how long."""
    end_ms: Ints
    pending_start_ms: Ints
    """Since when it wanted to run; NEVER where nobody tells."""
    pending_end_ms: Ints
    """Until when it did."""
    gpu_parts: Ints
    """Of GPUs."""
    num_nodes: Ints
    """0 where it is not told."""
    wait_reason: Ints
    """One of FREE, LIMITED, NOT_ASKING, NOT_TOLD."""
    gpu_util: Floats
    """By accounting; NaN where it does not keep it."""
    attempt: Ints
    job_key: Ints
    """The same for attempts of one job."""
    cluster: CodedColumn
    job: CodedColumn
    scheduler_id: CodedColumn
    """The scheduler's own, which telemetry may tell instead of `job`."""
    state: CodedColumn
    user: CodedColumn
    team: CodedColumn
    partition: CodedColumn
    workload: CodedColumn
    gpu_kind: CodedColumn
    nodes: pa.Array
    """Lists of names."""
    data_warnings: dict[str, int]
    """What was set right or aside, and how often."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.start_ms)


def read_attempts(jobs: pa.Table, until: int) -> JobAttempts:
    """Read the jobs as they are known at the end of a window."""
    oddities: dict[str, int] = {}
    jobs = _one_each(jobs, oddities)
    cluster, job, state = (
        encode_text(jobs["cluster"]),
        encode_text(jobs["job"]),
        encode_text(jobs["state"]),
    )
    key = combine_codes(job.codes, cluster.codes, len(cluster.values))
    seen = _stands_until(to_ticks(jobs["seen_s"]), cluster, until)
    start, end = _held(jobs, state, key, seen, oddities)
    waits, waited = _waits(jobs, state, key, end, seen)
    count = to_floats(jobs["num_nodes"])
    reason = encode_text(jobs["reason"])
    kinds = np.array([_reason(text) for text in reason.values] + [WAIT_UNEXPLAINED], np.int64)[
        reason.codes
    ]
    waits = np.where(kinds == WAIT_UNKNOWN, UNKNOWN_TIME, waits)
    waited = np.where(kinds == WAIT_UNKNOWN, UNKNOWN_TIME, waited)
    return JobAttempts(
        start, end, waits, waited,
        to_gpu_parts(to_floats(jobs["gpus"])),
        np.where(np.isfinite(count) & (count > 0), count, 0).astype(np.int64),
        kinds,
        to_floats(jobs["gpu_util"]),
        jobs["attempt"].fill_null(0).to_numpy().astype(np.int64),
        key, cluster, job, encode_text(jobs["scheduler_id"]), state,
        encode_text(jobs["user"]), encode_text(jobs["team"]), encode_text(jobs["partition"]),
        encode_text(jobs["workload"]),
        encode_text(jobs["gpu_kind"]), _whole(jobs["nodes"]), oddities,
    )  # fmt: skip


def _stands_until(seen: Ints, cluster: CodedColumn, until: int) -> Ints:
    """Until when what had not ended when it was seen is taken to go on.

    What was seen when the cluster was last looked at, or within an hour before, goes on for a day
    at most; what later looks did not show had ended by then.
    """
    latest = np.full(len(cluster.values) + 1, UNKNOWN_TIME)
    np.maximum.at(latest, cluster.codes, seen)
    fresh = seen >= latest[cluster.codes] - _LOOK_MS
    lasts = np.where(fresh, seen + 24 * _LOOK_MS, seen)
    return np.where(seen == UNKNOWN_TIME, until, np.minimum(lasts, until))


def _one_each(jobs: pa.Table, oddities: dict[str, int]) -> pa.Table:
    """Order by job and attempt; of rows with the same key the one seen last holds."""
    cluster, job = encode_text(jobs["cluster"]), encode_text(jobs["job"])
    key = combine_codes(job.codes, cluster.codes, len(cluster.values))
    attempt = jobs["attempt"].fill_null(0).to_numpy().astype(np.int64)
    seen = to_ticks(jobs["seen_s"])
    order = np.lexsort((seen, attempt, key))
    last = np.ones(len(order), np.bool_)
    last[:-1] = (np.diff(key[order]) != 0) | (np.diff(attempt[order]) != 0)
    if not last.all():
        oddities["rows of an attempt that a later row replaces"] = int((~last).sum())
    if last.all() and (np.diff(order) == 1).all():
        return jobs
    return jobs.take(order[last])


def _held(
    jobs: pa.Table, state: CodedColumn, key: Ints, seen: Ints, oddities: dict[str, int]
) -> tuple[Ints, Ints]:
    """Return from when to when attempts held what they asked for."""
    start, end = to_ticks(jobs["start_s"]), to_ticks(jobs["end_s"])
    runs = _is(state, "running") & (end == UNKNOWN_TIME)
    end = np.where(runs, np.maximum(seen, start), end)
    backwards = (start != UNKNOWN_TIME) & (end != UNKNOWN_TIME) & (end < start)
    endless = (start != UNKNOWN_TIME) & (end == UNKNOWN_TIME)
    for what, where in (
        ("attempts that end before they start, left out", backwards),
        ("attempts that ended nobody knows when, left out", endless),
    ):
        if where.any():
            oddities[what] = int(where.sum())
    held = (start != UNKNOWN_TIME) & ~backwards & ~endless
    start, end = np.where(held, start, UNKNOWN_TIME), np.where(held, end, UNKNOWN_TIME)
    cut = _next_starts(start, key)
    late = (cut != UNKNOWN_TIME) & held & (cut < end) & (cut >= start)
    if late.any():
        oddities["attempts cut where the next of the same job begins"] = int(late.sum())
    return start, np.where(late, cut, end)


def _next_starts(start: Ints, key: Ints) -> Ints:
    """When the next attempt of the same job begins; NEVER where there is none."""
    following = np.full(len(start), UNKNOWN_TIME)
    following[:-1] = np.where(key[1:] == key[:-1], start[1:], UNKNOWN_TIME)
    return following


def _waits(
    jobs: pa.Table, state: CodedColumn, key: Ints, end: Ints, seen: Ints
) -> tuple[Ints, Ints]:
    """Return from when to when attempts wanted to run and did not."""
    eligible, submit = to_ticks(jobs["eligible_s"]), to_ticks(jobs["submit_s"])
    waits = np.where(eligible != UNKNOWN_TIME, eligible, submit)
    previous = np.full(len(end), UNKNOWN_TIME)
    previous[1:] = np.where(key[1:] == key[:-1], end[:-1], UNKNOWN_TIME)
    waits = np.where(waits == UNKNOWN_TIME, UNKNOWN_TIME, np.maximum(waits, previous))
    told_start, told_end = to_ticks(jobs["start_s"]), to_ticks(jobs["end_s"])
    waited = np.where(told_start != UNKNOWN_TIME, told_start, told_end)
    waited = np.where(_is(state, "pending") & (waited == UNKNOWN_TIME), seen, waited)
    asks = (waits != UNKNOWN_TIME) & (waited != UNKNOWN_TIME) & (waited >= waits)
    return np.where(asks, waits, UNKNOWN_TIME), np.where(asks, waited, UNKNOWN_TIME)


def _is(column: CodedColumn, *values: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = np.array([value in values for value in column.values] + [False], np.bool_)
    return found[column.codes]


def match_states(found: JobAttempts, *states: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell which attempts stand in one of the states."""
    return _is(found.state, *states)


def _reason(text: str) -> int:
    if text == UNKNOWN_WAIT:
        return WAIT_UNKNOWN
    if _LATER.search(text):
        return WAIT_NOT_ELIGIBLE
    return WAIT_FOR_LIMIT if _LIMIT.search(text) and not _NO_LIMIT.match(text) else WAIT_UNEXPLAINED


def _whole(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
