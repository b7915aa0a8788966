"""Reads what NCCL's Inspector plugin writes: one JSON object per collective, one after another.

Each has the time its kernel took and the bandwidth reached. When it began is known only with
NCCL_INSPECTOR_DUMP_VERBOSE=1; else it is taken to have ended when it was written, which it did
some time before. Field names are those of NCCL's plugins/profiler/inspector (formats v3, v4).
"""

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.chrome_trace.event_chunks import NotATrace, read_event_chunks
from meshwright.timeline.readers.chrome_trace.event_types import DECODE_ERRORS, decode_raw_events
from meshwright.timeline.readers.parsing.communication_names import normalize_collective
from meshwright.timeline.readers.parsing.compressed_file import TextChunks
from meshwright.timeline.schema import ABSENT, SpanKind, TimelineSource
from meshwright.timeline.timeline import Timeline

_CHUNK_BYTES = 1 << 20
_LINE_BYTES = 1 << 20
_LARGEST_US = 2**52
_MOST_RECORDS = 10_000_000
_WHOLE = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Collectives whose size is that of one rank's part: the plugin multiplies it by the ranks too."""


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct):
    dump_timestamp_us: int


class _KernelTimes(msgspec.Struct):
    kernel_start_ts: int = 0


class _Times(msgspec.Struct):
    kernel_events: list[_KernelTimes] = []


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: int
    coll_busbw_gbs: float = 0.0
    event_trace_ts: _Times | None = None


class _PeerToPeer(msgspec.Struct):
    p2p: str
    p2p_sn: int
    p2p_msg_size_bytes: int
    p2p_exec_time_us: int
    p2p_busbw_gbs: float = 0.0
    event_trace_ts: _Times | None = None


class _Record(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _PeerToPeer | None = None


_DECODER = msgspec.json.Decoder(_Record)


class _Row(NamedTuple):
    rank: int
    start_us: int
    length_us: int
    name: str
    num_bytes: int
    group: str
    extra: str


class _Found:
    """The records so far; takes them as texts."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.broken = self.guessed = 0
        self.largest = 0, 0
        """The size of the largest communicator, and the rank in it."""

    def add(self, text: Any) -> None:
        """Take one record."""
        try:
            record = _DECODER.decode(text)
            row, is_guessed = _row(record)
        except DECODE_ERRORS:
            self.broken += 1
            return
        self.guessed += is_guessed
        self.largest = max(self.largest, (record.header.n_ranks, record.header.rank))
        if len(self.rows) < _MOST_RECORDS:
            self.rows.append(row)

    def take_lines(self, chunks: Iterable[bytes]) -> None:
        """Take a record from each line."""
        rest = b""
        for chunk in chain(chunks, [b"\n"]):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_BYTES:
                self.broken, rest = self.broken + 1, b""
            for line in filter(bytes.strip, whole):
                self.add(line)

    def take_list(self, text: Any) -> None:
        """Take the text of a list of records."""
        for one in decode_raw_events(text):
            self.add(one)


def read_nccl_inspector(path: str | Path) -> Timeline:
    """Read one file of the plugin's, of one process.

    The plugin writes a record on each line; records over several lines and lists of them, as other
    tools make of its files, are read too. The rank is the one in the largest communicator. Raises
    `DamagedFile` where records are broken; its `kept` is the timeline of the others. `InputError`
    where none can be read.
    """
    path = Path(path)
    found, fault = _Found(), ""
    source = TextChunks(path, _CHUNK_BYTES)
    is_list = next(iter(source), b"").lstrip()[:1] == b"["
    if not is_list:
        found.take_lines(source)
    if not found.rows:
        found, source = _Found(), TextChunks(path, _CHUNK_BYTES)
        with suppress(NotATrace):
            rest = read_event_chunks(chain([] if is_list else [b"["], source), found.take_list)
            fault = rest.error
    if not found.rows:
        fix = "name a file that NCCL's Inspector plugin wrote"
        raise InputError([Problem(str(path), "has no record of NCCL's Inspector", fix)])
    timeline = _timeline(found.rows, found.largest[1], found.guessed)
    broken = f"{found.broken:,} lines are no records" if found.broken else ""
    fault = source.error or fault or broken
    if fault:
        fix = f"use the {len(found.rows):,} records that could be read"
        raise DamagedFile([Problem(str(path), fault, fix)], kept=timeline)
    return timeline


def _row(record: _Record) -> tuple[_Row, bool]:
    one, two = record.coll_perf, record.p2p_perf
    if one is not None:
        name, number, size = one.coll, one.coll_sn, one.coll_msg_size_bytes
        took, speed, times = one.coll_exec_time_us, one.coll_busbw_gbs, one.event_trace_ts
    elif two is not None:
        name, number, size = two.p2p, two.p2p_sn, two.p2p_msg_size_bytes
        took, speed, times = two.p2p_exec_time_us, two.p2p_busbw_gbs, two.event_trace_ts
    else:
        raise ValueError("neither a collective nor a send")
    header, written = record.header, record.metadata.dump_timestamp_us
    fine = 0 <= header.rank < header.n_ranks < 2**31 and 0 <= took < _LARGEST_US
    if not (fine and 0 <= written < _LARGEST_US and 0 <= size < 2**56):
        raise ValueError("a number is out of range")
    starts = [event.kernel_start_ts for event in times.kernel_events] if times else []
    starts = [start for start in starts if 0 < start < _LARGEST_US]
    start = min(starts) if starts else written - took
    if normalize_collective(name) in _WHOLE:
        size *= header.n_ranks
    said = {"Seq": number, "Group size": header.n_ranks, "bus bandwidth (GB/s)": speed}
    extra = msgspec.json.encode(said).decode()
    return _Row(header.rank, start, took, name, size, header.id, extra), not starts


def _timeline(rows: list[_Row], rank: int, guessed: int) -> Timeline:
    spans: dict[str, Any] = {
        "rank": rank,
        "process": "gpu",
        "lane": [f"communicator {row.group}" for row in rows],
        "start_ns": np.array([row.start_us for row in rows], dtype=np.int64) * 1000,
        "duration_ns": np.array([row.length_us for row in rows], dtype=np.int64) * 1000,
        "kind": SpanKind.COMMUNICATION.value,
        "name": [row.name for row in rows],
        "bytes": [row.num_bytes if row.num_bytes < 2**62 else ABSENT for row in rows],
        "collective": [normalize_collective(row.name) for row in rows],
        "group": [row.group for row in rows],
        "category": "nccl",
        "extra": [row.extra for row in rows],
    }
    notes = ["the rank is that of the largest communicator"]
    if guessed:
        notes.append(
            f"{guessed:,} collectives do not say when they began: taken to end when written "
            "(record with NCCL_INSPECTOR_DUMP_VERBOSE=1)"
        )
    metadata = {"profiler": "nccl inspector", "notes": "\n".join(notes)}
    return Timeline.from_columns(spans, source=TimelineSource.MEASURED, metadata=metadata)
