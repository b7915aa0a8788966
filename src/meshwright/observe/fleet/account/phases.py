"""What attempts were busy with, moment by moment, from what they told of themselves."""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.fleet.account.attempts import LOST_STATES, Attempts, in_states
from meshwright.observe.fleet.account.claims import owners
from meshwright.observe.fleet.account.ticks import NEVER, Flags, Floats, Longs, moments, numbers

ORDER: Final = ("lost", "checkpoint", "data_wait", "communication", "startup", "productive")
"""Where rows overlap, the first of these holds: interruptions stand inside what they interrupt."""
UNTOLD: Final = len(ORDER)
LOST, CHECKPOINT, STARTUP, PRODUCTIVE = 0, 1, 4, 5


class Phases(NamedTuple):
    """Every attempt that held GPUs, cut where what it did changes; in the order of attempts."""

    attempt: Longs
    start: Longs
    end: Longs
    phase: Longs
    """A place in ORDER, or UNTOLD."""
    lost: Flags
    """Whether a failure after it took away what was done."""
    mfu: Floats
    """For each attempt, the mean of its productive time; NaN where it is not told."""
    saved: Flags
    """For each attempt, whether it is known up to when its work was saved."""
    oddities: dict[str, int]


def phases(found: Attempts, progress: pa.Table | None) -> Phases:
    """Cut attempts into phases."""
    ran = np.flatnonzero((found.start != NEVER) & (found.end > found.start) & (found.parts > 0))
    failed = in_states(found, *LOST_STATES)
    mfu, saved = np.full(found.size, np.nan), np.zeros(found.size, np.bool_)
    if progress is None or progress.num_rows == 0:
        untold = np.full(len(ran), UNTOLD)
        return Phases(ran, found.start[ran], found.end[ran], untold, failed[ran], mfu, saved, {})
    rows, oddities = _rows(found, progress)
    mfu = _mfu(rows, found.size)
    attempt, start, end, phase = _cut(found, ran, rows)
    kept_until = _last_checkpoints(found, rows)
    own_word = np.zeros(found.size, np.bool_)
    own_word[rows.attempt[rows.phase == LOST]] = True
    # Those who tell what they lost are believed; of others the rule speaks.
    lost = failed[attempt] & ~own_word[attempt] & (start >= kept_until[attempt])
    saved = own_word | (kept_until != NEVER)
    return Phases(attempt, start, end, phase, lost, mfu, saved, oddities)


class _Rows(NamedTuple):
    attempt: Longs
    start: Longs
    end: Longs
    phase: Longs
    mfu: Floats


def _rows(found: Attempts, progress: pa.Table) -> tuple[_Rows, dict[str, int]]:
    """Read what was told, within the attempts it is of."""
    attempt = owners(found, progress)
    start, end = moments(progress["start_s"]), moments(progress["end_s"])
    phase = pc.index_in(progress["phase"], value_set=pa.array(ORDER))
    phase = pc.fill_null(phase, -1).to_numpy().astype(np.int64)
    told = np.flatnonzero((attempt >= 0) & (phase >= 0) & (start != NEVER) & (end != NEVER))
    held = found.start[attempt[told]] != NEVER
    start[told] = np.maximum(start[told], found.start[attempt[told]])
    end[told] = np.minimum(end[told], found.end[attempt[told]])
    good = told[held & (end[told] > start[told])]
    oddities = {}
    # Of attempts that are not asked about there may be any number of rows.
    odd = int((attempt >= 0).sum()) - len(good)
    if odd:
        oddities["rows of progress that lie outside of their attempts, left out"] = odd
    columns = attempt, start, end, phase, numbers(progress["mfu"])
    return _Rows(*(column[good] for column in columns)), oddities


def _mfu(rows: _Rows, count: int) -> Floats:
    known = (rows.phase == PRODUCTIVE) & np.isfinite(rows.mfu) & (rows.mfu >= 0)
    weight = (rows.end - rows.start)[known].astype(np.float64)
    whole = np.bincount(rows.attempt[known], weight, count)
    summed = np.bincount(rows.attempt[known], weight * rows.mfu[known], count)
    found: Floats = np.divide(summed, whole, out=np.full(count, np.nan), where=whole > 0)
    return found


def _last_checkpoints(found: Attempts, rows: _Rows) -> Longs:
    """Until when work is known to be saved; before any time where no checkpoint is known.

    One that lasts to the very end of its attempt was broken off.
    """
    kept = np.full(found.size, NEVER)
    done = (rows.phase == CHECKPOINT) & (rows.end < found.end[rows.attempt])
    np.maximum.at(kept, rows.attempt[done], rows.end[done])
    return kept


def _cut(found: Attempts, ran: Longs, rows: _Rows) -> tuple[Longs, Longs, Longs, Longs]:
    """Cut attempts at every beginning and end of a row."""
    attempt = np.concatenate([ran, ran, rows.attempt, rows.attempt])
    time = np.concatenate([found.start[ran], found.end[ran], rows.start, rows.end])
    nothing = np.full(2 * len(ran), UNTOLD)
    phase = np.concatenate([nothing, rows.phase, rows.phase])
    change = np.concatenate(
        [np.zeros(2 * len(ran), np.int64), np.ones(len(rows.start), np.int64),
         -np.ones(len(rows.end), np.int64)]
    )  # fmt: skip
    order = np.lexsort((time, attempt))
    attempt, time, phase, change = (c[order] for c in (attempt, time, phase, change))
    now = np.full(len(time), UNTOLD)
    for code in reversed(range(len(ORDER))):
        # Rows of an attempt are all closed at its end, so that sums begin anew with the next.
        now = np.where(np.cumsum(np.where(phase == code, change, 0)) > 0, code, now)
    inside = np.zeros(len(time), np.bool_)
    inside[:-1] = (attempt[1:] == attempt[:-1]) & (time[1:] > time[:-1])
    at = np.flatnonzero(inside)
    return attempt[at], time[at], time[at + 1], now[at]
