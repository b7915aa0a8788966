"""What attempts were busy with, moment by moment, from what they told of themselves."""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.account.allocations import match_attempts
from meshwright.fleet.account.attempts import LOST_STATES, JobAttempts, match_states
from meshwright.fleet.account.ticks import UNKNOWN_TIME, Flags, Floats, Ints, to_ticks
from meshwright.fleet.columns import to_floats

PHASE_PRIORITY: Final = (
    "lost_work",
    "checkpoint",
    "data_wait",
    "communication",
    "startup",
    "productive",
)
"""Where rows overlap, the first of these holds: interruptions stand inside what they interrupt."""
UNKNOWN_PHASE: Final = len(PHASE_PRIORITY)
LOST, CHECKPOINT, STARTUP, PRODUCTIVE = 0, 1, 4, 5


class AttemptPhases(NamedTuple):
    """Every attempt that held GPUs, cut where what it did changes; in the order of attempts."""

    attempt: Ints
    start_ms: Ints
    end_ms: Ints
    phase: Ints
    """A place in ORDER, or UNTOLD."""
    is_lost: Flags
    """Whether a failure after it took away what was done."""
    mfu: Floats
    """For each attempt, the mean of its productive time; NaN where it is not told."""
    is_checkpoint_known: Flags
    """For each attempt, whether it is known up to when its work was saved."""
    data_warnings: dict[str, int]


def split_phases(found: JobAttempts, progress: pa.Table | None) -> AttemptPhases:
    """Cut attempts into phases."""
    ran = np.flatnonzero(
        (found.start_ms != UNKNOWN_TIME) & (found.end_ms > found.start_ms) & (found.gpu_parts > 0)
    )
    failed = match_states(found, *LOST_STATES)
    mfu, saved = np.full(found.size, np.nan), np.zeros(found.size, np.bool_)
    if progress is None or progress.num_rows == 0:
        untold = np.full(len(ran), UNKNOWN_PHASE)
        return AttemptPhases(
            ran, found.start_ms[ran], found.end_ms[ran], untold, failed[ran], mfu, saved, {}
        )
    rows, oddities = _rows(found, progress)
    mfu = _mfu(rows, found.size)
    attempt, start, end, phase = _cut(found, ran, rows)
    kept_until = _last_checkpoints(found, rows)
    own_word = np.zeros(found.size, np.bool_)
    own_word[rows.attempt[rows.phase == LOST]] = True
    # Those who tell what they lost are believed; of others the rule speaks.
    lost = failed[attempt] & ~own_word[attempt] & (start >= kept_until[attempt])
    saved = own_word | (kept_until != UNKNOWN_TIME)
    return AttemptPhases(attempt, start, end, phase, lost, mfu, saved, oddities)


class _Rows(NamedTuple):
    attempt: Ints
    start: Ints
    end: Ints
    phase: Ints
    mfu: Floats


def _rows(found: JobAttempts, progress: pa.Table) -> tuple[_Rows, dict[str, int]]:
    """Read what was told, within the attempts it is of."""
    attempt = match_attempts(found, progress)
    start, end = to_ticks(progress["start_s"]), to_ticks(progress["end_s"])
    phase = pc.index_in(progress["phase"], value_set=pa.array(PHASE_PRIORITY))
    phase = pc.fill_null(phase, -1).to_numpy().astype(np.int64)
    told = np.flatnonzero(
        (attempt >= 0) & (phase >= 0) & (start != UNKNOWN_TIME) & (end != UNKNOWN_TIME)
    )
    held = found.start_ms[attempt[told]] != UNKNOWN_TIME
    start[told] = np.maximum(start[told], found.start_ms[attempt[told]])
    end[told] = np.minimum(end[told], found.end_ms[attempt[told]])
    good = told[held & (end[told] > start[told])]
    oddities = {}
    # Of attempts that are not asked about there may be any number of rows.
    odd = int((attempt >= 0).sum()) - len(good)
    if odd:
        oddities["rows of progress that lie outside of their attempts, left out"] = odd
    columns = attempt, start, end, phase, to_floats(progress["mfu"])
    return _Rows(*(column[good] for column in columns)), oddities


def _mfu(rows: _Rows, count: int) -> Floats:
    known = (rows.phase == PRODUCTIVE) & np.isfinite(rows.mfu) & (rows.mfu >= 0)
    weight = (rows.end - rows.start)[known].astype(np.float64)
    whole = np.bincount(rows.attempt[known], weight, count)
    summed = np.bincount(rows.attempt[known], weight * rows.mfu[known], count)
    found: Floats = np.divide(summed, whole, out=np.full(count, np.nan), where=whole > 0)
    return found


def _last_checkpoints(found: JobAttempts, rows: _Rows) -> Ints:
    """Until when work is known to be saved; before any time where no checkpoint is known.

    One that lasts to the very end of its attempt was broken off.
    """
    kept = np.full(found.size, UNKNOWN_TIME)
    done = (rows.phase == CHECKPOINT) & (rows.end < found.end_ms[rows.attempt])
    np.maximum.at(kept, rows.attempt[done], rows.end[done])
    return kept


def _cut(found: JobAttempts, ran: Ints, rows: _Rows) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut attempts at every beginning and end of a row."""
    attempt = np.concatenate([ran, ran, rows.attempt, rows.attempt])
    time = np.concatenate([found.start_ms[ran], found.end_ms[ran], rows.start, rows.end])
    nothing = np.full(2 * len(ran), UNKNOWN_PHASE)
    phase = np.concatenate([nothing, rows.phase, rows.phase])
    change = np.concatenate(
        [np.zeros(2 * len(ran), np.int64), np.ones(len(rows.start), np.int64),
         -np.ones(len(rows.end), np.int64)]
    )  # fmt: skip
    order = np.lexsort((time, attempt))
    attempt, time, phase, change = (c[order] for c in (attempt, time, phase, change))
    now = np.full(len(time), UNKNOWN_PHASE)
    for code in reversed(range(len(PHASE_PRIORITY))):
        # Rows of an attempt are all closed at its end, so that sums begin anew with the next.
        now = np.where(np.cumsum(np.where(phase == code, change, 0)) > 0, code, now)
    inside = np.zeros(len(time), np.bool_)
    inside[:-1] = (attempt[1:] == attempt[:-1]) & (time[1:] > time[:-1])
    at = np.flatnonzero(inside)
    return attempt[at], time[at], time[at + 1], now[at]
