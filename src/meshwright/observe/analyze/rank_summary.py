"""Everything the screen and the report say of one rank, small enough to keep for thousands.

A summary holds no spans: a folder of ranks is read one rank after another, and only this is kept.
"""

from typing import NamedTuple

from meshwright.observe.analyze.compute_efficiency.kernel_table import (
    KernelRow,
    analyze_rank_kernels,
)
from meshwright.observe.analyze.compute_efficiency.mfu import RankMfu, analyze_rank_mfu
from meshwright.observe.analyze.critical_path import (
    evaluate_changes,
    find_critical_path,
    suggest_changes,
)
from meshwright.observe.analyze.critical_path.critical_path import BEFORE
from meshwright.observe.analyze.device_time.annotated_regions import (
    RankRegions,
    analyze_rank_regions,
)
from meshwright.observe.analyze.device_time.breakdown import RankBreakdown, analyze_rank_breakdown
from meshwright.observe.analyze.device_time.host_stalls import HostStall, analyze_rank_host_stalls
from meshwright.observe.analyze.device_time.idle_time import RankIdle, analyze_rank_idle
from meshwright.observe.analyze.device_time.launches import RankLaunches, analyze_rank_launches
from meshwright.observe.analyze.device_time.overlap import RankOverlap, analyze_rank_overlap
from meshwright.observe.analyze.spans.analysis_extent import (
    AnalysisExtent,
    count_complete_steps,
    find_counted_window,
    select_counted_spans,
)
from meshwright.observe.analyze.spans.device_split import SHARED_SPANS_KEY
from meshwright.observe.analyze.spans.steps import RankSteps, find_rank_steps
from meshwright.timeline.schema import SpanKind
from meshwright.timeline.timeline import Timeline

MAX_KERNELS = 60
"""Rows of the kernel table that are kept; the rest is told as one sum."""
MAX_HOST_STALLS = 5
MAX_CRITICAL_PATH_SPANS = 2_000_000
"""A rank with more spans has its critical path left out, which would take most of the time."""


class CriticalPathSummary(NamedTuple):
    """The critical path of one step of one rank, summed up."""

    step: int | None
    """Its number; None where the trace has no steps and the whole of it was taken."""
    total_ns: int
    """Without the work of earlier steps that the device had to do first."""
    ns_by_cause: dict[str, int]
    """They add up to it."""
    gains: tuple[tuple[str, float], ...]
    """What would shorten it: the change in words, and the part of the time it saves."""


class RankSummary(NamedTuple):
    """What one rank did."""

    rank: int
    profiler: str
    device: str
    """The catalog's name of the device; empty where it is not known."""
    num_spans: int
    num_steps: int
    """Whole steps that every figure per step is of; 0 where the trace does not tell them."""
    steps: RankSteps
    breakdown: RankBreakdown
    """Of the recorded window, as is `overlap`."""
    overlap: RankOverlap
    complete_steps_breakdown: RankBreakdown
    """The same of whole steps only, as is all that follows."""
    idle: RankIdle
    launches: RankLaunches
    mfu: RankMfu
    kernels: tuple[KernelRow, ...]
    """The longest."""
    num_kernels: int
    """How many there are."""
    other_kernels_ns: int
    """Time in those that are not listed."""
    host_stalls: tuple[HostStall, ...]
    """The longest synchronizations, compilations and data loads, by device time lost."""
    recompiled_regions: tuple[str, ...]
    regions: RankRegions
    critical_path: CriticalPathSummary | None
    notes: tuple[str, ...]
    """What the reader had to guess."""

    def per_step_ms(self, total_ns: float) -> float:
        """A total as milliseconds per step; of the whole time where steps are not told."""
        return total_ns / 1e6 / max(self.num_steps, 1)


def summarize_rank(part: Timeline, *, path_in: Timeline | None = None) -> RankSummary:
    """Sum up one rank; `path_in` is where its critical path is looked for, if it is.

    That is the rank itself, or the whole process where it drives other devices too.
    """
    table = analyze_rank_kernels(part)
    marks = find_rank_steps(part)
    stalls = analyze_rank_host_stalls(part)
    every = (*stalls.synchronizations, *stalls.compilations, *stalls.data_loads)
    notes = part.metadata.get("notes", "")
    return RankSummary(
        rank=part.ranks[0] if part.ranks else 0,
        profiler=part.metadata.get("profiler", "") or part.source.value,
        device=table.device,
        num_spans=part.num_spans - int(part.metadata.get(SHARED_SPANS_KEY, "0")),
        num_steps=count_complete_steps(part),
        steps=marks,
        breakdown=analyze_rank_breakdown(part),
        overlap=analyze_rank_overlap(part),
        complete_steps_breakdown=analyze_rank_breakdown(part, AnalysisExtent.COMPLETE_STEPS),
        idle=analyze_rank_idle(part),
        launches=analyze_rank_launches(part),
        mfu=analyze_rank_mfu(part),
        kernels=table.kernels[:MAX_KERNELS],
        num_kernels=len(table.kernels),
        other_kernels_ns=sum(kernel.total_ns for kernel in table.kernels[MAX_KERNELS:]),
        host_stalls=tuple(sorted(every, key=lambda one: -one.device_idle_ns)[:MAX_HOST_STALLS]),
        recompiled_regions=stalls.recompiled_regions,
        regions=analyze_rank_regions(part),
        critical_path=_path(path_in) if path_in is not None else None,
        notes=tuple(line for line in notes.splitlines() if line),
    )


def _path(part: Timeline) -> CriticalPathSummary | None:
    if (
        part.num_spans > MAX_CRITICAL_PATH_SPANS
        or not select_counted_spans(part, AnalysisExtent.ALL).row.size
    ):
        return None
    # The middle one of the counted steps: the first ones of a profile warm up.
    window = find_counted_window(part)
    whole = [
        one for one in find_rank_steps(part).steps if window is None or one.start_ns < window[1]
    ]
    working = [one for one in whole if one.num_spans] or whole
    step = working[len(working) // 2].number if working else None
    found = find_critical_path(part, step=step)
    by_cause = {cause: ns for cause, ns in found.ns_by_cause.items() if cause != BEFORE}
    gains = evaluate_changes(found.graph, suggest_changes(found))
    worth = sorted(
        (gain for gain in gains if gain.speedup_share >= 0.01), key=lambda gain: -gain.speedup_share
    )
    return CriticalPathSummary(
        step,
        sum(by_cause.values()),
        by_cause,
        tuple((gain.change.label, gain.speedup_share) for gain in worth[:5]),
    )


def has_collectives(summary: RankSummary) -> bool:
    """Whether a rank shows collectives, so that the other ranks would tell more."""
    return any(kernel.kind == SpanKind.COMMUNICATION for kernel in summary.kernels)
