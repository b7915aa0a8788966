"""A trace with what was found in it: findings and the critical path as spans on lanes of their own.

The Perfetto UI opens the file; the lanes stand under a process `meshwright` of each rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.clocks import Clocks, align, clocks_of
from meshwright.observe.analyze.collectives import match_collectives
from meshwright.observe.analyze.critical_path import Segment, critical_path
from meshwright.observe.analyze.selection import of_steps
from meshwright.observe.analyze.spans import device_spans
from meshwright.observe.analyze.steps import steps_of
from meshwright.timeline import write_perfetto
from meshwright.timeline.readers.cache import Cache
from meshwright.timeline.readers.traces import read_trace
from meshwright.timeline.schema import Kind
from meshwright.timeline.timeline import Timeline, Window

if TYPE_CHECKING:
    from meshwright.observe.finding import Finding
    from meshwright.observe.runs import Wanted

MOST_SPANS = 20_000_000
"""A written trace of more would open in no browser, and is held in memory meanwhile."""
MOST_SEGMENTS = 200_000
PROCESS = "meshwright"


def write_annotated(
    path: Path,
    out: str | Path,
    findings: Sequence["Finding"],
    wanted: "Wanted",
    *,
    cache: Cache | None = None,
    capture: int | None = None,
) -> None:
    """Write the trace of a file or folder with its findings and its critical path."""
    try:
        timeline = read_trace(path, detail="shapes", cache=cache, capture=capture)
    except DamagedFile as damage:
        if not isinstance(damage.kept, Timeline):
            raise
        timeline = damage.kept
    if wanted.ranks:
        timeline = timeline.select(ranks=wanted.ranks)
    if wanted.steps:
        parts = [of_steps(part, wanted.steps) for part in timeline.by_rank()]
        timeline = Timeline.concat(parts)
    if timeline.num_spans > MOST_SPANS:
        what = f"has {timeline.num_spans:,} spans, more than a browser opens"
        raise InputError([Problem(str(path), what, "name some ranks or steps: --rank 0 --steps 5")])
    clocks = clocks_of(match_collectives(timeline))
    moved = [_moved(one, clocks) for one in findings]
    write_perfetto(annotated(align(timeline, clocks), moved), out)


def annotated(timeline: Timeline, findings: Sequence["Finding"]) -> Timeline:
    """Return the timeline with a lane of findings and one of the critical path on each rank."""
    rows = [_finding_row(one, *span) for one in findings for span in one.spans]
    rows = [row for row in rows if row["rank"] in set(timeline.ranks)]
    rows += [_segment_row(segment) for segment in _path(timeline)[:MOST_SEGMENTS]]
    if not rows:
        return timeline
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    marks = Timeline.from_columns(columns, source=timeline.source, metadata=timeline.metadata)
    marks = msgspec.structs.replace(marks, known=timeline.known)
    return Timeline.concat([timeline, marks])


def _moved(one: "Finding", clocks: Clocks) -> "Finding":
    """The finding with its places on the clock of all ranks."""
    spans = []
    for rank, start, end in one.spans:
        ahead = int(clocks.offset_at(rank, np.array(start)))
        spans.append((rank, start - ahead, end - ahead))
    return msgspec.structs.replace(one, spans=tuple(spans))


def _path(timeline: Timeline) -> tuple[Segment, ...]:
    """The critical path over all ranks of all steps, or of everything where none is marked."""
    working = [part for part in timeline.by_rank() if device_spans(part).row.size]
    if not working:
        return ()
    marks = [step for part in working for step in steps_of(part).steps]
    window = None
    if marks:
        window = (min(step.start_ns for step in marks), max(step.end_ns for step in marks))
    return critical_path(Timeline.concat(working), window_ns=window).segments


def _finding_row(one: "Finding", rank: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    about = {
        "name": one.name,
        "evidence": one.evidence,
        "remedy": one.remedy,
        "cost_ms_per_step": one.cost_ms_per_step,
    }
    return _row(rank, "findings", (start_ns, end_ns), one.title, about)


def _segment_row(segment: Segment) -> dict[str, Any]:
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
        "process": PROCESS,
        "lane": lane,
        "start_ns": start_ns,
        "duration_ns": max(end_ns - start_ns, 0),
        "kind": Kind.HOST.value,
        "name": name,
        "extra": msgspec.json.encode(about).decode(),
    }
