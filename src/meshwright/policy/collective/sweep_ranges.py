"""Which numbers the moves of a collective may consist of, and how far shifts carry them.

Columns of moves have 32 bits. A sweep whose shifts would leave them, or that states repetitions,
counts or phases that mean nothing, is refused before any of its steps is made.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Problem
from meshwright.policy.collective.collective import (
    ADDS,
    CHANNEL,
    COUNT,
    DST,
    DST_SLOT,
    MOVE_COLUMNS,
    PHASE,
    SRC,
    SRC_SLOT,
    Collective,
    Ints,
    Sweep,
    SweepShift,
)

MAX_COLUMN_VALUE = (1 << 31) - 1
"""The largest number that a column of moves can hold."""
MAX_WRAP = 1 << 30
"""Twice a block still fits into a column."""
MAX_STEPS = 1_000_000
"""A misprint in `span` or `phase` should be told, not walked through for hours."""

_MOST_OF = {ADDS: 1, CHANNEL: MAX_COLUMN_VALUE - 1, PHASE: MAX_STEPS}
"""The largest number of columns that count from 0 and stay as they are."""

Longs = NDArray[np.int64]


def find_sweep_problems(collective: Collective) -> list[Problem]:
    """Return what is wrong with the numbers of the sweeps, whatever their moves achieve."""
    problems: list[Problem] = []
    for number, sweep in enumerate(collective.sweeps):
        problems += _sweep_problems(sweep, f"sweeps[{number}]", collective.slots)
    if not problems and collective.steps > MAX_STEPS:
        what = f"{collective.steps:,} steps in all"
        problems.append(Problem("sweeps", what, f"use {MAX_STEPS:,} or fewer"))
    return problems


def _sweep_problems(sweep: Sweep, at: str, slots: int) -> list[Problem]:
    problems = []
    if not 1 <= sweep.span <= MAX_STEPS:
        fix = f"use 1 to {MAX_STEPS}"
        problems.append(Problem(f"{at}.span", f"{sweep.span} repetitions", fix))
    problems += _shift_problems(sweep.shift, f"{at}.shift")
    table = sweep.moves.table
    if not len(table):
        return problems
    # More than there are slots cannot be meant, and would be written out slot by slot.
    problems += _column_problems(table, COUNT, 1, max(1, slots), at)
    for column, most in _MOST_OF.items():
        problems += _column_problems(table, column, 0, most, at)
    return problems or _reach_problems(sweep, at)


def _column_problems(table: Ints, column: int, least: int, most: int, at: str) -> list[Problem]:
    values = table[:, column]
    if least <= values.min() and values.max() <= most:
        return []
    row = int(np.argmax((values < least) | (values > most)))
    what = f"{MOVE_COLUMNS[column]} {values[row]}"
    return [Problem(f"{at}.moves[{row}]", what, f"use {least} to {most}")]


def _shift_problems(shift: SweepShift, at: str) -> list[Problem]:
    problems = []
    for name in ("src_slot", "dst_slot", "dst"):
        value = getattr(shift, name)
        if abs(value) > MAX_COLUMN_VALUE:
            fix = f"use {-MAX_COLUMN_VALUE} to {MAX_COLUMN_VALUE}"
            problems.append(Problem(f"{at}.{name}", f"{value} is out of range", fix))
    for name in ("slot_wrap", "dst_wrap"):
        value = getattr(shift, name)
        if not 0 <= value <= MAX_WRAP:
            fix = f"use 0 for none, or the size of a block, at most {MAX_WRAP}"
            problems.append(Problem(f"{at}.{name}", f"{value} is out of range", fix))
    strange = next((slot for slot in shift.slot_order if not 0 <= slot <= MAX_COLUMN_VALUE), None)
    if strange is not None:
        fix = "name slots, from 0 on"
        problems.append(Problem(f"{at}.slot_order", f"there is no slot {strange}", fix))
    return problems


def _reach_problems(sweep: Sweep, at: str) -> list[Problem]:
    """Return the columns that shifts carry beyond what a column can hold."""
    problems = []
    for column in (SRC_SLOT, DST_SLOT, DST):
        lowest, highest = get_value_range(sweep, column)
        if lowest < -MAX_COLUMN_VALUE or highest > MAX_COLUMN_VALUE:
            far = lowest if lowest < -MAX_COLUMN_VALUE else highest
            what = f"{MOVE_COLUMNS[column]} comes to {far} within {sweep.span} repetitions"
            fix = f"stay within {MAX_COLUMN_VALUE}, with a smaller shift, span or count"
            problems.append(Problem(f"{at}.shift", what, fix))
    return problems


def get_value_range(sweep: Sweep, column: int) -> tuple[int, int]:
    """Return the lowest and the highest number a column may come to, counts included."""
    shift = sweep.shift
    by, wrap = {
        SRC: (0, 0),
        DST: (shift.dst, shift.dst_wrap),
        SRC_SLOT: (shift.src_slot, shift.slot_wrap),
        DST_SLOT: (shift.dst_slot, shift.slot_wrap),
    }[column]
    values: Longs = sweep.moves.table[:, column].astype(np.int64)
    more: Longs = sweep.moves.count.astype(np.int64) - 1
    if column in (SRC, DST):
        more = np.zeros_like(values)
    low = high = values
    last = (sweep.span - 1) * by
    if last and not wrap:
        low, high = values + min(0, last), values + max(0, last)
    elif last and by % wrap:
        # Shifts go around the block in strides; no others of its numbers are met.
        stride = gcd(by, wrap)
        begins = values - values % wrap
        low = begins + values % stride
        high = low + wrap - stride
        if shift.slot_order:  # each slot of a run goes around for itself
            ends = values + more
            low = np.minimum(begins, values)
            high, more = ends - ends % wrap + wrap - 1, np.zeros_like(values)
    return int(low.min()), int((high + more).max())


def is_within_bounds(collective: Collective) -> bool:
    """Whether no step can leave the places and slots there are; `False` where it must be tried."""
    places, slots = collective.num_endpoints, collective.slots
    for sweep in collective.sweeps:
        if not len(sweep.moves):
            continue
        order = sweep.shift.slot_order
        if order and max(order) >= slots:
            return False
        for column, most in ((SRC, places), (DST, places), (SRC_SLOT, slots), (DST_SLOT, slots)):
            lowest, highest = get_value_range(sweep, column)
            if lowest < 0 or highest >= most:
                return False
    return True
