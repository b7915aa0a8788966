"""Targets of `scripts.fuzz_coverage`: traces, dumps, logs and stored timelines."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from meshwright.errors import InputError
from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.observe.analyze.memory import analyze_memory, downsample_live_bytes
from meshwright.timeline.readers.execution_trace.execution_trace_reader import (
    execution_graph_to_timeline,
    read_execution_trace,
)
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from meshwright.timeline.readers.kineto import kineto_reader
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import read_memory_snapshot
from meshwright.timeline.readers.nccl_inspector.inspector_reader import read_nccl_inspector
from meshwright.timeline.readers.nccl_log.nccl_log_reader import nccl_log_to_timeline, read_nccl_log
from meshwright.timeline.readers.nsys.nsys_reader import read_nsys
from meshwright.timeline.readers.perfetto_json.perfetto_json_reader import read_perfetto_json
from meshwright.timeline.readers.trace_cache import TraceCache, load_entry, read_through_cache
from meshwright.timeline.store.timeline_folder import read_timeline
from scripts.fuzzing.inputs import EVENTS, made_by_hand
from scripts.fuzzing.reading import check_timeline
from scripts.fuzzing.targets import Reader, SeedMaker
from scripts.fuzzing.worker import fill_input


def _made_by_hand(*readers: str) -> SeedMaker:
    def make(folder: Path) -> Iterator[bytes]:
        fresh = Path(tempfile.mkdtemp(dir=folder))
        for given in list(made_by_hand(fresh)):
            if given.reader in readers:
                yield fill_input(given).data

    return make


def _read_kineto(path: Path) -> None:
    check_timeline(lambda: kineto_reader.read_kineto(path))


def _read_perfetto(path: Path) -> None:
    check_timeline(lambda: read_perfetto_json(path))


def _read_nsight(path: Path) -> None:
    check_timeline(lambda: read_nsys(path))


def _read_flight_recorder(path: Path) -> None:
    diagnose_hang(read_flight_recorder([path]))


def _read_memory_snapshot(path: Path) -> None:
    snapshot = read_memory_snapshot(path)
    for each in analyze_memory(snapshot):
        downsample_live_bytes(snapshot, each.live)


def _read_nccl_log(path: Path) -> None:
    check_timeline(lambda: nccl_log_to_timeline(read_nccl_log(path)))


def _read_nccl_inspector(path: Path) -> None:
    check_timeline(lambda: read_nccl_inspector(path))


def _read_execution_trace(path: Path) -> None:
    graph = read_execution_trace(path)
    with suppress(InputError):  # most have no times
        check_timeline(lambda: execution_graph_to_timeline(graph))


def _read_timeline(path: Path) -> None:
    """Read a file as the spans of a rank."""
    folder = path.parent / "timeline"
    folder.mkdir(exist_ok=True)
    spans = folder / "rank-00000.parquet"
    spans.unlink(missing_ok=True)
    os.link(path, spans)
    check_timeline(lambda: read_timeline(folder))


def _read_cache_entry(path: Path) -> None:
    entry = path.with_name("entry.trace.arrow")  # a damaged one is deleted
    entry.unlink(missing_ok=True)
    entry.write_bytes(path.read_bytes())
    found = load_entry(entry)
    if found is not None:
        check_timeline(lambda: found)


def _make_cache_entry(folder: Path) -> Iterator[bytes]:
    """Yield what the cache keeps of a trace."""
    trace = folder / "trace.json"
    trace.write_text(json.dumps({"traceEvents": EVENTS}))
    cache = TraceCache(folder / "cache", min_file_bytes=0)
    read_through_cache(cache, trace, "kineto", lambda: kineto_reader.read_kineto(trace))
    yield from (entry.read_bytes() for entry in (folder / "cache").iterdir())


READERS: dict[str, Reader] = {
    "kineto": _read_kineto,
    "perfetto": _read_perfetto,
    "nsight": _read_nsight,
    "flight_recorder": _read_flight_recorder,
    "memory_snapshot": _read_memory_snapshot,
    "nccl_log": _read_nccl_log,
    "nccl_inspector": _read_nccl_inspector,
    "execution_trace": _read_execution_trace,
    "timeline_parquet": _read_timeline,
    "trace_cache": _read_cache_entry,
}
SEEDS: dict[str, SeedMaker] = {
    "kineto": _made_by_hand("kineto", "chrome"),
    "perfetto": _made_by_hand("own trace"),
    "nsight": _made_by_hand("nsight"),
    "flight_recorder": _made_by_hand("flight recorder", "flight recorder JSON"),
    "memory_snapshot": _made_by_hand("memory snapshot"),
    "nccl_log": _made_by_hand("NCCL log"),
    "nccl_inspector": _made_by_hand("NCCL inspector"),
    "execution_trace": _made_by_hand("execution trace", "chakra"),
    "timeline_parquet": _made_by_hand("parquet"),
    "trace_cache": _make_cache_entry,
}
