"""Finds traces and reads them, whatever tool wrote them: a file, or a folder with one per rank.

What a file is, its first bytes say, not its name; `trace_formats` knows the formats.

    find_traces(path)                          what there is, and of which format
    read_trace(path)                           all ranks as one timeline
    iter_timelines(path, num_workers=4)        one rank after another, in bounded memory
    map_traces(function, path, num_workers=4)  the same, where only a function's answers come back
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.timeline.readers.capture_choice import choose_captures
from meshwright.timeline.readers.parallel_map import map_in_order
from meshwright.timeline.readers.parsing.arrow_arrays import to_number_array
from meshwright.timeline.readers.parsing.event_categories import TraceDetail
from meshwright.timeline.readers.parsing.inferred_rank import INFERRED_RANK_NOTE_PREFIX
from meshwright.timeline.readers.trace_cache import TraceCache, read_through_cache
from meshwright.timeline.readers.trace_formats import FORMATS, detect_format
from meshwright.timeline.timeline import Timeline

Result = TypeVar("Result")


_TRACE = re.compile(r"\.(?:json|json\.gz|sqlite|parquet)$")
_PROFILES = frozenset({"kineto", "nsight"})
"""Formats whose readers take a rank and a detail, and whose timelines are worth keeping."""


class TraceFile(NamedTuple):
    """A file of a known format."""

    path: Path
    format: str
    file_index: int
    """Its place among the files of its format, by name: the rank where nothing else says one."""
    note: str = ""
    """Which capture of its rank it is, where there are several."""


class ReadOptions(NamedTuple):
    """How traces are read."""

    detail: TraceDetail = TraceDetail.STANDARD
    cache: TraceCache | None = None


def find_traces(path: str | Path) -> tuple[TraceFile, ...]:
    """What there is to read: the file itself, or all files of a known format below a folder.

    Names that differ in their numbers are in the order of those. A folder of our own Parquet
    files is one entry.
    """
    path = Path(path)
    with convert_os_errors(path, "read"):
        if not path.exists():
            fix = "give a trace, or a folder with one per rank"
            raise InputError([Problem(str(path), "does not exist", fix)])
        files = sorted(_below(path), key=_by_numbers) if path.is_dir() else [path]
    found: dict[str, list[Path]] = {}
    for file in files:
        format_ = detect_format(file)
        if format_ is not None:
            whole = file if format_.name != "timeline" or file == path else file.parent
            places = found.setdefault(format_.name, [])
            if whole not in places:
                places.append(whole)
    if not found:
        known = "; ".join(
            dict.fromkeys(format_.description for format_ in FORMATS if format_.reader)
        )
        raise InputError([Problem(str(path), _unknown(path, files), f"give one of: {known}")])
    return tuple(
        TraceFile(file, name, place)
        for name, places in found.items()
        for place, file in enumerate(places)
    )


def _unknown(path: Path, files: Sequence[Path]) -> str:
    """What is there instead of traces."""
    if path.is_dir():
        others = f", only others such as {files[0].name}" if files else ": it is empty"
        return f"holds no file of a known format{others}"
    return "is of no known format" if path.stat().st_size else "is empty"


def find_empty_traces(path: str | Path) -> tuple[str, ...]:
    """Files of a folder that have a trace's name and nothing in it, in words: a rank may lack."""
    path = Path(path)
    if not path.is_dir():
        return ()
    files = [file for file in sorted(_below(path), key=_by_numbers) if _TRACE.search(file.name)]
    return tuple(f"{file}: is empty, and left out" for file in files if not file.stat().st_size)


def choose_traces(path: str | Path, capture: int | None = None) -> tuple[TraceFile, ...]:
    """What is read of a path: the timelines among its files, one capture of each rank.

    Of several captures that is the one of this number, from 1; the last that all ranks have where
    none is given.
    """
    found = find_traces(path)
    files = [file for file in found if _reader(file.format)]
    # Traces of Chakra mostly have no times: beside others they are not what is meant.
    files = [file for file in files if file.format != "chakra"] or files
    if not files:
        names = {file.format for file in found}
        what = f"holds no timeline, only: {', '.join(sorted(names))}"
        raise InputError([Problem(str(path), what, _instead(names))])
    profiles = [file.path for file in files if file.format == "kineto"]
    others = [file for file in files if file.format != "kineto"]
    chosen = [
        TraceFile(one.path, "kineto", place, one.note)
        for place, one in enumerate(choose_captures(profiles, capture))
    ]
    return (*chosen, *others)


class FolderReadOptions(NamedTuple):
    """How traces are read, and where."""

    num_workers: int = 1
    """In so many processes."""
    use_ray: bool = False
    """As tasks of a Ray cluster instead."""
    detail: TraceDetail | str = TraceDetail.STANDARD
    cache: TraceCache | None = None
    capture: int | None = None
    """Which of several captures of a rank; None takes the last that all ranks have."""


def read_trace(
    path: str | Path,
    *,
    detail: TraceDetail | str = TraceDetail.STANDARD,
    cache: TraceCache | None = None,
    capture: int | None = None,
) -> Timeline:
    """Read a trace, or all ranks of a folder, as one timeline.

    Raises `DamagedFile` where a file breaks off; its `kept` is the `Timeline` of all that could be
    read.
    """
    parts: list[Timeline] = []
    try:
        parts.extend(iter_timelines(path, detail=detail, cache=cache, capture=capture))
    except DamagedFile as damage:
        raise DamagedFile(damage.problems, kept=Timeline.concat(parts)) from None
    return Timeline.concat(parts)


def iter_timelines(
    path: str | Path,
    *,
    num_workers: int = 1,
    detail: TraceDetail | str = TraceDetail.STANDARD,
    cache: TraceCache | None = None,
    capture: int | None = None,
) -> Iterator[Timeline]:
    """Read one file's timeline after another, in `num_workers` processes where there are several.

    A `DamagedFile` comes after the last one, when all that is readable was handed out. Two files
    of the same rank are two captures where their first bytes say so, of which one is read; else
    the second is refused, unless one of them only guessed its rank.
    """
    taken: dict[int, Path] = {}
    files = choose_traces(path, capture)
    reading = FolderReadOptions(num_workers=num_workers, detail=detail, cache=cache)
    for file, timeline in _each(_whole, files, reading):
        yield _unlike(timeline, file, taken)


def map_traces(
    function: Callable[[Timeline], Result],
    path: str | Path,
    *,
    num_workers: int = 1,
    detail: TraceDetail | str = TraceDetail.STANDARD,
    cache: TraceCache | None = None,
) -> Iterator[Result]:
    """What a function says of each file's timeline.

    With several workers it runs in their processes: it has to be one that these can import. Ranks
    that are guessed by a file's place stay as they are.
    """
    return map_trace_files(
        function, choose_traces(path), FolderReadOptions(num_workers, detail=detail, cache=cache)
    )


def map_trace_files(
    function: Callable[[Timeline], Result], files: Sequence[TraceFile], reading: FolderReadOptions
) -> Iterator[Result]:
    """The same for files that were chosen already."""
    return (answer for _, answer in _each(function, files, reading))


def _whole(timeline: Timeline) -> Timeline:
    return timeline


def _each(
    function: Callable[[Timeline], Result], files: Sequence[TraceFile], reading: FolderReadOptions
) -> Iterator[tuple[TraceFile, Result]]:
    damaged: list[Problem] = []
    asked = partial(_answer, function, ReadOptions(TraceDetail(reading.detail), reading.cache))
    if reading.use_ray:  # Tasks run in folders of their own.
        files = [file._replace(path=file.path.resolve()) for file in files]
    answers = map_in_order(asked, files, num_workers=reading.num_workers, use_ray=reading.use_ray)
    for file, (answer, problems) in answers:
        damaged += problems
        yield file, answer
    if damaged:
        raise DamagedFile(damaged)


def _answer(
    function: Callable[[Timeline], Result], options: ReadOptions, file: TraceFile
) -> tuple[Result, tuple[Problem, ...]]:
    try:
        return function(_noted(_read(file, options), file.note)), ()
    except DamagedFile as damage:
        if not isinstance(damage.readable, Timeline):
            raise
        return function(_noted(damage.readable, file.note)), damage.problems


def _noted(timeline: Timeline, note: str) -> Timeline:
    """The timeline with a line more among its notes."""
    if not note:
        return timeline
    notes = "\n".join(line for line in (timeline.metadata.get("notes", ""), note) if line)
    return msgspec.structs.replace(timeline, metadata={**timeline.metadata, "notes": notes})


def _read(file: TraceFile, options: ReadOptions) -> Timeline:
    reader = _reader(file.format)
    if file.format not in _PROFILES:
        return _load(reader)(file.path)
    return read_through_cache(
        options.cache,
        file.path,
        f"{file.format} {options.detail} {file.file_index}",
        lambda: _load(reader)(file.path, rank=file.file_index, detail=options.detail),
    )


def _reader(name: str) -> str:
    return next((f.reader for f in FORMATS if f.name == name and f.reader), "")


def _instead(names: set[str]) -> str:
    known = [f.alternative for f in FORMATS if f.name in names and f.alternative]
    general = "give a trace of PyTorch's profiler, of Nsight Systems, or a timeline"
    return "; ".join(dict.fromkeys(known)) or general


def _load(reader: str) -> Callable[..., Timeline]:
    module, _, name = reader.partition(":")
    found: Callable[..., Timeline] = getattr(import_module(module), name)
    return found


def _unlike(timeline: Timeline, file: TraceFile, taken: dict[int, Path]) -> Timeline:
    """The timeline, unless another file is of its rank; guessed ranks move to the next free."""
    ranks = timeline.ranks
    clash = next((rank for rank in ranks if rank in taken), None)
    if clash is not None:
        if INFERRED_RANK_NOTE_PREFIX not in timeline.metadata.get("notes", ""):
            what = f"is of rank {clash}, as {taken[clash]} is"
            fix = "read one of them alone, or compare the two with mw diff"
            raise InputError([Problem(str(file.path), what, fix)])
        free = 0
        while any(rank - ranks[0] + free in taken for rank in ranks):
            free += 1
        timeline = _from_rank(timeline, free)
    taken.update(dict.fromkeys(timeline.ranks, file.path))
    return timeline


def _from_rank(timeline: Timeline, first: int) -> Timeline:
    """The timeline with its ranks moved so that they begin with this one."""
    offset = first - timeline.ranks[0]

    def changed(table: Any) -> Any:
        column = to_number_array((table.column("rank").to_numpy() + offset).astype(np.int32))
        at = table.column_names.index("rank")
        return table.set_column(at, table.schema.field("rank"), column)

    notes = f"{INFERRED_RANK_NOTE_PREFIX}; rank {first}, the first that is free, assumed"
    return msgspec.structs.replace(
        timeline,
        spans=changed(timeline.spans),
        counters=changed(timeline.counters),
        metadata={**timeline.metadata, "notes": notes},
    )


def _below(folder: Path) -> Iterator[Path]:
    """All files below a folder, each once: links (`latest`) are followed last, and never round."""
    seen: set[tuple[int, int]] = set()
    ahead, links = [folder], deque[Path]()
    while ahead or links:
        item = ahead.pop() if ahead else links.popleft()
        state = item.stat() if item.exists() else None
        if state is None or (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        if item.is_file():
            yield item
        elif item.is_dir():
            for inner in item.iterdir():
                if not inner.name.startswith("."):
                    (links if inner.is_symlink() else ahead).append(inner)


def _by_numbers(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]
