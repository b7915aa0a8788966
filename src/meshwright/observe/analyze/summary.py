"""Everything the screen and the report say of one rank, small enough to keep for thousands.

A summary holds no spans: a folder of ranks is read one rank after another, and only this is kept.
"""

from typing import NamedTuple

from meshwright.observe.analyze.breakdown import RankBreakdown, breakdown_of
from meshwright.observe.analyze.critical_path import critical_path, suggestions, what_if
from meshwright.observe.analyze.critical_path.path import BEFORE
from meshwright.observe.analyze.idle import RankIdle, idle_of
from meshwright.observe.analyze.kernels import Kernel, kernels_of
from meshwright.observe.analyze.launches import RankLaunches, launches_of
from meshwright.observe.analyze.mfu import RankMfu, mfu_of
from meshwright.observe.analyze.overlap import RankOverlap, overlap_of
from meshwright.observe.analyze.per_device import SHARED
from meshwright.observe.analyze.regions import RankRegions, regions_of
from meshwright.observe.analyze.stalls import Stall, stalls_of
from meshwright.observe.analyze.steps import (
    Extent,
    RankSteps,
    counted,
    counted_steps,
    counted_window,
    steps_of,
)
from meshwright.timeline.schema import Kind
from meshwright.timeline.timeline import Timeline

MOST_KERNELS = 60
"""Rows of the kernel table that are kept; the rest is told as one sum."""
MOST_STALLS = 5
MOST_SPANS_ON_PATH = 2_000_000
"""A rank with more spans has its critical path left out, which would take most of the time."""


class Path(NamedTuple):
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
    whole_steps: RankBreakdown
    """The same of whole steps only, as is all that follows."""
    idle: RankIdle
    launches: RankLaunches
    mfu: RankMfu
    kernels: tuple[Kernel, ...]
    """The longest."""
    num_kernels: int
    """How many there are."""
    other_kernels_ns: int
    """Time in those that are not listed."""
    stalls: tuple[Stall, ...]
    """The longest synchronisations, compilations and data loads, by device time lost."""
    recompiled: tuple[str, ...]
    regions: RankRegions
    path: Path | None
    notes: tuple[str, ...]
    """What the reader had to guess."""

    def per_step_ms(self, total_ns: float) -> float:
        """A total as milliseconds per step; of the whole time where steps are not told."""
        return total_ns / 1e6 / max(self.num_steps, 1)


def summary_of(part: Timeline, *, path_in: Timeline | None = None) -> RankSummary:
    """Sum up one rank; `path_in` is where its critical path is looked for, if it is.

    That is the rank itself, or the whole process where it drives other devices too.
    """
    table = kernels_of(part)
    marks = steps_of(part)
    stalls = stalls_of(part)
    every = (*stalls.synchronisations, *stalls.compilations, *stalls.data_loads)
    notes = part.metadata.get("notes", "")
    return RankSummary(
        rank=part.ranks[0] if part.ranks else 0,
        profiler=part.metadata.get("profiler", "") or part.source.value,
        device=table.device,
        num_spans=part.num_spans - int(part.metadata.get(SHARED, "0")),
        num_steps=counted_steps(part),
        steps=marks,
        breakdown=breakdown_of(part),
        overlap=overlap_of(part),
        whole_steps=breakdown_of(part, Extent.SETTLED),
        idle=idle_of(part),
        launches=launches_of(part),
        mfu=mfu_of(part),
        kernels=table.kernels[:MOST_KERNELS],
        num_kernels=len(table.kernels),
        other_kernels_ns=sum(kernel.total_ns for kernel in table.kernels[MOST_KERNELS:]),
        stalls=tuple(sorted(every, key=lambda one: -one.idle_ns)[:MOST_STALLS]),
        recompiled=stalls.recompiled,
        regions=regions_of(part),
        path=_path(path_in) if path_in is not None else None,
        notes=tuple(line for line in notes.splitlines() if line),
    )


def _path(part: Timeline) -> Path | None:
    if part.num_spans > MOST_SPANS_ON_PATH or not counted(part, Extent.ALL).row.size:
        return None
    # The middle one of the counted steps: the first ones of a profile warm up.
    window = counted_window(part)
    whole = [one for one in steps_of(part).steps if window is None or one.start_ns < window[1]]
    working = [one for one in whole if one.num_spans] or whole
    step = working[len(working) // 2].number if working else None
    found = critical_path(part, step=step)
    by_cause = {cause: ns for cause, ns in found.ns_by_cause.items() if cause != BEFORE}
    gains = what_if(found.built, suggestions(found))
    worth = sorted((gain for gain in gains if gain.share >= 0.01), key=lambda gain: -gain.share)
    return Path(
        step,
        sum(by_cause.values()),
        by_cause,
        tuple((gain.change.label, gain.share) for gain in worth[:5]),
    )


def communicates(summary: RankSummary) -> bool:
    """Whether a rank shows collectives, so that the other ranks would tell more."""
    return any(kernel.kind == Kind.COMMUNICATION for kernel in summary.kernels)
