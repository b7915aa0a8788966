"""`mw analyze --compat hta`: the figures that Holistic Trace Analysis 0.5 prints, by its rules."""

from typing import Any

import numpy as np

from meshwright.cli.result import CommandResult, NoteView, View, make_table
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.device_time.kernel_names import shorten_name
from meshwright.observe.analyze.hta.hta_critical_path import find_hta_critical_path
from meshwright.observe.analyze.hta.hta_report import HtaReport, build_hta_report
from meshwright.timeline.readers.trace_cache import TraceCache
from meshwright.timeline.readers.trace_folder import read_trace
from meshwright.timeline.timeline import Timeline

STEP_ANNOTATION, ANNOTATION_INSTANCE = "ProfilerStep", 1
"""What HTA's critical path is asked for: the second step of a profile, the first warms up."""
_SHOWN = 8


def run_hta_compat(
    path: str,
    ranks: frozenset[int],
    *,
    annotation: str | None = None,
    cache: TraceCache | None = None,
    capture: int | None = None,
) -> CommandResult:
    """Answer with HTA's figures; they need all arguments, so whole traces are held in memory."""
    notes: list[NoteView] = []
    try:
        timeline = read_trace(path, detail="full", cache=cache, capture=capture)
    except DamagedFile as damage:
        if not isinstance(damage.readable, Timeline):
            raise
        timeline = damage.readable
        notes = [NoteView(str(problem)) for problem in damage.problems]
    if ranks:
        known = ", ".join(map(str, timeline.ranks))
        timeline = timeline.select(ranks=ranks)
        if not timeline.num_spans:
            raise InputError([Problem(path, "has none of these ranks", f"name some of {known}")])
    found = build_hta_report(timeline)
    views = (
        _temporal(found),
        _idle(found),
        _kernel_types(found),
        _kernels(found),
        NoteView(
            "some of HTA's rules are wrong on today's traces: without --compat the figures differ"
        ),
        *notes,
    )
    quiet = tuple(
        f"{row.rank}\t{row.idle_us}\t{row.compute_us}\t{row.non_compute_us}\t{row.kernel_us}"
        for row in found.temporal_breakdown
    )
    data = {
        **_data(found),
        "critical_path": {
            "annotation": annotation or STEP_ANNOTATION,
            "instance": ANNOTATION_INSTANCE,
            "ranks": _paths(timeline, annotation or STEP_ANNOTATION, ANNOTATION_INSTANCE),
        },
    }
    return CommandResult("analyze.hta/2", data, views, quiet, 1 if notes else 0)


def _temporal(found: HtaReport) -> View:
    rows = []
    for row in found.temporal_breakdown:
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
    return make_table(columns, rows, "temporal breakdown and overlap", right=columns)


def _idle(found: HtaReport) -> View:
    longest = sorted(found.idle_breakdown, key=lambda row: -row.idle_us)[:_SHOWN]
    rows = [(row.rank, row.stream, row.idle_category, row.idle_us, row.ratio) for row in longest]
    title = f"idle time by stream (the longest of {len(found.idle_breakdown)}; all with --json)"
    return make_table(
        "rank, stream, category, idle µs, ratio", rows, title, right="rank, stream, idle µs, ratio"
    )


def _kernel_types(found: HtaReport) -> View:
    rows = [(row.kernel_type, row.sum_us, row.percent) for row in found.kernel_types]
    return make_table("kernel type, µs, %", rows, "kernel types, all ranks", right="µs, %")


def _kernels(found: HtaReport) -> View:
    longest = sorted(found.kernel_breakdown, key=lambda row: -row.sum_us)[:_SHOWN]
    rows = [
        (row.rank, shorten_name(row.name, 56), row.kernel_type, row.sum_us, f"{row.mean_us:.1f}")
        for row in longest
    ]
    title = f"kernels (the longest of {len(found.kernel_breakdown)}; all with --json)"
    return make_table(
        "rank, kernel, type, sum µs, mean µs", rows, title, right="rank, sum µs, mean µs"
    )


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
    for part in timeline.split_by_rank():
        try:
            path = find_hta_critical_path(part, annotation=annotation, instance=instance)
        except InputError:
            continue
        found[str(part.ranks[0])] = path._asdict()
    return found


def _data(found: HtaReport) -> dict[str, Any]:
    rows = {
        name: [_plain(row) for row in getattr(found, name)]
        for name in HtaReport._fields
        if name != "overlap_percent"
    }
    return {**rows, "overlap_percent": {str(k): v for k, v in found.overlap_percent.items()}}
