"""Tells by its first bytes which tool wrote a file.

`FORMATS` lists what is known; a reader of another format is one more entry there.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.timeline.readers.execution_trace.chakra_protobuf import (
    InvalidProtobuf,
    read_messages,
    read_metadata,
)
from meshwright.timeline.readers.parsing.compressed_file import (
    DECOMPRESS_REMEDY,
    TextChunks,
    detect_compression,
)

START_BYTES = 1 << 16


class TraceFileFormat(NamedTuple):
    """A kind of file that can be told by its start."""

    name: str
    description: str
    matches: Callable[[bytes], bool]
    """Whether a file that starts with these bytes, unpacked, is of this kind."""
    reader: str = ""
    """`module:function` that makes a `Timeline` of a path; empty where it is no timeline."""
    alternative: str = ""
    """What to give where a timeline is wanted and this is none."""
    command: str = "mw analyze"
    """What reads it, if anything does."""


def _starts(start: bytes) -> Callable[[bytes], bool]:
    return lambda text: text.startswith(start)


def _pickled(*words: bytes) -> Callable[[bytes], bool]:
    return lambda text: text[:1] == b"\x80" and all(word in text for word in words)


def _json(*patterns: bytes) -> Callable[[bytes], bool]:
    def fits(start: bytes) -> bool:
        text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
        found = all(re.search(pattern, text) for pattern in patterns)
        return text[:1] in {b"{", b"["} and found

    return fits


_PHASE = re.compile(rb'"ph"\s*:\s*"')
_LIST = re.compile(rb'"traceEvents"\s*(?::\s*(?:\[|$)|$)')


def _events(start: bytes) -> bool:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] == b"[":
        return re.match(rb"\[\s*\{", text) is not None and _PHASE.search(text) is not None
    if text[:1] != b"{":
        return False
    # Long lists of process groups may push the events out of the first bytes.
    return _LIST.search(text) is not None or b'"deviceProperties"' in text


def _printed_by_nccl(start: bytes) -> bool:
    return re.search(rb"NCCL (?:INFO|WARN|TRACE) ", start) is not None


def _chakra(start: bytes) -> bool:
    """Messages of Chakra's: the first has only a version and attributes, then come nodes."""
    try:
        found = read_messages(start)
        about = read_metadata(next(found, b""))
        return bool(about) and next(found, b"\x08")[:1] in {b"\x08", b"\x12"}
    except InvalidProtobuf:
        return False


def _planes(start: bytes) -> bool:
    return start[:1] == b"\n" and re.search(rb"/(?:host|device|task):", start[:64]) is not None


def _archive(start: bytes) -> bool:
    return start[257:262] == b"ustar"


_PROFILER = "give the trace that PyTorch's profiler recorded of the same run"
_HERE = "meshwright.timeline.readers"
_ENTRIES = (rb'"entries"\s*:', rb'"(?:pg_config|collective_seq_id|version)"\s*:')
FORMATS: tuple[TraceFileFormat, ...] = (
    TraceFileFormat(
        "timeline",
        "our Parquet files",
        _starts(b"PAR1"),
        "meshwright.timeline.store.timeline_folder:read_timeline",
    ),
    TraceFileFormat(
        "own trace",
        "a trace that mw analyze --perfetto wrote",
        _starts(b'{"metadata":{"writer":"meshwright"'),
        "meshwright.timeline.readers.perfetto_json.perfetto_json_reader:read_perfetto_json",
    ),
    TraceFileFormat(
        "kineto",
        "a trace of PyTorch's profiler, or other Chrome trace events",
        _events,
        "meshwright.timeline.readers.kineto.kineto_reader:read_kineto",
    ),
    TraceFileFormat(
        "nsight",
        "an SQLite export of Nsight Systems",
        _starts(b"SQLite format 3"),
        "meshwright.timeline.readers.nsys.nsys_reader:read_nsys",
    ),
    TraceFileFormat(
        "execution trace",
        "an execution trace of PyTorch",
        _json(rb'"schema"\s*:', rb'"nodes"\s*:'),
        alternative=f"mw analyze counts its operators, but it has no times: {_PROFILER}",
    ),
    TraceFileFormat(
        "chakra",
        "an execution trace of Chakra",
        _json(rb'^\{\s*"workload_graph"\s*:'),
        "meshwright.timeline.readers.execution_trace.execution_trace_reader:read_timed_execution_trace",
    ),
    TraceFileFormat(
        "chakra",
        "an execution trace of Chakra",
        _chakra,
        "meshwright.timeline.readers.execution_trace.execution_trace_reader:read_timed_execution_trace",
    ),
    TraceFileFormat(
        "nccl inspector",
        "what NCCL's Inspector plugin writes",
        _json(rb'"inspector_output_format_version"\s*:'),
        "meshwright.timeline.readers.nccl_inspector.inspector_reader:read_nccl_inspector",
    ),
    TraceFileFormat(
        "rocprofv3",
        "JSON of rocprofv3, which is not read",
        _json(rb'^\{\s*"rocprofiler-sdk-tool"'),
        alternative="JSON of rocprofv3 is not read: record with torch.profiler and give its .json",
    ),
    TraceFileFormat(
        "xplane",
        "an XSpace of XLA's profiler, which is not read",
        _planes,
        alternative="XPlane files are not read: record with jax.profiler.trace(..., "
        "create_perfetto_trace=True) and give perfetto_trace.json.gz",
    ),
    TraceFileFormat(
        "archive",
        "a tar archive, which is not read",
        _archive,
        alternative="unpack the archive and give what is in it",
    ),
    TraceFileFormat(
        "packed",
        "a packed file, which is not read",
        lambda start: detect_compression(start) != "",
        alternative=DECOMPRESS_REMEDY,
    ),
    *(
        TraceFileFormat(
            "flight recorder",
            "a flight-recorder dump",
            fits,
            command="mw hang",
            alternative="mw hang reads dumps of the flight recorder",
        )
        for fits in (
            _pickled(b"entries", b"pg_config"),
            _pickled(b"entries", b"profiling_name"),
            _json(*_ENTRIES),
        )
    ),
    *(
        TraceFileFormat(
            "memory snapshot",
            "a CUDA memory snapshot",
            _pickled(word),
            command="mw memory",
            alternative="mw memory reads snapshots",
        )
        for word in (b"segments", b"device_traces")
    ),
    TraceFileFormat(
        "nccl log",
        "what NCCL_DEBUG prints",
        _printed_by_nccl,
        alternative=f"mw analyze reads a log of NCCL's, but it is no timeline: {_PROFILER}",
    ),
)
"""In the order they are tried."""


def check_format(path: Path, command: str) -> Problem | None:
    """What is wrong with giving a file to this command, where it is another's; None if nothing."""
    format_ = detect_format(path) if path.is_file() else None
    if format_ is None or format_.command == command:
        return None
    reads = format_.reader or format_.command != "mw analyze"
    fix = f"{format_.command} reads it" if reads else format_.alternative
    return Problem(str(path), f"is {format_.description}", fix)


def detect_format(path: Path) -> TraceFileFormat | None:
    """The format of a file, by its first bytes."""
    start = read_first_bytes(path)
    return next((format_ for format_ in FORMATS if format_.matches(start)), None)


def read_first_bytes(path: Path) -> bytes:
    """The first bytes of a file, unpacked where it is packed."""
    start = b""
    for chunk in TextChunks(path, START_BYTES):
        start += chunk
        if len(start) >= START_BYTES:
            break
    return start
