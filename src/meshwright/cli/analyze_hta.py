"""`mw analyze --compat hta`: the figures that Holistic Trace Analysis 0.5 prints, by its rules."""

from typing import Any

import numpy as np

from meshwright.cli.answer import Answer, Note, View, table
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.hta.critical_path import critical_path
from meshwright.observe.analyze.hta.figures import Figures, figures
from meshwright.observe.analyze.kernel_names import short_name
from meshwright.timeline.readers.cache import Cache
from meshwright.timeline.readers.traces import read_trace
from meshwright.timeline.timeline import Timeline

ANNOTATION, INSTANCE = "ProfilerStep", 1
"""What HTA's critical path is asked for: the second step of a profile, the first warms up."""
_SHOWN = 8


def hta(
    path: str,
    ranks: frozenset[int],
    *,
    annotation: str | None = None,
    cache: Cache | None = None,
    capture: int | None = None,
) -> Answer:
    """Answer with HTA's figures; they need all arguments, so whole traces are held in memory."""
    notes: list[Note] = []
    try:
        timeline = read_trace(path, detail="full", cache=cache, capture=capture)
    except DamagedFile as damage:
        if not isinstance(damage.kept, Timeline):
            raise
        timeline = damage.kept
        notes = [Note(str(problem)) for problem in damage.problems]
    if ranks:
        known = ", ".join(map(str, timeline.ranks))
        timeline = timeline.select(ranks=ranks)
        if not timeline.num_spans:
            raise InputError([Problem(path, "has none of these ranks", f"name some of {known}")])
    found = figures(timeline)
    views = (
        _temporal(found),
        _idle(found),
        _kernel_types(found),
        _kernels(found),
        Note(
            "some of HTA's rules are wrong on today's traces: without --compat the figures differ"
        ),
        *notes,
    )
    quiet = tuple(
        f"{row.rank}\t{row.idle_us}\t{row.compute_us}\t{row.non_compute_us}\t{row.kernel_us}"
        for row in found.temporal
    )
    data = {
        **_data(found),
        "critical_path": {
            "annotation": annotation or ANNOTATION,
            "instance": INSTANCE,
            "ranks": _paths(timeline, annotation or ANNOTATION, INSTANCE),
        },
    }
    return Answer("analyze.hta/1", data, views, quiet, 1 if notes else 0)


def _temporal(found: Figures) -> View:
    rows = []
    for row in found.temporal:
        parts = (row.idle_us, row.compute_us, row.non_compute_us)
        overlap = found.overlap_percent.get(row.rank)
        rows.append(
            (
                row.rank,
                *parts,
                row.kernel_us,
                *(_percent(row.percent(part)) for part in parts),
                _percent(overlap),
            )
        )
    columns = (
        "rank, idle µs, compute µs, non-compute µs, kernel µs,"
        " idle %, compute %, non-compute %, overlap %"
    )
    return table(columns, rows, "temporal breakdown and overlap", right=columns)


def _idle(found: Figures) -> View:
    longest = sorted(found.idle, key=lambda row: -row.idle_us)[:_SHOWN]
    rows = [(row.rank, row.stream, row.idle_category, row.idle_us, row.ratio) for row in longest]
    title = f"idle time by stream (the longest of {len(found.idle)}; all with --json)"
    return table(
        "rank, stream, category, idle µs, ratio", rows, title, right="rank, stream, idle µs, ratio"
    )


def _kernel_types(found: Figures) -> View:
    rows = [(row.kernel_type, row.sum_us, row.percent) for row in found.kernel_types]
    return table("kernel type, µs, %", rows, "kernel types, all ranks", right="µs, %")


def _kernels(found: Figures) -> View:
    longest = sorted(found.kernels, key=lambda row: -row.sum_us)[:_SHOWN]
    rows = [
        (row.rank, short_name(row.name, 56), row.kernel_type, row.sum_us, f"{row.mean_us:.1f}")
        for row in longest
    ]
    title = f"kernels (the longest of {len(found.kernels)}; all with --json)"
    return table("rank, kernel, type, sum µs, mean µs", rows, title, right="rank, sum µs, mean µs")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _plain(row: Any) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in row._asdict().items()
    }


def _paths(timeline: Timeline, annotation: str, instance: int) -> dict[str, Any]:
    """HTA's critical path of one annotation on every rank that has it."""
    found: dict[str, Any] = {}
    for part in timeline.by_rank():
        try:
            path = critical_path(part, annotation=annotation, instance=instance)
        except InputError:
            continue
        found[str(part.ranks[0])] = path._asdict()
    return found


def _data(found: Figures) -> dict[str, Any]:
    rows = {
        name: [_plain(row) for row in getattr(found, name)]
        for name in Figures._fields
        if name != "overlap_percent"
    }
    return {**rows, "overlap_percent": {str(k): v for k, v in found.overlap_percent.items()}}
