"""Records the spans and counters of one rank while they happen.

Spans are kept as plain values and flushed to the file in segments, so memory stays bounded and a
killed process loses only what came after the last flush. Closing brings all to the disk. Knows no
clock: times come from the caller.
"""

import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors, fsync_folder, make_folder
from meshwright.timeline.columns import add_missing_columns, build_table
from meshwright.timeline.schema import (
    COUNTER_COLUMNS_BY_NAME,
    SPAN_COLUMNS_BY_NAME,
    Column,
    ColumnType,
    SpanKind,
    TimelineSource,
)
from meshwright.timeline.store.rank_file import file_schema, merge_metadata
from meshwright.timeline.store.segmented_file import SegmentedFile, find_existing_path
from meshwright.timeline.store.timeline_folder import SEGMENT_ROWS, locate_rank_files

# What a span says besides its times and flows. It repeats a lot, so each combination is checked
# and kept once.
_LABEL = (
    "name", "kind", "lane", "process", "bytes", "collective", "group", "dtype", "stage",
    "microbatch", "layer", "extra",
)  # fmt: skip
_TIMES = ("start_ns", "duration_ns", "flow_out", "flow_in")
_COUNT = ("time_ns", "value", "name", "unit")
_LIMIT = 2**63 - 1
_LARGEST = {ColumnType.INT32: 2**31 - 1, ColumnType.INT64: _LIMIT}
_KINDS = frozenset(SpanKind)
_MOST_LABELS = 1 << 16

_Label = tuple[Any, ...]


class TimelineWriter:
    """Appends the spans of one rank to its file, live; use it in a `with` block.

    The folder is made where there is none; the one above it must be there. A file that is already
    there is continued, so a resumed run adds to its record; its metadata may be added to, but not
    changed. Spans and counters may come from several threads. Example:

        with TimelineWriter("run/timeline", rank=3) as timeline:
            timeline.span("forward", start_ns, duration_ns, lane="stream 7", microbatch=0)
            timeline.counter("memory allocated", time_ns, 21e9, unit="bytes")
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        source: TimelineSource | str = TimelineSource.MEASURED,
        metadata: Mapping[str, str] | None = None,
        segment_spans: int = 1 << 17,
    ) -> None:
        """Open the rank's file; up to `segment_spans` are held in memory, and lost by a kill."""
        if rank < 0 or segment_spans < 1 or source not in set(TimelineSource):
            what = f"rank {rank}, segments of {segment_spans} spans, source {source!r}"
            fix = f"a rank from 0, segments from 1, source one of {', '.join(TimelineSource)}"
            raise InputError([Problem("writer", what, fix)])
        # Arrow loads pandas with the first array, where there is one: a second that a process which
        # has to end may not have.
        pa.array([rank])
        make_folder(Path(folder))
        self.rank = rank
        self._files = locate_rank_files(Path(folder), rank)
        self._source, self._metadata = TimelineSource(source), metadata or {}
        for path in (self._files.spans, self._files.counters):
            if _is_there(path):
                self._metadata = merge_metadata(
                    find_existing_path(path), self._source, self._metadata
                )
        self._row_limit = 5 * segment_spans
        self._lock = threading.RLock()
        self._closed = False
        self._rows: list[Any] = []
        self._labels: dict[_Label, _Label] = {}
        self._counts: list[tuple[int, float, str, str]] = []
        self._span_file = self._open(self._files.spans, SPAN_COLUMNS_BY_NAME)
        self._counter_file: SegmentedFile | None = None
        try:
            if _is_there(self._files.counters):
                self._counter_file = self._open(self._files.counters, COUNTER_COLUMNS_BY_NAME)
        except BaseException:
            self._span_file.close()
            raise

    def span(
        self,
        name: str,
        start_ns: int,
        duration_ns: int,
        *,
        kind: SpanKind | str = SpanKind.COMPUTE,
        lane: str = "main",
        process: str = "main",
        flow_out: int | None = None,
        flow_in: int | None = None,
        bytes: int | None = None,  # noqa: A002 - the column's name
        collective: str | None = None,
        group: str | None = None,
        dtype: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        layer: int | None = None,
        extra: str | None = None,
    ) -> None:
        """Record one span; `SPAN_COLUMNS` says what each column means."""
        # Runs once per kernel of a live run, so no lock and no numpy: 0.55 µs, or 0.9 µs with its
        # share of a flush, on 2 cores of an AMD EPYC virtual machine.
        given = (
            name, kind, lane, process, bytes, collective, group, dtype, stage, microbatch, layer,
            extra,
        )  # fmt: skip
        label = self._labels.get(given) or self._admit(given)
        if (
            start_ns.__class__ is not int
            or duration_ns.__class__ is not int
            or duration_ns < 0
            or not -_LIMIT <= start_ns <= _LIMIT - duration_ns
        ):
            start_ns, duration_ns = _exact_times(start_ns, duration_ns)
        if flow_out is not None or flow_in is not None:
            flow_out, flow_in = _flow("flow_out", flow_out), _flow("flow_in", flow_in)
        # One call that other threads cannot interrupt: five values a span, one after another.
        self._rows.extend((start_ns, duration_ns, flow_out, flow_in, label))
        if len(self._rows) >= self._row_limit:
            self.flush()

    def counter(self, name: str, time_ns: int, value: float, *, unit: str = "") -> None:
        """Record that a counter has this value from this time on."""
        if (
            time_ns.__class__ is int
            and -_LIMIT <= time_ns <= _LIMIT
            and name.__class__ is unit.__class__ is str
            and value.__class__ in {int, float}
            and math.isfinite(value)
        ):
            self._counts.append((time_ns, float(value), name, unit))
        else:
            self._counts.append(_exact_count(time_ns, value, name, unit))
        if 5 * len(self._counts) >= self._row_limit:
            self.flush()

    def extend(self, spans: Mapping[str, object]) -> None:
        """Add many spans at once, as columns; the rank may be left out."""
        table = build_table({"rank": self.rank, **spans}, SPAN_COLUMNS_BY_NAME, "spans")
        others = set(table.column("rank").unique().to_pylist()) - {self.rank}
        if others:
            what = f"has rank {min(others)} in the file of rank {self.rank}"
            raise InputError([Problem("spans.rank", what, "open one writer for each rank")])
        with self._lock:
            self.flush()
            for begin in range(0, table.num_rows, SEGMENT_ROWS):
                self._append(
                    self._span_file, table.slice(begin, SEGMENT_ROWS), SPAN_COLUMNS_BY_NAME
                )

    def flush(self) -> None:
        """Hand what was recorded to the system, where the death of this process cannot reach it.

        A power cut still can, until the writer is closed. What cannot be written is dropped with
        an `InputError`, so that memory stays bounded.
        """
        with self._lock:
            if self._closed:
                raise _was_closed(self._files.spans)
            self._write_out(self._rows, self._counts)

    def _write_out(self, rows: list[Any], counts: list[Any]) -> None:
        """Take the rows out of the lists and append them to the files."""
        # Other threads may append meanwhile: they only touch the end of the lists.
        taken = rows[:]
        del rows[: len(taken)]
        counted = counts[:]
        del counts[: len(counted)]
        if len(self._labels) > _MOST_LABELS:
            self._labels = {}
        if taken:
            self._append(self._span_file, self._span_table(taken), SPAN_COLUMNS_BY_NAME)
        if counted:
            if self._counter_file is None:
                self._counter_file = self._open(self._files.counters, COUNTER_COLUMNS_BY_NAME)
            self._append(self._counter_file, self._counter_table(counted), COUNTER_COLUMNS_BY_NAME)

    def close(self) -> None:
        """Flush, complete the files, bring them to the disk and give them their names.

        Closing twice does nothing; recording after it is refused. Where closing fails, what was
        flushed before stays in the unclosed file, which `repair` closes.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            rows, counts = self._rows, self._counts
            # Before the last flush, so that a span which comes after it is refused, not lost.
            self._rows = self._counts = _ClosedBuffer(self._files.spans)
            try:
                self._write_out(rows, counts)
                for file in self._open_files():
                    file.finish()
                for file in self._open_files():
                    file.publish()
                fsync_folder(self._files.spans.parent)
            finally:
                for file in self._open_files():
                    file.close()

    def _open_files(self) -> Iterable[SegmentedFile]:
        return filter(None, (self._span_file, self._counter_file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A run that fails is the one whose record is wanted most.
        self.close()

    def _open(self, path: Path, columns: Mapping[str, Column]) -> SegmentedFile:
        return SegmentedFile.resume(path, file_schema(columns, self._source, self._metadata))

    def _append(self, file: SegmentedFile, table: pa.Table, columns: Mapping[str, Column]) -> None:
        file.append(add_missing_columns(table, columns.values()))

    def _admit(self, given: _Label) -> _Label:
        """Check a combination that was not seen before; returns it as it is kept."""
        label = tuple(
            value
            if _is_fine(SPAN_COLUMNS_BY_NAME[name], value)
            else _one_value(SPAN_COLUMNS_BY_NAME[name], value)
            for name, value in zip(_LABEL, given, strict=True)
        )
        self._labels[given] = label
        return label

    def _span_table(self, rows: list[Any]) -> pa.Table:
        labels = rows[4::5]
        ids = np.fromiter(map(id, labels), dtype=np.int64, count=len(labels))
        coded = pa.array(ids).dictionary_encode()
        by_id = {id(label): label for label in labels}
        distinct = zip(*(by_id[key] for key in coded.dictionary.to_pylist()), strict=True)
        columns: dict[str, Any] = {"rank": self.rank}
        for number, name in enumerate(_TIMES):
            values: Any = rows[number::5]
            if name in {"start_ns", "duration_ns"}:
                columns[name] = np.array(values, dtype=np.int64)
            elif values.count(None) < len(values):
                columns[name] = pa.array(values, pa.int64())
        for name, said in zip(_LABEL, distinct, strict=True):
            if SPAN_COLUMNS_BY_NAME[name].type is ColumnType.LABEL:
                columns[name] = pa.array(said, pa.string()).dictionary_encode().take(coded.indices)
            elif said.count(None) < len(said):
                columns[name] = pa.array(said).take(coded.indices)
        return build_table(columns, SPAN_COLUMNS_BY_NAME, "spans")

    def _counter_table(self, counts: list[tuple[int, float, str, str]]) -> pa.Table:
        columns = dict(zip(_COUNT, zip(*counts, strict=True), strict=True))
        return build_table({"rank": self.rank, **columns}, COUNTER_COLUMNS_BY_NAME, "counters")


class _ClosedBuffer(list[Any]):
    """Stands for the rows of a closed writer and takes none, so that `span` needs no check."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, _: Any, /) -> None:
        raise _was_closed(self._path)

    def extend(self, _: Iterable[Any], /) -> None:
        raise _was_closed(self._path)


def _was_closed(path: Path) -> InputError:
    fix = "record before close(), or open a new TimelineWriter, which continues the file"
    return InputError([Problem(str(path), "was closed already", fix)])


def _is_there(path: Path) -> bool:
    with convert_os_errors(path, "read"):
        return find_existing_path(path).exists()


def _is_fine(column: Column, value: object) -> bool:
    """Whether a value can be stored as it is; a quick yes for nearly all of them."""
    if type(value) is int:
        return not column.is_string and 0 <= value <= _LARGEST[column.type]
    if isinstance(value, str):
        if column.name == "kind":
            return value in _KINDS
        # Text that is no UTF-8 and JSON that is none get their error from the slow check.
        return column.is_string and value.isascii() and column.name != "extra"
    return value is None and column.nullable


def _one_value(column: Column, value: object) -> str | int | None:
    """A value as it is stored; raises `InputError` where it is not allowed."""
    table = build_table({column.name: [value]}, {column.name: column}, "span")
    kept: str | int | None = table.column(0)[0].as_py()
    return kept


def _exact_count(*row: object) -> tuple[int, float, str, str]:
    """A counter's row with plain values; raises `InputError` for what is none."""
    given = {name: [value] for name, value in zip(_COUNT, row, strict=True)}
    columns = {name: COUNTER_COLUMNS_BY_NAME[name] for name in _COUNT}
    time_ns, value, name, unit = build_table(given, columns, "counter").to_pylist()[0].values()
    return time_ns, value, name, unit


def _exact_times(start_ns: object, duration_ns: object) -> tuple[int, int]:
    """Times as plain integers; raises `InputError` for what is none."""
    given = {"start_ns": [start_ns], "duration_ns": [duration_ns]}
    row = build_table(
        given, {name: SPAN_COLUMNS_BY_NAME[name] for name in given}, "span"
    ).to_pylist()[0]
    return row["start_ns"], row["duration_ns"]


def _flow(name: str, value: int | None) -> int | None:
    """A flow id as a plain integer; raises `InputError` for what is none."""
    if value is None or (value.__class__ is int and 0 <= value <= _LIMIT):
        return value
    kept = _one_value(SPAN_COLUMNS_BY_NAME[name], value)
    return None if kept is None else int(kept)
