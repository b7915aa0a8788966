"""A timeline on disk: a folder of Parquet files, one per rank.

    timeline/rank-00000.parquet        spans of rank 0
    timeline/counters-00000.parquet    its counters, where there are any

DuckDB, Polars and pandas read them as they are. The footer of each says the schema version, the
source and the run's metadata. Knows files and columns; what a span means is not its business.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.spec.names import unknown_name
from meshwright.timeline.columns import complete
from meshwright.timeline.rankfile import Filter, file_schema, read_file
from meshwright.timeline.schema import COUNTERS, SPANS, Column, Kind
from meshwright.timeline.segments import SegmentedFile, complete_file, is_whole, partial
from meshwright.timeline.timeline import Timeline, Window

SEGMENT_ROWS = 1 << 20
_SPANS_NAME = re.compile(r"rank-(\d+)\.parquet(\.partial)?")
_ANY_NAME = re.compile(r"(rank|counters)-(\d+)\.parquet(\.partial)?")


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

    No file has its name before all are complete, so a crash leaves what was there before.
    """
    folder = Path(folder)
    ranks = set(timeline.ranks)
    if not timeline.known.issuperset(SPANS):
        missing = ", ".join(sorted(SPANS.keys() - timeline.known))
        raise InputError([Problem("timeline", f"was read without {missing}", "read all columns")])
    _refuse_to_mix(folder, ranks)
    folder.mkdir(parents=True, exist_ok=True)
    finished: list[SegmentedFile] = []
    try:
        for part, rank in zip(timeline.by_rank(), sorted(ranks), strict=True):
            files = files_of(folder, rank)
            finished.append(_write_file(files.spans, part.spans, SPANS, timeline))
            if part.counters.num_rows:
                finished.append(_write_file(files.counters, part.counters, COUNTERS, timeline))
    except BaseException:
        for file in finished:
            partial(file.path).unlink(missing_ok=True)
        raise
    for file in finished:
        file.publish()
    for rank in ranks:
        counters = files_of(folder, rank).counters
        if counters not in {file.path for file in finished}:
            counters.unlink(missing_ok=True)


def read(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    ranks: Collection[int] | None = None,
    kinds: Collection[Kind | str] | None = None,
    window_ns: Window | None = None,
) -> Timeline:
    """Read a timeline folder, or one rank's file; all columns unless fewer are named.

    Raises `DamagedFile` where a file is cut short or corrupt; its `kept` is the `Timeline` of
    everything that could be read.
    """
    parts: list[Timeline] = []
    one_by_one = read_ranks(path, columns=columns, ranks=ranks, kinds=kinds, window_ns=window_ns)
    try:
        for part in one_by_one:
            parts.append(part)  # noqa: PERF402 - what came before a damage is kept
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


def repair(folder: str | Path) -> list[str]:
    """Close the files that a killed writer left open or that were cut short, as far as whole.

    Returns one line for each file that was mended; what cannot be mended is left as it is. Refuses
    a file whose writer still runs.
    """
    mended = []
    for name in sorted({_final(path) for path in Path(folder).iterdir() if _matches(path)}):
        path = Path(folder) / name
        if path.exists() and is_whole(path):
            continue
        rows = complete_file(path)
        if rows is not None:
            mended.append(f"{path}: closed with {rows:,} rows")
    return mended


def _matches(path: Path) -> bool:
    return _ANY_NAME.fullmatch(path.name) is not None


def _final(path: Path) -> str:
    return path.name.removesuffix(".partial")


def _write_file(
    path: Path, table: pa.Table, columns: Mapping[str, Column], timeline: Timeline
) -> SegmentedFile:
    """Write the rows under the name of an unfinished file, and finish it."""
    file = SegmentedFile(path, file_schema(columns, timeline.source, timeline.metadata))
    try:
        for begin in range(0, table.num_rows, SEGMENT_ROWS):
            file.append(complete(table.slice(begin, SEGMENT_ROWS), columns.values()))
        file.finish()
    except BaseException:
        file.abandon()
        partial(path).unlink(missing_ok=True)
        raise
    return file


def _refuse_to_mix(folder: Path, ranks: set[int]) -> None:
    """A folder holds one timeline: leftover ranks of another would be read with it."""
    if not folder.is_dir():
        return
    found = [_SPANS_NAME.fullmatch(path.name) for path in folder.iterdir()]
    others = sorted({int(match[1]) for match in found if match} - ranks)
    if others:
        some = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        what = f"already holds a timeline with other ranks: {some}"
        raise InputError([Problem(str(folder), what, "choose another folder, or empty this one")])


def _chosen(path: Path, ranks: Collection[int] | None) -> list[RankFiles]:
    """The files to read, in the order of ranks."""
    expected = "a folder with files such as rank-00000.parquet, or one such file"
    if not path.exists():
        raise InputError([Problem(str(path), "does not exist", f"give {expected}")])
    names = [path.name] if path.is_file() else sorted(item.name for item in path.iterdir())
    folder = path.parent if path.is_file() else path
    found: dict[int, RankFiles] = {}
    for match in filter(None, map(_SPANS_NAME.fullmatch, names)):
        whole = folder / match[0].removesuffix(".partial")
        rank = int(match[1])
        counters = folder / whole.name.replace("rank-", "counters-")
        # A closed file wins over an unfinished one that was to replace it.
        found[rank] = RankFiles(rank, _existing(whole), _existing(counters))
    if not found:
        raise InputError([Problem(str(path), "holds no timeline", f"give {expected}")])
    missing = sorted(set(ranks or ()) - found.keys())
    if missing:
        there = ", ".join(map(str, sorted(found)[:16])) + (", ..." if len(found) > 16 else "")
        what = f"has no rank {', '.join(map(str, missing))}"
        raise InputError([Problem(str(path), what, f"there are {there}")])
    return [found[rank] for rank in sorted(found) if ranks is None or rank in ranks]


def _existing(path: Path) -> Path:
    return partial(path) if not path.exists() and partial(path).exists() else path
