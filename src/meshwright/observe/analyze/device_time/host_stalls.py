"""Where the host stops: synchronizing calls, compilations, the data loader, with the stack.

The stack is that of the Python functions around the call, innermost first, where the profile has
them (`with_stack=True`); else of the operators and annotations around it.
"""

import re
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.device_time.idle_time import (
    find_data_loading,
    find_synchronizing_calls,
)
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    mask_counted_rows,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.call_stacks import (
    NO_SPAN,
    build_call_stacks,
    find_enclosing,
    find_enclosing_rows,
)
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    Flags,
    Intervals,
    Ints,
    find_gaps,
    match_values,
    measure_covered_ns,
)
from meshwright.observe.analyze.spans.steps import mask_host_rows, number_threads
from meshwright.timeline.timeline import Timeline

COMPILATION_PATTERN = re.compile(
    r"_compile\.compile_inner|entire_frame_compile|convert_frame\.py\(\d+\): _compile$|"
    r"^(cu|hip)Module(Load|LoadData|LoadDataEx)$|^(cu|hip)LibraryLoadData$"
)
"""Spans in which something is compiled, or its code loaded onto the device."""
COMPILED_REGION_PATTERN = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
"""A compiled region: number of the frame, and how often it had been compiled before."""
MAX_FRAMES = 12


class HostStall(NamedTuple):
    """Calls of one name from one place."""

    name: str
    stack: tuple[str, ...]
    """Innermost first; empty where the trace does not say."""
    num_calls: int
    total_ns: int
    """How long the host was in them."""
    max_ns: int
    device_idle_ns: int
    """How long the device was idle meanwhile."""


class RankHostStalls(NamedTuple):
    """Where one rank's host stops; each longest first."""

    rank: int
    synchronizations: tuple[HostStall, ...]
    compilations: tuple[HostStall, ...]
    data_loads: tuple[HostStall, ...]
    recompiled_regions: tuple[str, ...]
    """Compiled regions that had been compiled before: `0/2` is frame 0, for the third time."""


def analyze_host_stalls(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> tuple[RankHostStalls, ...]:
    """Where the hosts of all ranks stop."""
    return tuple(analyze_rank_host_stalls(part, extent) for part in split_by_device(timeline))


def analyze_rank_host_stalls(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> RankHostStalls:
    """Where the host of one rank stops."""
    spans = select_counted_spans(part, extent)
    idle = find_gaps(spans.intervals_of(), spans.window_ns)
    names = part.string_column("name")
    compiling = mask_host_rows(part) & match_values(names, COMPILATION_PATTERN.search)
    # Ranks that were read together share their list of names: only those in use are this rank's.
    used = np.flatnonzero(np.bincount(names.codes, minlength=len(names.values)))
    regions = {
        f"{match[1]}/{match[2]}"
        for code in used.tolist()
        if (match := COMPILED_REGION_PATTERN.match(names.values[code])) and int(match[2]) > 0
    }

    def told(which: Flags) -> tuple[HostStall, ...]:
        return _grouped(part, mask_counted_rows(part, _outermost(part, which), extent), idle)

    return RankHostStalls(
        part.ranks[0] if part.ranks else 0,
        told(find_synchronizing_calls(part)),
        told(compiling),
        told(find_data_loading(part)),
        tuple(sorted(regions)),
    )


def _outermost(part: Timeline, which: Flags) -> Ints:
    """Rows that are not inside another of them: one call is not told twice."""
    row = np.flatnonzero(which)
    start = part.column("start_ns")[row]
    end = start + part.column("duration_ns")[row]
    thread = number_threads(part)[row]
    tree = build_call_stacks(thread, start, end)
    at_top = np.ones(row.size, dtype=np.bool_)
    at_top[tree.input_index[tree.depth > 0]] = False
    return row[at_top]


def _grouped(part: Timeline, row: Ints, idle: Intervals) -> tuple[HostStall, ...]:
    """Calls of one name and stack, put together."""
    if not row.size:
        return ()
    start, duration = part.column("start_ns")[row], part.column("duration_ns")[row]
    lost = measure_covered_ns(idle, start, start + duration)
    names = part.string_column("name")
    stacks = _stacks(part, row)
    keys = np.column_stack([names.codes[row], stacks])
    _, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    by_group = np.argsort(place.reshape(-1), kind="stable")
    cuts = np.cumsum(np.bincount(place.reshape(-1)))[:-1]
    found = []
    for at, own in zip(first.tolist(), np.split(by_group, cuts), strict=True):
        frames = [code for code in stacks[at].tolist() if code != NO_SPAN]
        found.append(
            HostStall(
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
    thread, names = number_threads(part), part.string_column("name")
    category = part.string_column("category")
    host = mask_host_rows(part)
    around = host & match_values(category, lambda value: value == "python_function")
    if not around.any():
        around = host & match_values(category, _is_operator)
        around &= ~match_values(names, lambda name: name.startswith("ProfilerStep"))
    around[row] = False
    outer = np.flatnonzero(around)
    end = start[outer] + duration[outer]
    holds = find_enclosing_rows(thread[outer], start[outer], end, (thread[row], start[row]))
    outer, end = outer[holds], end[holds]
    tree = build_call_stacks(thread[outer], start[outer], end)
    levels = find_enclosing(tree, thread[row], start[row])
    stacks = np.full((row.size, MAX_FRAMES), NO_SPAN, dtype=np.int64)
    filled = np.zeros(row.size, dtype=np.int64)
    for level in reversed(levels):
        hit = np.flatnonzero((level != NO_SPAN) & (filled < MAX_FRAMES))
        stacks[hit, filled[hit]] = names.codes[outer[level[hit]]]
        filled[hit] += 1
    return stacks


def _is_operator(category: str) -> bool:
    return category in {"cpu_op", "user_annotation", "Operator"}
