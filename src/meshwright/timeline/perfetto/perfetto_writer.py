"""Writes a timeline for the Perfetto UI: ranks as processes, lanes as threads, flows as arrows.

The format is Chrome's JSON trace events, which Perfetto, chrome://tracing and others open. What
Perfetto's importer makes of them (google/perfetto, `importers/json` and `importers/common`)
decides the details:

- Times are microseconds and become doubles, so they count from the first event, which keeps
  every nanosecond for 100 days; `baseTimeNanoseconds` holds what was taken off.
- Spans of a thread must nest; what overlaps goes to a further thread of the same lane.
- A flow event belongs to the innermost span that starts at its time on its thread, and the start
  of a flow must come before its end.
- `displayTimeUnit` is left out, because versions differ in what they make of it.

Knows files and threads; `trace_events` formats, `flow_arrows` pairs, `track_rows` lays out.
"""

import gzip
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors, make_parent_folder
from meshwright.timeline.columns import to_numpy
from meshwright.timeline.perfetto.flow_arrows import FlowArrows, find_flow_ends, pair_flows
from meshwright.timeline.perfetto.trace_events import (
    build_rank_events,
    format_counter_events,
    format_metadata_events,
    format_span_events,
    number_lanes,
)
from meshwright.timeline.perfetto.track_rows import sort_for_drawing
from meshwright.timeline.schema import COUNTER_COLUMNS_BY_NAME, SCHEMA_VERSION
from meshwright.timeline.store.timeline_folder import ProgressCallback, read_ranks
from meshwright.timeline.timeline import Timeline

_CHUNK_ROWS = 1 << 16
_SURVEYED = ("process", "lane", "start_ns", "duration_ns", "flow_out", "flow_in")


WriteCallback = Callable[[bytes | memoryview], object]


class _TraceLayout(NamedTuple):
    """What must be known about all ranks before the first event is written."""

    base_ns: int
    """The earliest time, which becomes 0."""
    first_thread: int
    """Thread ids start here, above all process ids: an equal one would be a main thread."""
    arrows: dict[int, FlowArrows]
    """Flow ends per rank."""
    about: dict[str, str]
    """What the trace says about the run."""


def write_perfetto(
    timeline: Timeline | str | Path, path: str | Path, *, progress: ProgressCallback | None = None
) -> None:
    """Write a timeline, or a folder of one, as JSON that the Perfetto UI opens.

    A folder is read rank by rank, so memory holds one rank at a time. A path that ends in `.gz` is
    compressed. Where the folder is damaged, what could be read is written before `DamagedFile` is
    raised. The folder of the file must be there. `progress` is told how many spans were written
    since the last call; they add up to `count_spans` of a folder.
    """
    path = Path(path)
    by_rank = _ranks(timeline)
    damages: list[DamagedFile] = []
    with _output(path) as put:
        survey = _survey(_until_damage(by_rank(_SURVEYED), []))
        parts = _until_damage(by_rank(None), damages)
        _write_events(put, parts, survey, progress or (lambda _: None))
    if damages:
        raise DamagedFile(damages[0].problems, kept=path)


PERFETTO_SUFFIXES = (".json", ".json.gz", ".perfetto")
"""How a file may end; all but the first are packed, which the Perfetto UI finds out by itself."""


@contextmanager
def _output(path: Path) -> Iterator[WriteCallback]:
    """What writes the file, which has its name only once it is complete."""
    make_parent_folder(path)
    unfinished = path.with_name(path.name + ".partial")
    with convert_os_errors(path, "write"):
        if path.is_dir():
            what, fix = "is a folder", f"give a file in it, such as {path / 'trace.json.gz'}"
            raise InputError([Problem(str(path), what, fix)])
        if not path.name.endswith(PERFETTO_SUFFIXES):
            fix = f"use {path}.json.gz"
            what = "ends in none of .json, .json.gz and .perfetto"
            raise InputError([Problem(str(path), what, fix)])
        file: IO[bytes] = unfinished.open("wb")
    packed = gzip.GzipFile(path.stem, "wb", 3, file) if path.suffix != ".json" else None

    def put(data: bytes | memoryview) -> None:
        # Only here: what else fails meanwhile has nothing to do with this file.
        with convert_os_errors(path, "write"):
            (packed or file).write(data)

    try:
        yield put
        with convert_os_errors(path, "write"):
            if packed is not None:
                packed.close()
            file.close()
            unfinished.replace(path)
    except BaseException:
        with suppress(OSError, ValueError):
            if packed is not None:
                packed.close()
        with suppress(OSError):
            file.close()
        unfinished.unlink(missing_ok=True)
        raise


def _ranks(
    timeline: Timeline | str | Path,
) -> Callable[[tuple[str, ...] | None], Iterator[Timeline]]:
    """Something that hands out the ranks, as often as asked."""
    if isinstance(timeline, Timeline):
        parts = list(timeline.split_by_rank())
        return lambda _: iter(parts)
    return lambda columns: (
        part for file in read_ranks(timeline, columns=columns) for part in file.split_by_rank()
    )


def _until_damage(parts: Iterator[Timeline], damages: list[DamagedFile]) -> Iterator[Timeline]:
    """All parts; the damage that comes after the last one is put aside."""
    try:
        yield from parts
    except DamagedFile as damage:
        damages.append(damage)


def _survey(parts: Iterable[Timeline]) -> _TraceLayout:
    earliest, last_rank, ends = [], 0, []
    about: dict[str, str] = {}
    for part in parts:
        (rank,) = part.ranks
        start = part.column("start_ns")
        times = to_numpy(part.counters, COUNTER_COLUMNS_BY_NAME["time_ns"])
        earliest += [int(column.min()) for column in (start, times) if column.size]
        last_rank = max(last_rank, rank)
        about = {**part.metadata, "source": part.source.value}
        out, into = part.column("flow_out"), part.column("flow_in")
        if max(out.max(initial=-1), into.max(initial=-1)) >= 0:
            lane, _ = number_lanes(part)
            order = sort_for_drawing(lane, start, part.column("duration_ns"))
            ends.append(find_flow_ends(rank, order, start, out, into))
    return _TraceLayout(min(earliest, default=0), last_rank + 1, pair_flows(ends), about)


def _write_events(
    put: WriteCallback, parts: Iterable[Timeline], survey: _TraceLayout, progress: ProgressCallback
) -> None:
    """Write the whole file; two threads format while this one writes."""
    # First of all who wrote it: the reader looks into the first bytes.
    about = {"writer": "meshwright", "schema_version": SCHEMA_VERSION}
    about = {**about, **survey.about, **about}
    head = {"metadata": about, "baseTimeNanoseconds": survey.base_ns}
    put(msgspec.json.encode(head)[:-1] + b',"traceEvents":[')
    is_first = True
    for spans, lines in _in_order(_jobs(parts, survey)):
        if len(lines):
            # Every event opens with a comma, which the very first must not have.
            put(_text(lines)[is_first:])
            is_first = False
        if spans:
            progress(spans)
    put(b"\n]}\n")


class _FormatJob(NamedTuple):
    """Some formatting to be done."""

    spans: int
    """How many spans it formats."""
    lines: Callable[[], Any]


def _jobs(parts: Iterable[Timeline], survey: _TraceLayout) -> Iterator[_FormatJob]:
    """The formatting to be done, in the order of writing."""
    next_thread = survey.first_thread
    for part in parts:
        arrows = survey.arrows.get(part.ranks[0])
        events = build_rank_events(part, survey.base_ns, next_thread, arrows)
        next_thread += len(events.thread_ids)
        yield _FormatJob(0, partial(format_metadata_events, events))
        for begin in range(0, part.num_spans, _CHUNK_ROWS):
            spans = min(_CHUNK_ROWS, part.num_spans - begin)
            yield _FormatJob(
                spans, partial(format_span_events, events, slice(begin, begin + spans))
            )
        if part.counters.num_rows:
            yield _FormatJob(0, partial(format_counter_events, part, events, survey.base_ns))


def _in_order(jobs: Iterable[_FormatJob]) -> Iterator[tuple[int, Any]]:
    """The spans and lines of the jobs in their order, with a few in work at a time."""
    with ThreadPoolExecutor(2) as pool:
        waiting: deque[tuple[int, Future[Any]]] = deque()
        for job in jobs:
            waiting.append((job.spans, pool.submit(job.lines)))
            if len(waiting) > 4:
                spans, lines = waiting.popleft()
                yield spans, lines.result()
        for spans, lines in waiting:
            yield spans, lines.result()


def _text(lines: Any) -> memoryview:
    """The bytes of an Arrow string array, all rows together, without a copy."""
    if hasattr(lines, "combine_chunks"):
        lines = lines.combine_chunks()
    offsets = np.frombuffer(lines.buffers()[1], dtype=np.int32)
    begin, end = offsets[lines.offset], offsets[lines.offset + len(lines)]
    return memoryview(lines.buffers()[2])[begin:end]
