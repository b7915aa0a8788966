"""What is mutated: tiny files of every format, made by hand, and pieces of real ones."""

import gzip
import json
import pickle
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.timeline import Timeline
from meshwright.timeline.perfetto.perfetto_writer import write_perfetto
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.readers.safe_pickle.safe_pickle import load_safe_pickle
from meshwright.timeline.store.timeline_folder import locate_rank_files, write_timeline
from tests.timeline.readers.execution_trace.test_execution_trace_reader import NEW, OLD
from tests.timeline.readers.nccl_inspector.test_inspector_reader import TIMES, record
from tests.timeline.readers.nccl_log.test_nccl_log_reader import LOG
from tests.timeline.readers.small_chakra import COMPUTE, REDUCE, trace
from tests.timeline.readers.small_dumps import STACK, dump, entry, event, snapshot
from tests.timeline.readers.small_nsight import NVTX, export, nvtx, payload, usual

EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 2, "ts": 1.5,
     "dur": 9.25, "args": {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float",
                           "Process Group Ranks": "[0, 1]", "Group size": 2}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2,
     "ts": 2, "dur": 1, "args": {"correlation": 5}},
    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32", "pid": 0, "tid": 7,
     "ts": 1712195495519689.047, "dur": 4, "args": {"device": 0, "stream": 7, "correlation": 5}},
    {"ph": "X", "cat": "kernel", "name": "void gemm<float>", "pid": 0, "tid": 7, "ts": 5, "dur": 2,
     "args": {"device": 0, "stream": 7, "correlation": 6, "grid": [1, 2, 3], "block": [8, 1, 1]}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
     "ts": 7, "dur": 1, "args": {"device": 0, "stream": 7, "bytes": 4096}},
    {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 7, "ts": 8,
     "dur": 1, "args": {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 5}},
    {"ph": "s", "id": 5, "pid": 1, "tid": 2, "ts": 2, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 5, "pid": 0, "tid": 7, "ts": 5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    {"ph": "B", "name": "a", "ts": 1, "pid": 1, "tid": 2}, {"ph": "E", "ts": 3, "pid": 1, "tid": 2},
    {"ph": "i", "name": "[memory]", "ts": 4,
     "args": {"Device Type": 1, "Device Id": 0, "Bytes": 1, "Total Allocated": 9}},
    {"ph": "C", "name": "power", "ts": 5, "args": {"W": 3}},
]  # fmt: skip
_MOST_BYTES = 16_000
"""Larger pieces of real files are not kept: small inputs make many cases."""


class Input(NamedTuple):
    """One file to spoil: its bytes, and its value where it is made of one."""

    reader: str
    data: bytes
    value: Any = None
    form: str = ""
    """How the value is written: `json` or `pickle`; empty for formats spoiled by bytes only."""


def made_by_hand(folder: Path) -> Iterator[Input]:
    """Return tiny files of every format; some are written by their own tools into a folder."""
    yield from _traces()
    yield from _dumps()
    yield from _texts()
    yield Input("nsight", _nsight(folder / "small.sqlite"))
    source = folder / "small.json"
    source.write_text(json.dumps({"traceEvents": EVENTS}))
    timeline = read_kineto(source)
    yield Input("parquet", spans_as_parquet(timeline, folder / "small"))
    yield Input(
        "parquet", locate_rank_files(folder / "small", timeline.ranks[0]).counters.read_bytes()
    )
    write_perfetto(timeline, folder / "own.json")
    own = (folder / "own.json").read_bytes()
    yield Input("own trace", own, json.loads(own), "json")


def _traces() -> Iterator[Input]:
    info = {"rank": 1, "world_size": 4, "pg_config": [{"pg_name": "0", "ranks": "[0, 1]"}]}
    whole = {"distributedInfo": info, "traceEvents": EVENTS * 3, "baseTimeNanoseconds": 7}
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 1, "tid": 2,
         "ts": 10 * n, "dur": 9}
        for n in range(3)
    ]  # fmt: skip
    for recorded in (whole, {"traceEvents": steps + EVENTS}):
        yield Input("kineto", b"", recorded, "json")
    yield Input("chrome", b"", EVENTS, "json")
    yield Input("chrome", b"", {"traceEvents": [_plain(each) for each in EVENTS]}, "json")


def _plain(event: Any) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("cat", "args")}


def _dumps() -> Iterator[Input]:
    p2p = entry(9, is_p2p=True, profiling_name="nccl:send 0->1", p2p_seq_id=4, frames=STACK)
    batch = [entry(n, is_p2p=True, profiling_name=name, p2p_seq_id=5)
             for n, name in ((10, "nccl:recv 0<-1"), (11, "nccl:coalesced"))]  # fmt: skip
    for value in (dump([entry(7), entry(8, frames=STACK), p2p, *batch]), dump([])):
        yield Input("flight recorder", b"", value, "pickle")
        yield Input("flight recorder JSON", b"", value, "json")
    events = [event("alloc", 512 * n, 512) for n in range(8)]
    events += [event("free_requested", 512, 512), event("free_completed", 512, 512)]
    events += [event("oom", 99, 4096), event("segment_alloc", 0, 4096),
               event("segment_map", 4096, 4096), event("segment_unmap", 4096, 512)]  # fmt: skip
    yield Input("memory snapshot", b"", snapshot(events, active=3584), "pickle")


def _texts() -> Iterator[Input]:
    for value in (OLD, NEW):
        yield Input("execution trace", b"", value, "json")
    yield Input("chakra", trace([COMPUTE, REDUCE] * 3))
    yield Input("NCCL log", LOG.encode())
    lines = [json.dumps(record(event_trace_ts=TIMES)) for _ in range(3)]
    yield Input("NCCL inspector", "\n".join(lines).encode())
    yield Input("NCCL inspector", b"", [record(event_trace_ts=TIMES), record()], "json")


def _nsight(path: Path) -> bytes:
    tables = usual()
    said = payload("<QQi", 7, 4096, 1)
    tables[NVTX] += [nvtx(1, 3, "ncclAllReduce", binaryData=said), nvtx(4, None, "ncclGroupEnd")]
    return export(path, tables).read_bytes()


def spans_as_parquet(timeline: Timeline, folder: Path) -> bytes:
    """Write a timeline of one rank; return the file of its spans."""
    write_timeline(timeline, folder)
    return locate_rank_files(folder, timeline.ranks[0]).spans.read_bytes()


def pieces_of_real_files(shared: Path, folder: Path) -> Iterator[Input]:
    """Return small pieces of the real files: whole formats, few rows."""
    traces = shared / "traces"
    for path in sorted(traces.glob("*/**/*.json.gz"))[::2]:
        if path.stat().st_size < 200_000:
            yield from _real_trace(path)
    for path in sorted(traces.glob("nvrx-flight-recorder/*/_dump_*"))[::3]:
        yield Input("flight recorder", path.read_bytes(), load_safe_pickle(path), "pickle")
    for path in sorted(traces.glob("memory-snapshots/*.gz"))[:4]:
        whole = load_safe_pickle(path)
        value = whole | {
            "segments": whole["segments"][:2],
            "device_traces": [rows[:12] for rows in whole["device_traces"]],
        }
        yield Input("memory snapshot", pickle.dumps(value), value, "pickle")
    for path in sorted(traces.glob("nsys-sqlite/*.gz"))[:1]:
        yield Input("nsight", _real_nsight(path, folder / "real.sqlite"))
    for path in sorted(traces.glob("chakra/*gz")):
        yield from _real_chakra(path)


def _real_trace(path: Path) -> Iterator[Input]:
    try:
        value = json.loads(gzip.decompress(path.read_bytes()))
    except ValueError:
        return
    if not isinstance(value, dict):
        return
    for key, reader in (("traceEvents", "kineto"), ("nodes", "execution trace")):
        rows = value.get(key)
        if isinstance(rows, list) and rows:
            few = value | {key: rows[:4] + rows[4 :: max(1, len(rows) // 12)]}
            data = json.dumps(few).encode()
            if len(data) < _MOST_BYTES:
                yield Input(reader, data, few, "json")


def _real_nsight(packed: Path, path: Path) -> bytes:
    """Keep a few rows of each table."""
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    with sqlite3.connect(path) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in names:
            most = 100 if name == "StringIds" else 10
            connection.execute(f'DELETE FROM "{name}" WHERE rowid > {most}')
    connection.execute("VACUUM")
    connection.close()
    return path.read_bytes()


def _real_chakra(path: Path) -> Iterator[Input]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and member.name.endswith(".et"):
                    yield Input("chakra", file.read(6_000))
                    return
    except (tarfile.TarError, OSError):
        return
