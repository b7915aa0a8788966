"""The analyses for notebooks: give a path or a `Timeline`, get rows that turn into a data frame.

    from meshwright import observe
    observe.breakdown("traces/").frame()
    observe.kernels("traces/", rank=0).frame().head()

Rows are plain tuples of named values; `frame()` needs pandas, nothing else does. A path is read
rank by rank, so a folder of many ranks needs the memory of one.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.analyze.breakdown import RankBreakdown, breakdown_of
from meshwright.observe.analyze.collectives import SizeRow, by_size, match_collectives
from meshwright.observe.analyze.critical_path import CriticalPath
from meshwright.observe.analyze.critical_path import critical_path as _critical_path
from meshwright.observe.analyze.diff import Diff
from meshwright.observe.analyze.diff import diff as _diff
from meshwright.observe.analyze.idle import RankIdle, idle_of
from meshwright.observe.analyze.kernels import Kernel, kernels_of
from meshwright.observe.analyze.launches import RankLaunches, launches_of
from meshwright.observe.analyze.mfu import RankMfu, mfu_of
from meshwright.observe.analyze.overlap import RankOverlap, overlap_of
from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.profile import profile
from meshwright.observe.analyze.roofline import RoofKernel
from meshwright.observe.analyze.roofline import roofline as _roofline
from meshwright.observe.analyze.steps import Step, steps_of
from meshwright.observe.analyze.stragglers import Stragglers
from meshwright.observe.analyze.stragglers import stragglers as _stragglers
from meshwright.observe.finding import Finding
from meshwright.observe.findings import find as _find
from meshwright.timeline.readers.cache import user_cache
from meshwright.timeline.readers.traces import read_each, read_trace
from meshwright.timeline.timeline import Timeline

Trace = str | Path | Timeline
"""A file, a folder with one file per rank, or what was read already."""
_T_co = TypeVar("_T_co", covariant=True)
_Row = TypeVar("_Row")


class OfRank(NamedTuple, Generic[_Row]):
    """A row and whose it is."""

    rank: int
    row: _Row


class Rows(tuple[_T_co, ...]):
    """Rows of named values, with a way to a data frame."""

    __slots__ = ()

    def frame(self) -> Any:
        """The rows as a pandas data frame, one column per field and per derived figure."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise MissingPart("pandas is not installed", "pip install pandas") from None
        return pd.DataFrame([_columns(row) for row in self])


def read(path: str | Path, *, detail: str = "shapes") -> Timeline:
    """Read a trace, or all ranks of a folder, once for several analyses."""
    return read_trace(path, detail=detail, cache=user_cache())


def breakdown(trace: Trace, *, rank: int | None = None) -> Rows[RankBreakdown]:
    """Where the time of every rank's device goes."""
    return _each(breakdown_of, trace, rank)


def overlap(trace: Trace, *, rank: int | None = None) -> Rows[RankOverlap]:
    """How much of every rank's communication is hidden behind compute."""
    return _each(overlap_of, trace, rank)


def idle(trace: Trace, *, rank: int | None = None) -> Rows[RankIdle]:
    """Why every rank's device is idle."""
    return _each(idle_of, trace, rank)


def launches(trace: Trace, *, rank: int | None = None) -> Rows[RankLaunches]:
    """How every rank's host feeds its device."""
    return _each(launches_of, trace, rank)


def mfu(trace: Trace, *, rank: int | None = None) -> Rows[RankMfu]:
    """How much of its device's peak every rank uses."""
    return _each(mfu_of, trace, rank)


def steps(trace: Trace, *, rank: int | None = None) -> Rows[OfRank[Step]]:
    """Every step of every rank; each row has its rank."""
    marked = _each(steps_of, trace, rank)
    return Rows(OfRank(one.rank, step) for one in marked for step in one.steps)


def kernels(trace: Trace, *, rank: int | None = None) -> Rows[OfRank[Kernel]]:
    """Every kernel of every rank, longest first; each row has its rank."""
    tables = _each(kernels_of, trace, rank)
    return Rows(OfRank(one.rank, kernel) for one in tables for kernel in one.kernels)


def roofline(trace: Trace, *, rank: int | None = None) -> Rows[RoofKernel]:
    """Kernels against the device's roofline, those that lose most first."""
    found = _roofline(_parts(trace, rank))
    return Rows(found.kernels if found is not None else ())


def collectives(trace: Trace) -> Rows[SizeRow]:
    """Collectives matched across ranks, by group, kind and size."""
    return Rows(by_size(match_collectives(_by_device(trace))))


def stragglers(trace: Trace) -> Stragglers:
    """Which rank the others wait for, how much and why."""
    return _stragglers(_by_device(trace))


def critical_path(
    trace: Trace, *, step: int | None = None, rank: int | None = None
) -> CriticalPath:
    """What a step, or everything, waited for."""
    return _critical_path(_whole(trace), step=step, rank=rank)


def diff(a: Trace, b: Trace) -> Diff:
    """What changed between two runs, per step."""
    return _diff(*(profile(_parts(trace, None), _label(trace)) for trace in (a, b)))


def find(trace: Trace) -> Rows[Finding]:
    """Every inefficiency of a run, costliest first."""
    return Rows(_find(_parts(trace, None)))


def _each(function: Callable[[Timeline], _T_co], trace: Trace, rank: int | None) -> Rows[_T_co]:
    return Rows(function(part) for part in _parts(trace, rank))


def _parts(trace: Trace, rank: int | None) -> Iterator[Timeline]:
    timelines: Iterable[Timeline]
    if isinstance(trace, Timeline):
        timelines = (trace,)
    else:
        timelines = read_each(trace, detail="shapes", cache=user_cache())
    others: set[int] = set()
    found = False
    for timeline in timelines:
        for part in per_device(timeline):
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
    return trace if isinstance(trace, Timeline) else read(trace)


def _by_device(trace: Trace) -> Timeline:
    """The whole of it, with a rank for each device."""
    whole = _whole(trace)
    parts = tuple(per_device(whole))
    return whole if len(parts) == len(whole.ranks) else Timeline.concat(parts)


def _columns(row: Any) -> dict[str, Any]:
    """Fields and derived figures of a row; what is itself a table stays one value."""
    if isinstance(row, OfRank):
        return {"rank": row.rank, **_columns(row.row)}
    if isinstance(row, msgspec.Struct):
        return {name: getattr(row, name) for name in row.__struct_fields__}
    kind = type(row)
    derived = [name for name, value in vars(kind).items() if isinstance(value, property)]
    return {**row._asdict(), **{name: getattr(row, name) for name in derived}}
