"""A timeline on disk: a folder of Parquet files, one per rank.

    timeline/rank-00000.parquet        spans of rank 0
    timeline/counters-00000.parquet    its counters, where there are any

DuckDB, Polars and pandas read them as they are. The footer of each says the schema version, the
source and the run's metadata. Knows files and columns; what a span means is not its business.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors, fsync_folder, list_folder, make_folder
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.timeline.columns import add_missing_columns
from meshwright.timeline.schema import (
    COUNTER_COLUMNS_BY_NAME,
    SPAN_COLUMNS_BY_NAME,
    Column,
    SpanKind,
)
from meshwright.timeline.store.rank_file import SpanFilter, count_rows, file_schema, read_rank_file
from meshwright.timeline.store.segmented_file import SegmentedFile, find_existing_path, partial_path
from meshwright.timeline.timeline import Timeline, Window

SEGMENT_ROWS = 1 << 20
_SPANS_NAME = re.compile(r"rank-(\d+)\.parquet(\.partial)?")
ProgressCallback = Callable[[int], None]
"""Is told how many spans were done since the last call."""


class RankFiles(NamedTuple):
    """Where the record of one rank lies."""

    rank: int
    spans: Path
    counters: Path


def locate_rank_files(folder: Path, rank: int) -> RankFiles:
    """The files of one rank, whether they exist or not."""
    return RankFiles(
        rank, folder / f"rank-{rank:05d}.parquet", folder / f"counters-{rank:05d}.parquet"
    )


def write_timeline(timeline: Timeline, folder: str | Path) -> None:
    """Write a timeline as one file per rank, replacing a timeline of the same ranks.

    The folder is made where there is none; the one above it must be there. All files are complete
    and on the disk before the first takes its name, so an error or an interrupt leaves either the
    old timeline or the new one. Only a kill, a power cut or a failing disk in the moment when the
    files take their names can leave some ranks old and some new. Unclosed files of the same ranks
    are replaced too, unless their writer still runs.
    """
    folder = Path(folder)
    ranks = set(timeline.ranks)
    if not timeline.known_columns.issuperset(SPAN_COLUMNS_BY_NAME):
        missing = ", ".join(sorted(SPAN_COLUMNS_BY_NAME.keys() - timeline.known_columns))
        raise InputError([Problem("timeline", f"was read without {missing}", "read all columns")])
    make_folder(folder)
    _refuse_to_mix(folder, ranks)
    finished: list[Path] = []
    try:
        for part, rank in zip(timeline.split_by_rank(), sorted(ranks), strict=True):
            files = locate_rank_files(folder, rank)
            _write_file(files.spans, part.spans, SPAN_COLUMNS_BY_NAME, timeline)
            finished.append(files.spans)
            if part.counters.num_rows:
                _write_file(files.counters, part.counters, COUNTER_COLUMNS_BY_NAME, timeline)
                finished.append(files.counters)
    except BaseException:
        for path in finished:
            with suppress(OSError):
                partial_path(path).unlink()
        raise
    _publish(finished, {locate_rank_files(folder, rank).counters for rank in ranks} - set(finished))
    fsync_folder(folder)


def read_timeline(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    ranks: Collection[int] | None = None,
    kinds: Collection[SpanKind | str] | None = None,
    window_ns: Window | None = None,
    progress: ProgressCallback | None = None,
) -> Timeline:
    """Read a timeline folder, or one rank's file; all columns unless fewer are named.

    Raises `DamagedFile` where a file is cut short or corrupt; its `kept` is the `Timeline` of
    everything that could be read. `progress` is told after each rank how many of its spans were
    read; `count_spans` says how many there are in all.
    """
    parts: list[Timeline] = []
    one_by_one = read_ranks(path, columns=columns, ranks=ranks, kinds=kinds, window_ns=window_ns)
    try:
        for part in one_by_one:
            parts.append(part)
            if progress is not None:
                progress(part.num_spans)
    except DamagedFile as damage:
        raise DamagedFile(damage.problems, kept=Timeline.concat(parts)) from None
    return Timeline.concat(parts)


def read_ranks(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    ranks: Collection[int] | None = None,
    kinds: Collection[SpanKind | str] | None = None,
    window_ns: Window | None = None,
) -> Iterator[Timeline]:
    """Read one rank after another, so that memory holds one rank at a time.

    A `DamagedFile` comes after the last rank, when all that is readable was handed out.
    """
    wanted = frozenset(SPAN_COLUMNS_BY_NAME if columns is None else columns) | {"rank"}
    unknown = [name for name in sorted(wanted) if name not in SPAN_COLUMNS_BY_NAME]
    if unknown:
        raise InputError(
            [
                build_unknown_name_problem("column", name, SPAN_COLUMNS_BY_NAME, "columns")
                for name in unknown
            ]
        )
    faults: list[Problem] = []
    for files in _chosen(Path(path), ranks):
        spans = read_rank_file(
            files.spans, SPAN_COLUMNS_BY_NAME, wanted, SpanFilter(window_ns, kinds)
        )
        counters = read_rank_file(
            files.counters,
            COUNTER_COLUMNS_BY_NAME,
            frozenset(COUNTER_COLUMNS_BY_NAME),
            SpanFilter(window_ns, None),
        )
        faults += spans.problems + counters.problems
        about = spans.metadata or counters.metadata
        if about is not None:
            yield Timeline(
                spans=spans.table,
                counters=counters.table,
                source=about.source,
                metadata=about.metadata,
                known_columns=wanted,
            )
    if faults:
        raise DamagedFile(faults)


def count_spans(path: str | Path) -> int:
    """How many spans a timeline folder or one rank's file has, by the footers alone.

    Damaged files count as far as they are whole.
    """
    return sum(count_rows(files.spans) for files in _chosen(Path(path), None))


def _write_file(
    path: Path, table: pa.Table, columns: Mapping[str, Column], timeline: Timeline
) -> None:
    """Write the rows under the name of an unfinished file, and finish it."""
    with convert_os_errors(path, "write"):
        if path.is_dir():
            fix = "move it away, or choose another folder"
            raise InputError([Problem(str(path), "is a folder", fix)])
    file = SegmentedFile(path, file_schema(columns, timeline.source, timeline.metadata))
    try:
        for begin in range(0, table.num_rows, SEGMENT_ROWS):
            file.append(add_missing_columns(table.slice(begin, SEGMENT_ROWS), columns.values()))
        file.finish()
    except BaseException:
        with suppress(OSError):
            partial_path(path).unlink()
        raise
    finally:
        file.close()


def _publish(finished: Sequence[Path], stale: Iterable[Path]) -> None:
    """Give all finished files their names; an interrupt waits until the last one has its own."""

    def publish() -> None:
        for path in finished:
            with convert_os_errors(path, "write"):
                partial_path(path).replace(path)
        for path in stale:
            with convert_os_errors(path, "remove"):
                path.unlink(missing_ok=True)

    try:
        publish()
    except InputError:
        raise
    except BaseException:
        finished = [path for path in finished if partial_path(path).exists()]
        publish()
        raise


def _refuse_to_mix(folder: Path, ranks: set[int]) -> None:
    """A folder holds one timeline: leftover ranks of another would be read with it."""
    found = [_SPANS_NAME.fullmatch(name) for name in list_folder(folder)]
    others = sorted({int(match[1]) for match in found if match} - ranks)
    if others:
        some = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        what = f"already holds a timeline with other ranks: {some}"
        raise InputError([Problem(str(folder), what, "choose another folder, or empty this one")])


def _chosen(path: Path, ranks: Collection[int] | None) -> list[RankFiles]:
    """The files to read, in the order of ranks."""
    expected = "a folder with files such as rank-00000.parquet, or one such file"
    with convert_os_errors(path, "read"):
        is_file = path.is_file()
        if not path.exists():
            raise InputError([Problem(str(path), "does not exist", f"give {expected}")])
    names = [path.name] if is_file else list_folder(path)
    folder = path.parent if is_file else path
    found: dict[int, RankFiles] = {}
    for match in filter(None, map(_SPANS_NAME.fullmatch, names)):
        whole = folder / match[0].removesuffix(".partial")
        rank = int(match[1])
        counters = folder / whole.name.replace("rank-", "counters-")
        found[rank] = RankFiles(rank, find_existing_path(whole), find_existing_path(counters))
    if not found:
        raise InputError([Problem(str(path), "holds no timeline", f"give {expected}")])
    missing = sorted(set(ranks or ()) - found.keys())
    if missing:
        there = ", ".join(map(str, sorted(found)[:16])) + (", ..." if len(found) > 16 else "")
        what = f"has no rank {', '.join(map(str, missing))}"
        raise InputError([Problem(str(path), what, f"there are {there}")])
    return [found[rank] for rank in sorted(found) if ranks is None or rank in ranks]
