"""Where the host stops: synchronising calls, compilations, the data loader, with the stack.

The stack is that of the Python functions around the call, innermost first, where the profile has
them (`with_stack=True`); else of the operators and annotations around it.
"""

import re
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.idle import loading_spans, synchronising_calls
from meshwright.observe.analyze.nest import NONE, enclosing, holding, nest
from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.spans import (
    Flags,
    Intervals,
    Ints,
    covered,
    gaps,
    where,
)
from meshwright.observe.analyze.steps import Extent, counted, in_counted_steps, on_host, threads
from meshwright.timeline.timeline import Timeline

COMPILING = re.compile(
    r"_compile\.compile_inner|entire_frame_compile|convert_frame\.py\(\d+\): _compile$|"
    r"^(cu|hip)Module(Load|LoadData|LoadDataEx)$|^(cu|hip)LibraryLoadData$"
)
"""Spans in which something is compiled, or its code loaded onto the device."""
REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
"""A compiled region: number of the frame, and how often it had been compiled before."""
MAX_FRAMES = 12


class Stall(NamedTuple):
    """Calls of one name from one place."""

    name: str
    stack: tuple[str, ...]
    """Innermost first; empty where the trace does not say."""
    num_calls: int
    total_ns: int
    """How long the host was in them."""
    max_ns: int
    idle_ns: int
    """How long the device was idle meanwhile."""


class RankStalls(NamedTuple):
    """Where one rank's host stops; each longest first."""

    rank: int
    synchronisations: tuple[Stall, ...]
    compilations: tuple[Stall, ...]
    data_loads: tuple[Stall, ...]
    recompiled: tuple[str, ...]
    """Compiled regions that had been compiled before: `0/2` is frame 0, for the third time."""


def stalls(timeline: Timeline, extent: Extent = Extent.SETTLED) -> tuple[RankStalls, ...]:
    """Where the hosts of all ranks stop."""
    return tuple(stalls_of(part, extent) for part in per_device(timeline))


def stalls_of(part: Timeline, extent: Extent = Extent.SETTLED) -> RankStalls:
    """Where the host of one rank stops."""
    spans = counted(part, extent)
    idle = gaps(spans.of(), spans.window_ns)
    names = part.strings("name")
    compiling = on_host(part) & where(names, COMPILING.search)
    # Ranks that were read together share their list of names: only those in use are this rank's.
    used = np.flatnonzero(np.bincount(names.codes, minlength=len(names.values)))
    regions = {
        f"{match[1]}/{match[2]}"
        for code in used.tolist()
        if (match := REGION.match(names.values[code])) and int(match[2]) > 0
    }

    def told(which: Flags) -> tuple[Stall, ...]:
        return _grouped(part, in_counted_steps(part, _outermost(part, which), extent), idle)

    return RankStalls(
        part.ranks[0] if part.ranks else 0,
        told(synchronising_calls(part)),
        told(compiling),
        told(loading_spans(part)),
        tuple(sorted(regions)),
    )


def _outermost(part: Timeline, which: Flags) -> Ints:
    """Rows that are not inside another of them: one call is not told twice."""
    row = np.flatnonzero(which)
    start = part.column("start_ns")[row]
    end = start + part.column("duration_ns")[row]
    thread = threads(part)[row]
    tree = nest(thread, start, end)
    at_top = np.ones(row.size, dtype=np.bool_)
    at_top[tree.place[tree.depth > 0]] = False
    return row[at_top]


def _grouped(part: Timeline, row: Ints, idle: Intervals) -> tuple[Stall, ...]:
    """Calls of one name and stack, put together."""
    if not row.size:
        return ()
    start, duration = part.column("start_ns")[row], part.column("duration_ns")[row]
    lost = covered(idle, start, start + duration)
    names = part.strings("name")
    stacks = _stacks(part, row)
    keys = np.column_stack([names.codes[row], stacks])
    _, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    by_group = np.argsort(place.reshape(-1), kind="stable")
    cuts = np.cumsum(np.bincount(place.reshape(-1)))[:-1]
    found = []
    for at, own in zip(first.tolist(), np.split(by_group, cuts), strict=True):
        frames = [code for code in stacks[at].tolist() if code != NONE]
        found.append(
            Stall(
                names.values[names.codes[row[at]]],
                tuple(names.values[code] for code in frames),
                int(own.size),
                int(duration[own].sum()),
                int(duration[own].max()),
                int(lost[own].sum()),
            )
        )
    return tuple(sorted(found, key=lambda stall: -stall.total_ns))


def _stacks(part: Timeline, row: Ints) -> Ints:
    """Codes of the names around each row, innermost first; -1 fills up."""
    start, duration = part.column("start_ns"), part.column("duration_ns")
    thread, names = threads(part), part.strings("name")
    category = part.strings("category")
    host = on_host(part)
    around = host & where(category, lambda value: value == "python_function")
    if not around.any():
        around = host & where(category, _is_operator)
        around &= ~where(names, lambda name: name.startswith("ProfilerStep"))
    around[row] = False
    outer = np.flatnonzero(around)
    end = start[outer] + duration[outer]
    holds = holding(thread[outer], start[outer], end, (thread[row], start[row]))
    outer, end = outer[holds], end[holds]
    tree = nest(thread[outer], start[outer], end)
    levels = enclosing(tree, thread[row], start[row])
    stacks = np.full((row.size, MAX_FRAMES), NONE, dtype=np.int64)
    filled = np.zeros(row.size, dtype=np.int64)
    for level in reversed(levels):
        hit = np.flatnonzero((level != NONE) & (filled < MAX_FRAMES))
        stacks[hit, filled[hit]] = names.codes[outer[level[hit]]]
        filled[hit] += 1
    return stacks


def _is_operator(category: str) -> bool:
    return category in {"cpu_op", "user_annotation", "Operator"}
