"""The analyses for notebooks: give a path or a `Timeline`, get rows that turn into a data frame.

    from meshwright import observe
    observe.breakdown("traces/").to_frame()
    observe.kernels("traces/", rank=0).to_frame().head()

Rows are plain tuples of named values; `to_frame()` needs pandas, nothing else does. A path is read
rank by rank, so a folder of many ranks needs the memory of one.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe import findings
from meshwright.observe.analyze.collectives.matched_collectives import (
    CollectiveSizeRow,
    match_collectives,
    sum_by_size,
)
from meshwright.observe.analyze.collectives.stragglers import Stragglers, find_stragglers
from meshwright.observe.analyze.compute_efficiency.kernel_table import (
    KernelRow,
    analyze_rank_kernels,
)
from meshwright.observe.analyze.compute_efficiency.mfu import RankMfu, analyze_rank_mfu
from meshwright.observe.analyze.compute_efficiency.roofline import RooflineKernel, analyze_roofline
from meshwright.observe.analyze.critical_path import CriticalPath, find_critical_path
from meshwright.observe.analyze.device_time.breakdown import RankBreakdown, analyze_rank_breakdown
from meshwright.observe.analyze.device_time.idle_time import RankIdle, analyze_rank_idle
from meshwright.observe.analyze.device_time.launches import RankLaunches, analyze_rank_launches
from meshwright.observe.analyze.device_time.overlap import RankOverlap, analyze_rank_overlap
from meshwright.observe.analyze.run_diff import RunDiff, diff_profiles
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.steps import TrainingStep, find_rank_steps
from meshwright.observe.analyze.step_profile import build_step_profile
from meshwright.observe.finding import Finding
from meshwright.timeline.readers.trace_cache import open_default_cache
from meshwright.timeline.readers.trace_folder import iter_timelines, read_trace
from meshwright.timeline.timeline import Timeline

Trace = str | Path | Timeline
"""A file, a folder with one file per rank, or what was read already."""
_T_co = TypeVar("_T_co", covariant=True)
_Row = TypeVar("_Row")


class RankRow(NamedTuple, Generic[_Row]):
    """A row and whose it is."""

    rank: int
    row: _Row


class ResultRows(tuple[_T_co, ...]):
    """Rows of named values, with a way to a data frame."""

    __slots__ = ()

    def to_frame(self) -> Any:
        """The rows as a pandas data frame, one column per field and per derived figure."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise MissingDependency("pandas is not installed", "pip install pandas") from None
        return pd.DataFrame([_columns(row) for row in self])


def load_trace(path: str | Path, *, detail: str = "shapes") -> Timeline:
    """Read a trace, or all ranks of a folder, once for several analyses."""
    return read_trace(path, detail=detail, cache=open_default_cache())


def breakdown(trace: Trace, *, rank: int | None = None) -> ResultRows[RankBreakdown]:
    """Where the time of every rank's device goes."""
    return _each(analyze_rank_breakdown, trace, rank)


def overlap(trace: Trace, *, rank: int | None = None) -> ResultRows[RankOverlap]:
    """How much of every rank's communication is hidden behind compute."""
    return _each(analyze_rank_overlap, trace, rank)


def idle(trace: Trace, *, rank: int | None = None) -> ResultRows[RankIdle]:
    """Why every rank's device is idle."""
    return _each(analyze_rank_idle, trace, rank)


def launches(trace: Trace, *, rank: int | None = None) -> ResultRows[RankLaunches]:
    """How every rank's host feeds its device."""
    return _each(analyze_rank_launches, trace, rank)


def mfu(trace: Trace, *, rank: int | None = None) -> ResultRows[RankMfu]:
    """How much of its device's peak every rank uses."""
    return _each(analyze_rank_mfu, trace, rank)


def steps(trace: Trace, *, rank: int | None = None) -> ResultRows[RankRow[TrainingStep]]:
    """Every step of every rank; each row has its rank."""
    marked = _each(find_rank_steps, trace, rank)
    return ResultRows(RankRow(one.rank, step) for one in marked for step in one.steps)


def kernels(trace: Trace, *, rank: int | None = None) -> ResultRows[RankRow[KernelRow]]:
    """Every kernel of every rank, longest first; each row has its rank."""
    tables = _each(analyze_rank_kernels, trace, rank)
    return ResultRows(RankRow(one.rank, kernel) for one in tables for kernel in one.kernels)


def roofline(trace: Trace, *, rank: int | None = None) -> ResultRows[RooflineKernel]:
    """Kernels against the device's roofline, those that lose most first."""
    found = analyze_roofline(_parts(trace, rank))
    return ResultRows(found.kernels if found is not None else ())


def collectives(trace: Trace) -> ResultRows[CollectiveSizeRow]:
    """Collectives matched across ranks, by group, kind and size."""
    return ResultRows(sum_by_size(match_collectives(_by_device(trace))))


def stragglers(trace: Trace) -> Stragglers:
    """Which rank the others wait for, how much and why."""
    return find_stragglers(_by_device(trace))


def critical_path(
    trace: Trace, *, step: int | None = None, rank: int | None = None
) -> CriticalPath:
    """What a step, or everything, waited for."""
    return find_critical_path(_whole(trace), step=step, rank=rank)


def diff(a: Trace, b: Trace) -> RunDiff:
    """What changed between two runs, per step."""
    return diff_profiles(
        *(build_step_profile(_parts(trace, None), _label(trace)) for trace in (a, b))
    )


def find_inefficiencies(trace: Trace) -> ResultRows[Finding]:
    """Every inefficiency of a run, costliest first."""
    return ResultRows(findings.find_inefficiencies(_parts(trace, None)))


def _each(
    function: Callable[[Timeline], _T_co], trace: Trace, rank: int | None
) -> ResultRows[_T_co]:
    return ResultRows(function(part) for part in _parts(trace, rank))


def _parts(trace: Trace, rank: int | None) -> Iterator[Timeline]:
    timelines: Iterable[Timeline]
    if isinstance(trace, Timeline):
        timelines = (trace,)
    else:
        timelines = iter_timelines(trace, detail="shapes", cache=open_default_cache())
    others: set[int] = set()
    found = False
    for timeline in timelines:
        for part in split_by_device(timeline):
            if rank is None or rank in part.ranks:
                found = True
                yield part
            else:
                others.update(part.ranks)
    if others and not found:
        fix = f"name one of {', '.join(map(str, sorted(others)))}"
        raise InputError([Problem("rank", f"there is no rank {rank}", fix)])


def _label(trace: Trace) -> str:
    return f"{trace.source.value} timeline" if isinstance(trace, Timeline) else str(trace)


def _whole(trace: Trace) -> Timeline:
    return trace if isinstance(trace, Timeline) else load_trace(trace)


def _by_device(trace: Trace) -> Timeline:
    """The whole of it, with a rank for each device."""
    whole = _whole(trace)
    parts = tuple(split_by_device(whole))
    return whole if len(parts) == len(whole.ranks) else Timeline.concat(parts)


def _columns(row: Any) -> dict[str, Any]:
    """Fields and derived figures of a row; what is itself a table stays one value."""
    if isinstance(row, RankRow):
        return {"rank": row.rank, **_columns(row.row)}
    if isinstance(row, msgspec.Struct):
        return {name: getattr(row, name) for name in row.__struct_fields__}
    kind = type(row)
    derived = [name for name, value in vars(kind).items() if isinstance(value, property)]
    return {**row._asdict(), **{name: getattr(row, name) for name in derived}}
