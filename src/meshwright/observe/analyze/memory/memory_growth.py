"""Memory that grows with every step: allocations that survive the steps that made them."""

import re
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.memory.allocation_lifetimes import (
    NO_EVENT,
    AllocationLifetimes,
    LiveBytes,
    mask_last_at_address,
)
from meshwright.observe.analyze.memory.memory_categories import (
    NO_STACK,
    CategorizedMemory,
    find_optimizer_steps,
    find_user_line,
    has_complete_steps,
)
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    MemorySnapshot,
    Numbers,
)

MIN_STEPS = 3
"""Fewer steps do not tell growth from a start."""
_LIKE = 0.8
"""Share of allocations that must repeat for a period to be one."""
_AS_LIKE = 0.02
"""A longer period counts only if more repeats under it: microbatches repeat within a step."""
_MOST_CANDIDATES = 16
_MOST_LEAKS = 200
_STEP_MARKS = ("profilerstep#", "optimizer.step#", "step")
"""What the names of marks contain that begin steps, the surest first."""


class MemoryLeak(NamedTuple):
    """A line whose memory survives, step after step."""

    line: str
    bytes_per_step: int
    count_per_step: float
    total_bytes: int
    """All that the line allocated in the recording and that is still held."""
    total_count: int


class MemoryGrowth(NamedTuple):
    """How live memory changes from step to step."""

    num_steps: int
    step_source: str
    """`annotations`, `optimizer`, `periodicity`, or empty where no steps were found."""
    bytes_per_step: int
    """Median change of the live bytes at the steps' ends."""
    leaks: tuple[MemoryLeak, ...]


def find_growth(known: CategorizedMemory, live: LiveBytes) -> MemoryGrowth:
    """Find growth over the steps of one device."""
    marks, how = _steps(known, live.device)
    if marks.size <= MIN_STEPS:
        return MemoryGrowth(max(0, int(marks.size) - 1), how, 0, ())
    place = np.searchsorted(live.event, marks[1:]) - 1
    ends = live.bytes[np.clip(place, 0, None)]
    per_step = int(np.median(np.diff(ends)))
    leaks = _leaks(known.snapshot, known.lifetimes, live.device, marks)
    return MemoryGrowth(int(marks.size) - 1, how, per_step, leaks)


def _steps(known: CategorizedMemory, device: int) -> tuple[Numbers, str]:
    """Return the events at which steps begin, and how they were told.

    By marks of the user's or the optimizer's, else by the optimizer's own allocations, else by
    repetition. Layers repeat as steps do: a period counts as a step only if it goes through forward
    and backward (or an optimizer).
    """
    lives = known.lifetimes
    marked = _marked(known.snapshot, device)
    if marked.size > MIN_STEPS:
        return marked, "annotations"
    rows = np.flatnonzero(lives.device == device)
    phase = known.phase[lives.stack[rows]]
    began = find_optimizer_steps(phase)
    if began.size > MIN_STEPS:
        return lives.alloc_event[rows[began]], "optimizer"
    period, first = _period(lives, rows)
    if period and has_complete_steps(phase[first : first + period]):
        return lives.alloc_event[rows[first::period]], "periodicity"
    return np.zeros(0, np.int64), ""


def _marked(snapshot: MemorySnapshot, device: int) -> Numbers:
    """Return the events at which steps begin by annotations of one name.

    Several names may tell of the same step. Marks from before the first event, which a ring that is
    full has dropped, tell nothing.
    """
    mine = np.flatnonzero(snapshot.events.device == device)
    times = snapshot.events.time_us[mine]
    if not mine.size or times.min() < 0:
        return np.zeros(0, np.int64)
    named: dict[tuple[int, str], list[int]] = {}
    for mark in snapshot.annotations:
        name = re.sub(r"\d+", "", mark.name.lower())
        sure = next((n for n, part in enumerate(_STEP_MARKS) if part in name), None)
        is_here = mark.device == device and times[0] <= mark.time_us <= times[-1]
        if sure is not None and mark.is_start and is_here:
            named.setdefault((sure, name), []).append(mark.time_us)
    often = [key for key, found in named.items() if len(found) > MIN_STEPS]
    if not often:
        return np.zeros(0, np.int64)
    # Of names that are equally sure, the rarest: the others are parts of its steps.
    chosen = named[min(often, key=lambda key: (key[0], len(named[key])))]
    return mine[np.searchsorted(times, np.array(sorted(chosen)))]


def _period(lives: AllocationLifetimes, rows: Numbers) -> tuple[int, int]:
    """Return after how many allocations the same stacks and sizes come again, and from which on.

    Candidates are the distances between equal allocations of the rarest repeated kinds; the
    shortest under which most of the later half equal the one a period before is the period. What
    was allocated before the first repetition, as parameters and the optimizer's state, is no step.
    (0, 0) where nothing repeats.
    """
    pairs = np.stack([lives.stack[rows], lives.size_bytes[rows]], axis=1)
    if len(pairs) < 2 * MIN_STEPS:
        return 0, 0
    _, code, count = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    code = code.ravel()
    repeated = np.flatnonzero(count >= MIN_STEPS)
    candidates: set[int] = set()
    for kind in repeated[np.argsort(count[repeated], kind="stable")][:_MOST_CANDIDATES]:
        gaps = np.diff(np.flatnonzero(code == kind))
        candidates.add(int(np.median(gaps)))
    half = code.size // 2
    alike = {
        period: float(np.mean(code[half:] == code[half - period : -period]))
        for period in sorted(candidates)
        if 1 < period <= half
    }
    best = max(alike.values(), default=0.0)
    for period, share in alike.items():
        if share >= max(_LIKE, best - _AS_LIKE):
            same = np.concatenate([[0], np.cumsum(code[period:] == code[:-period])])
            held = same[period:] - same[:-period] >= _LIKE * period
            return period, int(np.argmax(held))
    return 0, 0


def _leaks(
    snapshot: MemorySnapshot, lives: AllocationLifetimes, device: int, marks: Numbers
) -> tuple[MemoryLeak, ...]:
    """Find lines with survivors from all along the recording.

    The first step makes what all steps share (state of the optimizer, buffers), and the last two
    may still need theirs. Of the steps between, each third must have survivors, and three must or
    all where there are fewer: what is kept once or twice is no growth.
    """
    steps = marks.size - 1
    middle = steps - 2
    kept = (lives.free_event == NO_EVENT) & (lives.device == device) & mask_last_at_address(lives)
    step = np.searchsorted(marks, lives.alloc_event, side="right") - 1
    rows = np.flatnonzero(kept & (step > 0) & (step < steps - 1))
    if middle < 2 or not rows.size:
        return ()
    lines: dict[str, int] = {}
    line_of = np.full(len(snapshot.stacks), -1, np.int64)
    for number in np.unique(lives.stack[rows]).tolist():
        name = find_user_line(snapshot.get_stack(number)) or NO_STACK
        line_of[number] = lines.setdefault(name, len(lines))
    line = line_of[lives.stack[rows]]
    seen = np.unique(np.stack([line, step[rows] - 1], axis=1), axis=0)
    in_steps = np.bincount(seen[:, 0], minlength=len(lines))
    thirds = np.unique(np.stack([seen[:, 0], 3 * seen[:, 1] // middle], axis=1), axis=0)
    in_thirds = np.bincount(thirds[:, 0], minlength=len(lines))
    is_leak = (in_steps >= min(MIN_STEPS, middle)) & (in_thirds >= min(3, middle))
    names, found = list(lines), []
    all_lines = line_of[lives.stack]
    for code in np.flatnonzero(is_leak).tolist()[:_MOST_LEAKS]:
        own = lives.size_bytes[rows[line == code]]
        all_kept = lives.size_bytes[kept & (all_lines == code)]
        found.append(
            MemoryLeak(
                names[code],
                int(own.sum()) // middle,
                own.size / middle,
                int(all_kept.sum()),
                int(all_kept.size),
            )
        )
    return tuple(sorted(found, key=lambda leak: -leak.bytes_per_step))
