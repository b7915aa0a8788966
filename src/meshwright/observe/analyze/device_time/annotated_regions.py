"""Which annotated region each kernel was launched in: `forward`, `optimizer`, a layer.

Regions are annotations of the host (`torch.profiler.record_function`, NVTX ranges), one inside
another. A kernel belongs to the innermost one around its launch, on the launching thread; where
that thread has none, as autograd's has not, to the one that the main thread is in at that moment.
The main thread is the one that spends most time in annotations.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    mask_counted_rows,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.call_stacks import (
    NO_SPAN,
    CallStackIndex,
    build_call_stacks,
    find_enclosing,
)
from meshwright.observe.analyze.spans.intervals import COMMUNICATION, Flags, Ints, match_values
from meshwright.observe.analyze.spans.steps import find_launch_rows, mask_host_rows, number_threads
from meshwright.timeline.schema import ABSENT
from meshwright.timeline.timeline import Timeline

MAX_REGIONS = 60
"""So many are kept, the longest; names that count up would make one for each step."""
MAX_REGION_KERNELS = 5
_GRAPH = re.compile(r"^## Call CompiledFxGraph \w+ ##$")


class RegionKernel(NamedTuple):
    """A kernel in a region."""

    name: str
    num_launches: int
    total_ns: int


class AnnotatedRegion(NamedTuple):
    """All annotations of one name inside the same others."""

    path: tuple[str, ...]
    """Names from the outermost annotation to this one."""
    num_calls: int
    """How often the host entered it in the counted steps."""
    num_kernels: int
    """Device spans launched in it, with those of regions inside it."""
    total_ns: int
    """The sum of their lengths."""
    communication_ns: int
    """The part of it that communicates."""
    self_ns: int
    """The part that no region inside this one has."""
    host_ns: int
    """How long the host was in it."""
    kernels: tuple[RegionKernel, ...]
    """The longest, with those of regions inside."""


class RankRegions(NamedTuple):
    """The regions of one rank, those that took longest on the device first."""

    rank: int
    regions: tuple[AnnotatedRegion, ...]
    device_ns: int
    """The sum of all device spans, in regions or not."""
    unattributed_ns: int
    """Of spans in no region, or whose launch is not recorded."""
    from_main_thread_ns: int
    """Of spans that have their region from the main thread."""


def analyze_rank_regions(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> RankRegions:
    """Attribute the device work of one rank to the annotations around its launches."""
    spans = select_counted_spans(part, extent)
    length = spans.end - spans.start
    rank = part.ranks[0] if part.ranks else 0
    rows = mask_counted_rows(part, _annotations(part), extent)
    if not rows.size or not length.size:
        return RankRegions(rank, (), int(length.sum()), int(length.sum()), 0)
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    thread = number_threads(part)
    codes = part.string_column("name").codes
    launch = find_launch_rows(part, spans)
    known = np.flatnonzero(launch != ABSENT)
    moments = np.concatenate([start[rows], start[launch[known]]])
    lanes = np.concatenate([thread[rows], thread[launch[known]]])
    tree = build_call_stacks(thread[rows], start[rows], end[rows])
    depth = int(tree.depth.max()) + 1
    inside = _around(tree, lanes, moments, depth)
    alone = np.flatnonzero((inside == NO_SPAN).all(axis=1))
    main = np.full(alone.size, np.bincount(thread[rows], (end - start)[rows]).argmax())
    inside[alone] = _around(tree, main, moments[alone], depth)
    # An annotation's own path ends with it, also where one inside it starts at the same moment.
    level = np.zeros(rows.size, dtype=np.int64)
    level[tree.input_index] = tree.depth
    inside[: rows.size][np.arange(depth) > level[:, None]] = NO_SPAN
    names = np.append(codes[rows], NO_SPAN)[inside]
    paths, of = np.unique(names, axis=0, return_inverse=True)
    of = of.reshape(-1)
    spent = length[known]
    found = _summed(
        [tuple(code for code in path if code != NO_SPAN) for path in paths.tolist()],
        _Shares(of[: rows.size], (end - start)[rows], of[rows.size :], spans.name[known], spent,
                spans.kind[known] == COMMUNICATION),
        _told(part.string_column("name").values, codes[rows][np.argsort(start[rows],
        kind="stable")]),
        spans.names,
    )  # fmt: skip
    outside = (inside[rows.size :] == NO_SPAN).all(axis=1)
    lent = np.zeros(moments.size, dtype=np.bool_)
    lent[alone] = True
    return RankRegions(
        rank,
        found,
        int(length.sum()),
        int(length.sum() - spent[~outside].sum()),
        int(spent[lent[rows.size :] & ~outside].sum()),
    )


def _annotations(part: Timeline) -> Ints:
    """Rows of annotations of the host; the profiler's marks of steps are none."""
    filed = match_values(part.string_column("category"), lambda value: value == "user_annotation")
    steps = match_values(part.string_column("name"), lambda name: name.startswith("ProfilerStep"))
    return np.flatnonzero(filed & mask_host_rows(part) & ~steps & (part.column("duration_ns") > 0))


def _told(names: Sequence[str], in_time: Ints) -> list[str]:
    """The names; compiled graphs by number in order of time: their hashes differ between ranks."""
    told = list(names)
    graphs = (code for code in dict.fromkeys(in_time.tolist()) if _GRAPH.match(names[code]))
    for number, code in enumerate(graphs, 1):
        told[code] = f"compiled graph {number}"
    return told


def _around(tree: CallStackIndex, lanes: Ints, moments: Ints, depth: int) -> Ints:
    """For each moment the annotations around it, outermost first, then -1."""
    found = np.full((moments.size, depth), NO_SPAN, dtype=np.int64)
    for number, level in enumerate(find_enclosing(tree, lanes, moments)):
        found[:, number] = level
    return found


class _Shares(NamedTuple):
    """Which path annotations and device spans are of, by number."""

    call_path: Ints
    call_ns: Ints
    span_path: Ints
    span_name: Ints
    span_ns: Ints
    talks: Flags


def _summed(
    paths: list[tuple[int, ...]], shares: _Shares, names: Sequence[str], kernels: Sequence[str]
) -> tuple[AnnotatedRegion, ...]:
    """The regions, from the sums of each path and of those inside it."""
    size = len(paths)
    own = np.bincount(shares.span_path, shares.span_ns, size)
    talking = np.bincount(shares.span_path, shares.span_ns * shares.talks, size)
    count = np.bincount(shares.span_path, minlength=size)
    calls = np.bincount(shares.call_path, minlength=size)
    host = np.bincount(shares.call_path, shares.call_ns, size)
    within: dict[tuple[int, ...], list[int]] = {}
    for number, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            within.setdefault(path[:depth], []).append(number)
    at = {path: number for number, path in enumerate(paths)}
    total = {path: int(own[inner].sum()) for path, inner in within.items()}
    longest = sorted(total, key=lambda path: (-total[path], path))[:MAX_REGIONS]
    return tuple(
        AnnotatedRegion(
            tuple(names[code] for code in path),
            int(calls[at[path]]),
            int(count[within[path]].sum()),
            total[path],
            int(talking[within[path]].sum()),
            int(own[at[path]]),
            int(host[at[path]]),
            _kernels(shares, within[path], kernels),
        )
        for path in longest
        if total[path] and path in at
    )


def _kernels(shares: _Shares, inner: list[int], names: Sequence[str]) -> tuple[RegionKernel, ...]:
    chosen = np.isin(shares.span_path, inner)
    total = np.bincount(shares.span_name[chosen], shares.span_ns[chosen])
    count = np.bincount(shares.span_name[chosen])
    top = np.argsort(-total, kind="stable")[:MAX_REGION_KERNELS].tolist()
    return tuple(
        RegionKernel(names[code], int(count[code]), int(total[code])) for code in top if count[code]
    )
