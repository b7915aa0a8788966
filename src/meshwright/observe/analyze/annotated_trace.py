"""A trace with what was found in it: findings and the critical path as spans on lanes of their own.

The Perfetto UI opens the file; the lanes stand under a process `meshwright` of each rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.collectives.clock_alignment import (
    ClockAlignment,
    align_timeline,
    estimate_clocks,
)
from meshwright.observe.analyze.collectives.matched_collectives import match_collectives
from meshwright.observe.analyze.critical_path import PathSegment, find_critical_path
from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.row_selection import select_steps
from meshwright.observe.analyze.spans.steps import find_rank_steps
from meshwright.timeline import write_perfetto
from meshwright.timeline.readers.trace_cache import TraceCache
from meshwright.timeline.readers.trace_folder import read_trace
from meshwright.timeline.schema import SpanKind
from meshwright.timeline.timeline import Timeline, Window

if TYPE_CHECKING:
    from meshwright.observe.finding import Finding
    from meshwright.observe.overview import TraceSelection

MAX_SPANS = 20_000_000
"""A written trace of more would open in no browser, and is held in memory meanwhile."""
MAX_PATH_SEGMENTS = 200_000
ANNOTATION_PROCESS = "meshwright"


def write_annotated_trace(
    path: Path,
    out: str | Path,
    findings: Sequence["Finding"],
    wanted: "TraceSelection",
    *,
    cache: TraceCache | None = None,
    capture: int | None = None,
) -> None:
    """Write the trace of a file or folder with its findings and its critical path."""
    try:
        timeline = read_trace(path, detail="shapes", cache=cache, capture=capture)
    except DamagedFile as damage:
        if not isinstance(damage.readable, Timeline):
            raise
        timeline = damage.readable
    if wanted.ranks:
        timeline = timeline.select(ranks=wanted.ranks)
    if wanted.steps:
        parts = [select_steps(part, wanted.steps) for part in timeline.split_by_rank()]
        timeline = Timeline.concat(parts)
    if timeline.num_spans > MAX_SPANS:
        what = f"has {timeline.num_spans:,} spans, more than a browser opens"
        raise InputError(
            [Problem(str(path), what, "name some ranks or steps: --ranks 0 --steps 5")]
        )
    clocks = estimate_clocks(match_collectives(timeline))
    moved = [_moved(one, clocks) for one in findings]
    write_perfetto(annotate_timeline(align_timeline(timeline, clocks), moved), out)


def annotate_timeline(timeline: Timeline, findings: Sequence["Finding"]) -> Timeline:
    """Return the timeline with a lane of findings and one of the critical path on each rank."""
    rows = [_finding_row(one, *span) for one in findings for span in one.spans]
    rows = [row for row in rows if row["rank"] in set(timeline.ranks)]
    rows += [_segment_row(segment) for segment in _path(timeline)[:MAX_PATH_SEGMENTS]]
    if not rows:
        return timeline
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    marks = Timeline.from_columns(columns, source=timeline.source, metadata=timeline.metadata)
    marks = msgspec.structs.replace(marks, known_columns=timeline.known_columns)
    return Timeline.concat([timeline, marks])


def _moved(one: "Finding", clocks: ClockAlignment) -> "Finding":
    """The finding with its places on the clock of all ranks."""
    spans = []
    for rank, start, end in one.spans:
        ahead = int(clocks.offset_at(rank, np.array(start)))
        spans.append((rank, start - ahead, end - ahead))
    return msgspec.structs.replace(one, spans=tuple(spans))


def _path(timeline: Timeline) -> tuple[PathSegment, ...]:
    """The critical path over all ranks of all steps, or of everything where none is marked."""
    working = [part for part in timeline.split_by_rank() if find_device_spans(part).row.size]
    if not working:
        return ()
    marks = [step for part in working for step in find_rank_steps(part).steps]
    window = None
    if marks:
        window = (min(step.start_ns for step in marks), max(step.end_ns for step in marks))
    return find_critical_path(Timeline.concat(working), window_ns=window).segments


def _finding_row(one: "Finding", rank: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    about = {
        "name": one.name,
        "evidence": one.evidence,
        "remedy": one.remedy,
        "cost_ms_per_step": one.cost_ms_per_step,
    }
    return _row(rank, "findings", (start_ns, end_ns), one.title, about)


def _segment_row(segment: PathSegment) -> dict[str, Any]:
    about = {"cause": segment.cause, "of": segment.name}
    text = segment.cause if not segment.name else f"{segment.cause}: {segment.name}"
    window = (segment.start_ns, segment.end_ns)
    return _row(segment.rank, "critical path", window, text[:200], about)


def _row(
    rank: int, lane: str, window_ns: Window, name: str, about: dict[str, Any]
) -> dict[str, Any]:
    start_ns, end_ns = window_ns
    return {
        "rank": rank,
        "process": ANNOTATION_PROCESS,
        "lane": lane,
        "start_ns": start_ns,
        "duration_ns": max(end_ns - start_ns, 0),
        "kind": SpanKind.HOST.value,
        "name": name,
        "extra": msgspec.json.encode(about).decode(),
    }
