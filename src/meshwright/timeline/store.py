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
from meshwright.spec.names import unknown_name
from meshwright.timeline.columns import complete
from meshwright.timeline.paths import make_folder, names_in, refusals, sync_folder
from meshwright.timeline.rankfile import Filter, file_schema, read_file, rows_in
from meshwright.timeline.schema import COUNTERS, SPANS, Column, Kind
from meshwright.timeline.segments import SegmentedFile, existing, partial
from meshwright.timeline.timeline import Timeline, Window

SEGMENT_ROWS = 1 << 20
_SPANS_NAME = re.compile(r"rank-(\d+)\.parquet(\.partial)?")
Progress = Callable[[int], None]
"""Is told how many spans were done since the last call."""


class RankFiles(NamedTuple):
    """Where the record of one rank lies."""

    rank: int
    spans: Path
    counters: Path


def files_of(folder: Path, rank: int) -> RankFiles:
    """The files of one rank, whether they exist or not."""
    return RankFiles(
        rank, folder / f"rank-{rank:05d}.parquet", folder / f"counters-{rank:05d}.parquet"
    )


def write(timeline: Timeline, folder: str | Path) -> None:
    """Write a timeline as one file per rank, replacing a timeline of the same ranks.

    The folder is made where there is none; the one above it must be there. All files are complete
    and on the disk before the first takes its name, so an error or an interrupt leaves either the
    old timeline or the new one. Only a kill, a power cut or a failing disk in the moment when the
    files take their names can leave some ranks old and some new. Unclosed files of the same ranks
    are replaced too, unless their writer still runs.
    """
    folder = Path(folder)
    ranks = set(timeline.ranks)
    if not timeline.known.issuperset(SPANS):
        missing = ", ".join(sorted(SPANS.keys() - timeline.known))
        raise InputError([Problem("timeline", f"was read without {missing}", "read all columns")])
    make_folder(folder)
    _refuse_to_mix(folder, ranks)
    finished: list[Path] = []
    try:
        for part, rank in zip(timeline.by_rank(), sorted(ranks), strict=True):
            files = files_of(folder, rank)
            _write_file(files.spans, part.spans, SPANS, timeline)
            finished.append(files.spans)
            if part.counters.num_rows:
                _write_file(files.counters, part.counters, COUNTERS, timeline)
                finished.append(files.counters)
    except BaseException:
        for path in finished:
            with suppress(OSError):
                partial(path).unlink()
        raise
    _publish(finished, {files_of(folder, rank).counters for rank in ranks} - set(finished))
    sync_folder(folder)


def read(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    ranks: Collection[int] | None = None,
    kinds: Collection[Kind | str] | None = None,
    window_ns: Window | None = None,
    progress: Progress | None = None,
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
    kinds: Collection[Kind | str] | None = None,
    window_ns: Window | None = None,
) -> Iterator[Timeline]:
    """Read one rank after another, so that memory holds one rank at a time.

    A `DamagedFile` comes after the last rank, when all that is readable was handed out.
    """
    wanted = frozenset(SPANS if columns is None else columns) | {"rank"}
    unknown = [name for name in sorted(wanted) if name not in SPANS]
    if unknown:
        raise InputError([unknown_name("column", name, SPANS, "columns") for name in unknown])
    faults: list[Problem] = []
    for files in _chosen(Path(path), ranks):
        spans = read_file(files.spans, SPANS, wanted, Filter(window_ns, kinds))
        counters = read_file(files.counters, COUNTERS, frozenset(COUNTERS), Filter(window_ns, None))
        faults += spans.faults + counters.faults
        about = spans.about or counters.about
        if about is not None:
            yield Timeline(
                spans=spans.table,
                counters=counters.table,
                source=about.source,
                metadata=about.metadata,
                known=wanted,
            )
    if faults:
        raise DamagedFile(faults)


def count_spans(path: str | Path) -> int:
    """How many spans a timeline folder or one rank's file has, by the footers alone.

    Damaged files count as far as they are whole.
    """
    return sum(rows_in(files.spans) for files in _chosen(Path(path), None))


def _write_file(
    path: Path, table: pa.Table, columns: Mapping[str, Column], timeline: Timeline
) -> None:
    """Write the rows under the name of an unfinished file, and finish it."""
    with refusals(path, "written"):
        if path.is_dir():
            fix = "move it away, or choose another folder"
            raise InputError([Problem(str(path), "is a folder", fix)])
    file = SegmentedFile(path, file_schema(columns, timeline.source, timeline.metadata))
    try:
        for begin in range(0, table.num_rows, SEGMENT_ROWS):
            file.append(complete(table.slice(begin, SEGMENT_ROWS), columns.values()))
        file.finish()
    except BaseException:
        with suppress(OSError):
            partial(path).unlink()
        raise
    finally:
        file.close()


def _publish(finished: Sequence[Path], stale: Iterable[Path]) -> None:
    """Give all finished files their names; an interrupt waits until the last one has its own."""

    def publish() -> None:
        for path in finished:
            with refusals(path, "written"):
                partial(path).replace(path)
        for path in stale:
            with refusals(path, "removed"):
                path.unlink(missing_ok=True)

    try:
        publish()
    except InputError:
        raise
    except BaseException:
        finished = [path for path in finished if partial(path).exists()]
        publish()
        raise


def _refuse_to_mix(folder: Path, ranks: set[int]) -> None:
    """A folder holds one timeline: leftover ranks of another would be read with it."""
    found = [_SPANS_NAME.fullmatch(name) for name in names_in(folder)]
    others = sorted({int(match[1]) for match in found if match} - ranks)
    if others:
        some = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        what = f"already holds a timeline with other ranks: {some}"
        raise InputError([Problem(str(folder), what, "choose another folder, or empty this one")])


def _chosen(path: Path, ranks: Collection[int] | None) -> list[RankFiles]:
    """The files to read, in the order of ranks."""
    expected = "a folder with files such as rank-00000.parquet, or one such file"
    with refusals(path, "read"):
        is_file = path.is_file()
        if not path.exists():
            raise InputError([Problem(str(path), "does not exist", f"give {expected}")])
    names = [path.name] if is_file else names_in(path)
    folder = path.parent if is_file else path
    found: dict[int, RankFiles] = {}
    for match in filter(None, map(_SPANS_NAME.fullmatch, names)):
        whole = folder / match[0].removesuffix(".partial")
        rank = int(match[1])
        counters = folder / whole.name.replace("rank-", "counters-")
        found[rank] = RankFiles(rank, existing(whole), existing(counters))
    if not found:
        raise InputError([Problem(str(path), "holds no timeline", f"give {expected}")])
    missing = sorted(set(ranks or ()) - found.keys())
    if missing:
        there = ", ".join(map(str, sorted(found)[:16])) + (", ..." if len(found) > 16 else "")
        what = f"has no rank {', '.join(map(str, missing))}"
        raise InputError([Problem(str(path), what, f"there are {there}")])
    return [found[rank] for rank in sorted(found) if ranks is None or rank in ranks]
