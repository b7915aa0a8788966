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

Knows files and threads; `trace_events` formats, `flows` pairs, `nesting` lays out.
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
from meshwright.timeline.columns import numbers
from meshwright.timeline.flows import Arrows, ends_of, pair
from meshwright.timeline.nesting import drawing_order
from meshwright.timeline.paths import check_parent, refusals
from meshwright.timeline.schema import COUNTERS, SCHEMA_VERSION
from meshwright.timeline.store import Progress, read_ranks
from meshwright.timeline.timeline import Timeline
from meshwright.timeline.trace_events import (
    counter_lines,
    lanes_of,
    name_lines,
    rank_events,
    span_lines,
)

_CHUNK_ROWS = 1 << 16
_SURVEYED = ("process", "lane", "start_ns", "duration_ns", "flow_out", "flow_in")


Put = Callable[[bytes | memoryview], object]


class _Survey(NamedTuple):
    """What must be known about all ranks before the first event is written."""

    base_ns: int
    """The earliest time, which becomes 0."""
    first_thread: int
    """Thread ids start here, above all process ids: an equal one would be a main thread."""
    arrows: dict[int, Arrows]
    """Flow ends per rank."""
    about: dict[str, str]
    """What the trace says about the run."""


def write_perfetto(
    timeline: Timeline | str | Path, path: str | Path, *, progress: Progress | None = None
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


NAMES = (".json", ".json.gz", ".perfetto")
"""How a file may end; all but the first are packed, which the Perfetto UI finds out by itself."""


@contextmanager
def _output(path: Path) -> Iterator[Put]:
    """What writes the file, which has its name only once it is complete."""
    check_parent(path)
    unfinished = path.with_name(path.name + ".partial")
    with refusals(path, "written"):
        if path.is_dir():
            what, fix = "is a folder", f"give a file in it, such as {path / 'trace.json.gz'}"
            raise InputError([Problem(str(path), what, fix)])
        if not path.name.endswith(NAMES):
            fix = f"use {path}.json.gz"
            what = "ends in none of .json, .json.gz and .perfetto"
            raise InputError([Problem(str(path), what, fix)])
        file: IO[bytes] = unfinished.open("wb")
    packed = gzip.GzipFile(path.stem, "wb", 3, file) if path.suffix != ".json" else None

    def put(data: bytes | memoryview) -> None:
        # Only here: what else fails meanwhile has nothing to do with this file.
        with refusals(path, "written"):
            (packed or file).write(data)

    try:
        yield put
        with refusals(path, "written"):
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
        parts = list(timeline.by_rank())
        return lambda _: iter(parts)
    return lambda columns: (
        part for file in read_ranks(timeline, columns=columns) for part in file.by_rank()
    )


def _until_damage(parts: Iterator[Timeline], damages: list[DamagedFile]) -> Iterator[Timeline]:
    """All parts; the damage that comes after the last one is put aside."""
    try:
        yield from parts
    except DamagedFile as damage:
        damages.append(damage)


def _survey(parts: Iterable[Timeline]) -> _Survey:
    earliest, last_rank, ends = [], 0, []
    about: dict[str, str] = {}
    for part in parts:
        (rank,) = part.ranks
        start = part.column("start_ns")
        times = numbers(part.counters, COUNTERS["time_ns"])
        earliest += [int(column.min()) for column in (start, times) if column.size]
        last_rank = max(last_rank, rank)
        about = {**part.metadata, "source": part.source.value}
        out, into = part.column("flow_out"), part.column("flow_in")
        if max(out.max(initial=-1), into.max(initial=-1)) >= 0:
            lane, _ = lanes_of(part)
            order = drawing_order(lane, start, part.column("duration_ns"))
            ends.append(ends_of(rank, order, start, out, into))
    return _Survey(min(earliest, default=0), last_rank + 1, pair(ends), about)


def _write_events(put: Put, parts: Iterable[Timeline], survey: _Survey, progress: Progress) -> None:
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


class _Job(NamedTuple):
    """Some formatting to be done."""

    spans: int
    """How many spans it formats."""
    lines: Callable[[], Any]


def _jobs(parts: Iterable[Timeline], survey: _Survey) -> Iterator[_Job]:
    """The formatting to be done, in the order of writing."""
    next_thread = survey.first_thread
    for part in parts:
        arrows = survey.arrows.get(part.ranks[0])
        events = rank_events(part, survey.base_ns, next_thread, arrows)
        next_thread += len(events.thread_ids)
        yield _Job(0, partial(name_lines, events))
        for begin in range(0, part.num_spans, _CHUNK_ROWS):
            spans = min(_CHUNK_ROWS, part.num_spans - begin)
            yield _Job(spans, partial(span_lines, events, slice(begin, begin + spans)))
        if part.counters.num_rows:
            yield _Job(0, partial(counter_lines, part, events, survey.base_ns))


def _in_order(jobs: Iterable[_Job]) -> Iterator[tuple[int, Any]]:
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
