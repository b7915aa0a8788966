"""Gathers the rows of an Nsight export as columns, table by table and piece by piece.

Each distinct place (process and stream, or thread) gets a number once, names stay the ids that the
tables have. What the numbers mean for a timeline is `nsys_spans`' business.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.timeline.readers.nsys.name_table import NO_NAME, NsysNameTable, parse_emit_nvtx
from meshwright.timeline.readers.nsys.nsys_database import (
    EVENT,
    GRAPH,
    KERNEL,
    MEMCPY,
    MEMSET,
    RUNTIME,
    SQLITE_ERRORS,
    SYNC,
    NsysDatabase,
)
from meshwright.timeline.readers.nsys.nvtx_payloads import NcclNvtxRange, parse_nvtx_blob
from meshwright.timeline.readers.nsys.row_groups import (
    MEMCPY_KINDS,
    MEMORY_KINDS,
    NO_STREAM,
    NVTX_MARK,
    NVTX_PUSH_POP,
    NVTX_START_END,
    NVTX_TEXT_PUSH_POP,
    NVTX_TEXT_START_END,
    SYNC_KINDS,
    NsysRowGroup,
)
from meshwright.timeline.readers.parsing.event_categories import TraceDetail
from meshwright.timeline.readers.parsing.json_args import TextColumn
from meshwright.timeline.readers.parsing.label_encoder import LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import MAX_TIMESTAMP_NS, Ints

_KERNEL_ARGUMENTS = {
    "registers per thread": ("registersPerThread",),
    "shared memory": ("staticSharedMemory", "dynamicSharedMemory"),
    "graph node id": ("graphNodeId",),
}
_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
_MOST_THREADS = 1 << 20


class NsysRows:
    """The rows of one export as columns that grow."""

    def __init__(self, database: NsysDatabase, detail: TraceDetail) -> None:
        self.database = database
        self.detail = detail
        self.names = NsysNameTable(keep_details=detail in {TraceDetail.SHAPES, TraceDetail.FULL})
        self.tracks = LabelEncoder()
        self.columns: dict[str, list[npt.NDArray[Any]]] = {
            name: [] for name in ("key", "place", "start_ns", "duration_ns", "flow")
        }
        self.num_spans = 0
        self.sizes: list[tuple[Ints, Ints]] = []
        """Rows, and their bytes."""
        self.calls: list[NcclNvtxRange] = []
        """What NCCL said about its functions."""
        self.missing_end: list[Ints] = []
        self.extra = TextColumn()
        self.notes: Counter[str] = Counter()
        self.errors: list[str] = []
        self.threads: dict[int, int] = {}
        """By Nsight's number of a thread: the id of its name."""
        self._wanted: list[Ints] = []

    def read(self) -> None:
        """Read all tables; a damaged one is left where it breaks, and the next is read."""
        steps = (
            self._read_kernels, self._read_copies, self._read_fills, self._read_graphs,
            self._read_waits, self._read_calls, self._read_overhead, self._read_threads,
            self._read_ranges, self._read_names,
        )  # fmt: skip
        for step in steps:
            try:
                step()
            except SQLITE_ERRORS as error:
                what = f"{step.__name__.removeprefix('_read_')}: {error}"
                self.errors.append(what)

    def _read_kernels(self) -> None:
        database = self.database
        known = database.columns.get(KERNEL, frozenset())
        fields = [
            (label, " + ".join(f'CAST(IFNULL("{column}", 0) AS INTEGER)' for column in columns))
            for label, columns in _KERNEL_ARGUMENTS.items()
            if known.issuperset(columns)
        ]
        sizes = [
            what for what in ("grid", "block") if {f"{what}X", f"{what}Y", f"{what}Z"} <= known
        ]
        written = [name for name in _KERNEL_NAMES if database.is_text_column(KERNEL, name)]
        name = database.build_text_sql(KERNEL, written[0]) if written else ""
        name = name or database.build_coalesce_sql(KERNEL, *_KERNEL_NAMES)
        for columns in self._device_rows(KERNEL, fields, sizes, name):
            self._add_device(NsysRowGroup.KERNEL, columns, self._keys(columns[6]))

    def _read_copies(self) -> None:
        number = self.database.build_integer_sql
        more = (number(MEMCPY, name) for name in ("copyKind", "srcKind", "dstKind", "bytes"))
        size = [("bytes", number(MEMCPY, "bytes"))]
        for columns in self._device_rows(MEMCPY, size, [], *more):
            kinds = [
                self._named(
                    f"Memcpy {_of(MEMCPY_KINDS, kind)} ({_of(MEMORY_KINDS, a)} -> "
                    f"{_of(MEMORY_KINDS, b)})"
                )
                for kind, a, b in zip(*columns[6:9], strict=True)
            ]
            self._add_device(NsysRowGroup.MEMCPY, columns, _ints(kinds), columns[9])

    def _read_fills(self) -> None:
        number = self.database.build_integer_sql
        more = (number(MEMSET, name) for name in ("memKind", "bytes"))
        size = [("bytes", number(MEMSET, "bytes"))]
        for columns in self._device_rows(MEMSET, size, [], *more):
            kinds = [self._named(f"Memset ({_of(MEMORY_KINDS, kind)})") for kind in columns[6]]
            self._add_device(NsysRowGroup.MEMSET, columns, _ints(kinds), columns[7])

    def _read_graphs(self) -> None:
        number = self.database.build_integer_sql
        for columns in self._device_rows(GRAPH, [], [], number(GRAPH, "graphId")):
            kinds = [self._named(f"CUDA graph {number}") for number in columns[6]]
            self._add_device(NsysRowGroup.GRAPH, columns, _ints(kinds))
            what = "whole CUDA graphs: what ran inside them was not recorded, nor whether it "
            what += "communicates (record with --cuda-graph-trace=node)"
            self.notes[what] += len(kinds)

    def _read_waits(self) -> None:
        number = self.database.build_integer_sql
        recorded = self._recorded_events()
        fields = [("wait_on_cuda_event_id", number(SYNC, "eventId"))]
        more = (number(SYNC, name) for name in ("syncType", "eventSyncId"))
        for columns in self._device_rows(SYNC, fields, [], *more):
            kinds = [_of(SYNC_KINDS, kind) for kind in columns[6]]
            if self.detail is not TraceDetail.LEAN:
                columns[-1] = tuple(
                    said[:-1] + _wait(kind, recorded.get(event))
                    for said, kind, event in zip(columns[-1], kinds, columns[7], strict=True)
                )
            columns[4] = tuple(-1 if stream == NO_STREAM else stream for stream in columns[4])
            self._add_device(
                NsysRowGroup.SYNC, columns, _ints([self._named(kind) for kind in kinds])
            )

    def _recorded_events(self) -> dict[int, tuple[int, int]]:
        """By the number that links them: the stream and call that recorded an event."""
        found: dict[int, tuple[int, int]] = {}
        if self.detail is TraceDetail.LEAN or not self.database.has_columns(EVENT, "eventSyncId"):
            return found
        names = ("eventSyncId", "streamId", "correlationId")
        for ids, streams, calls in self.database.iter_chunks(
            EVENT, *(self.database.build_integer_sql(EVENT, name) for name in names)
        ):
            found.update(zip(ids, zip(streams, calls, strict=True), strict=True))
        return found

    def _device_rows(
        self, table: str, fields: Sequence[tuple[str, str]], sizes: Sequence[str], *more: str
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Pieces of: start, end, process, device, stream, correlation, more, arguments as JSON.

        The arguments have these fields (name and SQL) and sizes in three directions.
        """
        database = self.database
        names = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")
        columns = [database.build_integer_sql(table, name) for name in names] + list(more)
        if self.detail is not TraceDetail.LEAN:
            always = ("device", "context", "stream", "correlation")
            arguments = [
                (label, database.build_integer_sql(table, f"{label}Id")) for label in always
            ]
            arguments += fields
            form = ", ".join(f'"{label}": %d' for label, _ in arguments)
            values = [value for _, value in arguments]
            for size in sizes:
                form += f', "{size}": [%d, %d, %d]'
                values += [database.build_integer_sql(table, f"{size}{axis}") for axis in "XYZ"]
            columns.append(f"CAST(printf('{{{form}}}', {', '.join(values)}) AS BLOB)")
        return database.iter_chunks(table, *columns)

    def _add_device(
        self, group: NsysRowGroup, columns: list[tuple[Any, ...]], key: Ints, sizes: Any = None
    ) -> None:
        owner, device, stream = columns[2:5]
        count = len(owner)
        place = self.tracks.encode(zip(repeat(group), owner, device, stream, strict=False), count)
        if sizes is not None:
            self.sizes.append((np.arange(count) + self.num_spans, np.maximum(_ints(sizes), -1)))
        if self.detail is not TraceDetail.LEAN:
            self.extra.add(np.arange(count) + self.num_spans, list(columns[-1]))
        self._add(columns[0], columns[1], key, place, _ints(columns[5]))

    def _read_calls(self) -> None:
        names, database = ("start", "end", "globalTid", "correlationId"), self.database
        for table in (RUNTIME, "CUPTI_ACTIVITY_KIND_DRIVER"):
            columns = [database.build_integer_sql(table, column) for column in names]
            as_text = database.is_text_column(table, "nameId")
            columns.append(
                (database.build_text_sql if as_text else database.build_integer_sql)(
                    table, "nameId"
                )
            )
            for start, end, thread, flow, name in database.iter_chunks(table, *columns):
                place = self._threads(NsysRowGroup.API_CALL, thread)
                self._add(start, end, self._keys(name), place, _ints(flow))

    def _read_overhead(self) -> None:
        table = "PROFILER_OVERHEAD"
        names = ("start", "end", "globalTid", "nameId")
        for start, end, thread, name in self.database.iter_chunks(
            table, *(self.database.build_integer_sql(table, column) for column in names)
        ):
            self._add(start, end, self._stored(name), self._threads(NsysRowGroup.OVERHEAD, thread))

    def _read_threads(self) -> None:
        table = "ThreadNames"
        columns = (self.database.build_integer_sql(table, name) for name in ("globalTid", "nameId"))
        self.threads = dict(self.database.read_rows(table, *columns, most=_MOST_THREADS))
        self.names.plain = dict.fromkeys(self.threads.values(), "")

    def _read_ranges(self) -> None:
        database, table = self.database, "NVTX_EVENTS"
        if self.names.keep_details:
            # What operators were given stands in their names: those are needed at once.
            for (ids,) in database.iter_chunks(table, database.build_integer_sql(table, "textId")):
                self._wanted.append(_distinct(_ints(ids)))
            self._read_names()
        names = ("start", "end", "eventType", "globalTid", "textId")
        columns = [database.build_integer_sql(table, column) for column in names]
        columns.append(database.build_text_sql(table, "text"))
        has_payload = database.has_columns(table, "binaryData")
        columns.append('CAST("binaryData" AS BLOB)' if has_payload else "NULL")
        for piece in database.iter_chunks(table, *columns):
            self._add_ranges(piece)

    def _add_ranges(self, piece: list[tuple[Any, ...]]) -> None:
        start, end, kind = (_ints(column) for column in piece[:3])
        marks = kind == NVTX_MARK
        opened = (kind == NVTX_START_END) | (kind == NVTX_TEXT_START_END)
        rows = np.flatnonzero(
            marks | opened | (kind == NVTX_PUSH_POP) | (kind == NVTX_TEXT_PUSH_POP)
        )
        at = rows.tolist()
        _, _, _, thread, text_id, text, payload = (
            [column[row] for row in at] if len(at) < len(kind) else column for column in piece
        )
        key = self._stored(text_id)
        for row, words in enumerate(text):
            if words is not None:
                key[row] = self.names.add_inline_name(words)
        start, end, marks, opened = start[rows], end[rows], marks[rows], opened[rows]
        unended = np.flatnonzero((end < start) & (end == -1) & ~marks)
        self.missing_end.append(unended + self.num_spans)
        end = np.where(end == -1, start, end)
        place = self._threads(NsysRowGroup.NVTX_RANGE, thread)
        if opened.any():
            place[opened] = self._threads(NsysRowGroup.OPEN_NVTX_RANGE, thread)[opened]
        self._add_payloads(payload)
        if self.names.keep_details:
            said = [
                parse_emit_nvtx(words) if words is not None else self.names.details.get(n, b"")
                for n, words in zip(text_id, text, strict=True)
            ]
            given = [row for row, details in enumerate(said) if details]
            self.extra.add(_ints(given) + self.num_spans, [said[row] for row in given])
        self._add(start, end, key, place)

    def _add_payloads(self, payload: Sequence[Any]) -> None:
        for row, blob in enumerate(payload):
            call = parse_nvtx_blob(self.num_spans + row, blob) if blob else None
            if call is not None:
                self.calls.append(call)

    def _threads(self, group: NsysRowGroup, threads: Sequence[int]) -> npt.NDArray[np.int32]:
        keys = zip(repeat(group), threads, repeat(-1), repeat(-1), strict=False)
        return self.tracks.encode(keys, len(threads))

    def _add(self, start: Any, end: Any, key: Ints, place: Any, flow: Ints | None = None) -> None:
        begin = np.clip(_ints(start), -MAX_TIMESTAMP_NS, MAX_TIMESTAMP_NS)
        length = np.clip(_ints(end), -MAX_TIMESTAMP_NS, MAX_TIMESTAMP_NS) - begin
        if (length < 0).any():
            self.notes["negative durations count as 0"] += int((length < 0).sum())
            np.maximum(length, 0, out=length)
        if flow is None:
            flow = np.full(len(begin), -1, dtype=np.int64)
        if not self.names.ready:
            self._wanted.append(_distinct(key))
        for name, values in (
            ("key", key), ("place", place), ("start_ns", begin), ("duration_ns", length),
            ("flow", flow),
        ):  # fmt: skip
            self.columns[name].append(values)
        self.num_spans += len(begin)
        self.extra.grow_to(self.num_spans)

    def _keys(self, names: Sequence[Any]) -> Ints:
        """The keys of names, given by their ids or as texts."""
        if any(isinstance(name, bytes) for name in names):
            return _ints([self.names.add_inline_name(name or NO_NAME.encode()) for name in names])
        return self._stored([-1 if name is None else name for name in names])

    def _stored(self, ids: Any) -> Ints:
        """The keys of names by their ids; what has no id has no name."""
        keys = np.array(ids, dtype=np.int64)
        keys[keys < 0] = self._named(NO_NAME)
        return keys

    def _named(self, name: str) -> int:
        return self.names.add_inline_name(name.encode())

    def _read_names(self) -> None:
        if not self.names.ready:
            wanted = np.concatenate([np.empty(0, np.int64), *self._wanted])
            self._wanted.clear()
            self.names.read_string_ids(self.database, _distinct(wanted))


def _ints(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _distinct(values: Ints) -> Ints:
    """The values in order, each once; numpy's own `unique` takes three times as long."""
    ordered = np.sort(values)
    return ordered[np.diff(ordered, prepend=-1) > 0]


def _of(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else "Unknown"


def _wait(kind: str, recorded: tuple[int, int] | None) -> bytes:
    said = f', "cuda_sync_kind": "{kind}"'
    if recorded is not None:
        stream, call = recorded
        said += f', "wait_on_stream": {stream}, "wait_on_cuda_event_record_corr_id": {call}'
    return said.encode() + b"}"
