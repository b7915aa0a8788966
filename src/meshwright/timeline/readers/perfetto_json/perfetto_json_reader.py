"""Reads a trace that `write_perfetto` or `mw analyze --perfetto` wrote back into its ranks.

Such a file is told by `"writer": "meshwright"` in its first bytes. Ranks are its processes, lanes
its threads, whose names say process and lane; attributes of a span are among its arguments, and
what else stands there was its `extra`. What `mw analyze` marked in the trace is left out.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.columns import DictionaryColumn
from meshwright.timeline.readers.chrome_trace.event_chunks import (
    BUFFER_BYTES,
    NotATrace,
    read_event_chunks,
)
from meshwright.timeline.readers.chrome_trace.event_types import DECODE_ERRORS
from meshwright.timeline.readers.parsing.compressed_file import TextChunks
from meshwright.timeline.readers.parsing.label_encoder import LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import MAX_TIMESTAMP_NS, parse_ns
from meshwright.timeline.schema import ABSENT, SPAN_COLUMNS_BY_NAME
from meshwright.timeline.timeline import Timeline

ANNOTATION_PROCESS = "meshwright"
"""The process on which `mw analyze` marks findings and the critical path."""
_OVERLAP = re.compile(r" \(overlap \d+\)$")
_LABELS = ("collective", "group", "dtype", "category")
_NUMBERS = ("stage", "microbatch", "layer", "bytes")


Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Base = Annotated[int, Meta(ge=-MAX_TIMESTAMP_NS, le=MAX_TIMESTAMP_NS)]


class _Span(Struct, gc=False, tag="X", tag_field="ph"):
    ts: Raw
    dur: Raw
    pid: Rank
    tid: Number
    name: str = ""
    cat: str = "host"
    args: dict[str, Any] = {}


class _Name(Struct, gc=False, tag="M", tag_field="ph"):
    name: str
    pid: Rank
    tid: Number = ABSENT
    args: dict[str, Any] = {}


class _FlowStart(Struct, gc=False, tag="s", tag_field="ph"):
    id: Number
    name: str = ""


class _FlowEnd(Struct, gc=False, tag="f", tag_field="ph"):
    id: Number
    name: str = ""


class _Count(Struct, gc=False, tag="C", tag_field="ph"):
    ts: Raw
    pid: Rank
    name: str
    args: dict[str, float]


_decode = msgspec.json.Decoder(list[_Span | _Name | _FlowStart | _FlowEnd | _Count]).decode


class _Read:
    """What was read so far, as columns that grow."""

    def __init__(self) -> None:
        self.places: dict[int, tuple[str, str]] = {}
        """Process and lane of each thread."""
        self.texts = {
            name: LabelEncoder() for name in ("process", "lane", "kind", "name", *_LABELS)
        }
        self.columns: dict[str, list[Any]] = {
            name: []
            for name in SPAN_COLUMNS_BY_NAME
            if name
            in {
                *self.texts,
                *_NUMBERS,
                "rank",
                "start_ns",
                "duration_ns",
                "flow_out",
                "flow_in",
                "extra",
            }
        }
        self.counters: dict[str, list[Any]] = {
            name: [] for name in ("rank", "name", "unit", "time_ns", "value")
        }
        self.left_out = 0
        self._drawn = False

    def take(self, text: Any) -> None:
        """Take the text of a list of events; all of them, or none and one of `DECODE_ERRORS`."""
        events = _decode(text)
        timed = [event for event in events if isinstance(event, _Span | _Count)]
        begins = [_time(event.ts) for event in timed]
        lengths = [_time(event.dur) if isinstance(event, _Span) else 0 for event in timed]
        times = iter(zip(begins, lengths, strict=True))
        for event in events:
            if isinstance(event, _Span):
                self._span(event, *next(times))
            elif isinstance(event, _FlowStart | _FlowEnd):
                # Right after its span; those that end before they begin are written turned.
                starts = isinstance(event, _FlowStart) != (event.name == "flow that ends first")
                if self._drawn:
                    self.columns["flow_out" if starts else "flow_in"][-1] = event.id
            elif isinstance(event, _Name):
                self._place(event)
            else:
                self._count(event, next(times)[0])

    def _place(self, event: _Name) -> None:
        if event.name != "thread_name" or event.tid == ABSENT:
            return
        said = _OVERLAP.sub("", str(event.args.get("name", "")))
        process, lane = event.args.get("process"), event.args.get("lane")
        if not isinstance(process, str) or not isinstance(lane, str):
            process, _, lane = said.rpartition(": ")
        self.places[event.tid] = (process or "main", lane)

    def _span(self, event: _Span, start_ns: int, duration_ns: int) -> None:
        process, lane = self.places.get(event.tid, ("main", f"thread {event.tid}"))
        self._drawn = process != ANNOTATION_PROCESS
        if not self._drawn:
            self.left_out += 1
            return
        given = dict(event.args)
        row: dict[str, Any] = {"process": process, "lane": lane, "kind": event.cat}
        row["name"] = event.name
        for name in _LABELS:
            value = given.pop(name) if isinstance(given.get(name), str) else None
            self.columns[name].append(ABSENT if value is None else self.texts[name][value])
        for name in _NUMBERS:
            whole = type(given.get(name)) is int and 0 <= given[name] < 2**63
            self.columns[name].append(given.pop(name) if whole else ABSENT)
        for name, value in row.items():
            self.columns[name].append(self.texts[name][value])
        self.columns["rank"].append(event.pid)
        self.columns["start_ns"].append(start_ns)
        self.columns["duration_ns"].append(max(0, duration_ns))
        self.columns["flow_out"].append(ABSENT)
        self.columns["flow_in"].append(ABSENT)
        self.columns["extra"].append(msgspec.json.encode(given).decode() if given else None)

    def _count(self, event: _Count, time_ns: int) -> None:
        for unit, value in event.args.items():
            row = (event.pid, event.name, "" if unit == "value" else unit, time_ns, value)
            for name, one in zip(self.counters, row, strict=True):
                self.counters[name].append(one)

    def timeline(self, base_ns: int, metadata: dict[str, str], source: str) -> Timeline:
        """All of it, on the clock it was written from."""
        spans: dict[str, Any] = {}
        for name, values in self.columns.items():
            if name in self.texts:
                codes = np.array(values, dtype=np.int32)
                spans[name] = DictionaryColumn(codes, list(self.texts[name]))
            else:
                spans[name] = values if name == "extra" else np.array(values, dtype=np.int64)
        spans["start_ns"] = spans["start_ns"] + base_ns
        counters = {**self.counters, "time_ns": [t + base_ns for t in self.counters["time_ns"]]}
        return Timeline.from_columns(spans, counters, source=source, metadata=metadata)


def _time(text: Raw) -> int:
    found = parse_ns(bytes(text))
    if found is None or abs(found) > MAX_TIMESTAMP_NS:
        raise msgspec.ValidationError(f"{bytes(text)!r} is no time")
    return found


def read_perfetto_json(path: str | Path) -> Timeline:
    """Read a trace that we wrote; one timeline with all its ranks.

    Raises `DamagedFile` where it breaks off; its `kept` is the `Timeline` of what came before.
    """
    path, found = Path(path), _Read()
    source = TextChunks(path, BUFFER_BYTES)
    try:
        rest = read_event_chunks(iter(source), found.take)
        about = msgspec.json.decode(rest.fields["metadata"], type=dict[str, Any])
        base_ns = msgspec.json.decode(rest.fields.get("baseTimeNanoseconds", b"0"), type=Base)
        timeline = _made(found, about, base_ns)
    except (NotATrace, KeyError, *DECODE_ERRORS) as refused:
        problems = refused.problems if isinstance(refused, InputError) else ()
        what = "; ".join(problem.what for problem in problems) or str(refused)
        fix = "write it again with mw analyze --perfetto or write_perfetto"
        raise InputError([Problem(str(path), what, fix)]) from None
    fault = source.error or rest.error
    if fault:
        fix = f"use the {timeline.num_spans:,} spans before that, or write it again"
        raise DamagedFile([Problem(str(path), fault, fix)], kept=timeline)
    return timeline


def _made(found: _Read, about: dict[str, Any], base_ns: int) -> Timeline:
    own = {"writer", "schema_version", "source"}
    metadata = {key: str(value) for key, value in about.items() if key not in own}
    if found.left_out:
        note = f"{found.left_out:,} marks of mw analyze were left out"
        metadata["notes"] = "\n".join(filter(None, (metadata.get("notes", ""), note)))
    return found.timeline(base_ns, metadata, str(about.get("source", "unknown")))
