"""Memory that grows with every step: allocations that survive the steps that made them."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.categories import (
    NO_STACK,
    Sorted,
    has_whole_steps,
    user_line,
)
from meshwright.observe.analyze.memory.lifetimes import NEVER, Lifetimes, Live
from meshwright.timeline.readers.memory_snapshot import Numbers, Snapshot

FEWEST_STEPS = 3
"""Fewer steps do not tell growth from a start."""
_LIKE = 0.8
"""Share of allocations that must repeat for a period to be one."""
_MOST_CANDIDATES = 16
_MOST_LEAKS = 200


class Leak(NamedTuple):
    """A line whose memory survives, step after step."""

    line: str
    bytes_per_step: int
    count_per_step: float
    total_bytes: int
    """All that the line allocated in the recording and that is still held."""
    total_count: int


class Growth(NamedTuple):
    """How live memory changes from step to step."""

    steps: int
    how: str
    """`annotations`, `periodicity`, or empty where no steps were found."""
    bytes_per_step: int
    """Median change of the live bytes at the steps' ends."""
    leaks: tuple[Leak, ...]


def growth(known: Sorted, live: Live) -> Growth:
    """Find growth over the steps of one device."""
    marks, how = _steps(known, live.device)
    if marks.size <= FEWEST_STEPS:
        return Growth(max(0, int(marks.size) - 1), how, 0, ())
    place = np.searchsorted(live.event, marks[1:], side="right") - 1
    ends = live.bytes[np.clip(place, 0, None)]
    per_step = int(np.median(np.diff(ends)))
    leaks = _leaks(known.snapshot, known.lives, live.device, marks)
    return Growth(int(marks.size) - 1, how, per_step, leaks)


def _steps(known: Sorted, device: int) -> tuple[Numbers, str]:
    """Return the events at which steps begin: by marks of the optimizer, else by repetition.

    Layers repeat as steps do: a period counts as a step only if it goes through forward and
    backward (or an optimizer).
    """
    snapshot, lives = known.snapshot, known.lives
    times = snapshot.events.time_us
    named = [
        mark.time_us
        for mark in snapshot.annotations
        if mark.is_start and mark.device == device and "step" in mark.name.lower()
    ]
    mine = np.flatnonzero(snapshot.events.device == device)
    if len(named) > 1 and mine.size and times[mine].min() >= 0:
        places = np.searchsorted(times[mine], np.array(sorted(named)))
        return mine[np.clip(places, 0, mine.size - 1)], "annotations"
    rows = np.flatnonzero(lives.device == device)
    period = _period(lives, device)
    if period and has_whole_steps(known.phase[lives.stack[rows[:period]]]):
        return lives.event[rows[::period]], "periodicity"
    return np.zeros(0, np.int64), ""


def _period(lives: Lifetimes, device: int) -> int:
    """Return after how many allocations the same stacks and sizes come again, 0 if they do not.

    Candidates are the distances between equal allocations of the rarest repeated kinds; the
    shortest under which most allocations equal the one a period before is the period.
    """
    mine = lives.device == device
    pairs = np.stack([lives.stack[mine], lives.size_bytes[mine]], axis=1)
    if len(pairs) < 2 * FEWEST_STEPS:
        return 0
    _, code, count = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    code = code.ravel()
    repeated = np.flatnonzero(count >= FEWEST_STEPS)
    candidates: set[int] = set()
    for kind in repeated[np.argsort(count[repeated], kind="stable")][:_MOST_CANDIDATES]:
        gaps = np.diff(np.flatnonzero(code == kind))
        candidates.add(int(np.median(gaps)))
    for period in sorted(candidates):
        if 1 < period <= code.size // 2 and np.mean(code[period:] == code[:-period]) >= _LIKE:
            return period
    return 0


def _leaks(snapshot: Snapshot, lives: Lifetimes, device: int, marks: Numbers) -> tuple[Leak, ...]:
    """Find lines with survivors from every step but the last two, which may still need theirs."""
    steps = marks.size - 1
    kept = (lives.end == NEVER) & (lives.device == device)
    step = np.searchsorted(marks, lives.event, side="right") - 1
    old = kept & (step >= 0) & (step < steps - 1)
    if not old.any() or steps < FEWEST_STEPS:
        return ()
    lines: dict[str, int] = {}
    line_of = np.zeros(len(snapshot.stacks), np.int64)
    for number in np.unique(lives.stack[kept]).tolist():
        line = user_line(snapshot.stack(number)) or NO_STACK
        line_of[number] = lines.setdefault(line, len(lines))
    # The first step makes what all steps share: state of the optimizer, buffers.
    rows = np.flatnonzero(old & (step > 0))
    pairs, place = np.unique(line_of[lives.stack[rows]] * steps + step[rows], return_inverse=True)
    counts = np.bincount(place.ravel(), minlength=pairs.size)
    sizes = np.zeros(pairs.size, np.int64)
    np.add.at(sizes, place.ravel(), lives.size_bytes[rows])
    in_steps = np.bincount(pairs // steps, minlength=len(lines))
    names, found = list(lines), []
    for code in np.flatnonzero(in_steps == steps - 2).tolist():
        mine = pairs // steps == code
        all_kept = lives.size_bytes[kept & (line_of[lives.stack] == code)]
        found.append(
            Leak(
                names[code],
                int(np.median(sizes[mine])),
                float(np.median(counts[mine])),
                int(all_kept.sum()),
                int(all_kept.size),
            )
        )
        if len(found) == _MOST_LEAKS:
            break
    return tuple(sorted(found, key=lambda leak: -leak.bytes_per_step))
