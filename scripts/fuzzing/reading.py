"""How each format is read, and what runs over what was read: analyses, findings, whole commands."""

import io
import random
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from meshwright.cli import main
from meshwright.errors import DamagedFile, InputError
from meshwright.observe import notebook
from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.observe.analyze.memory import analyze_memory, downsample_live_bytes
from meshwright.timeline import Timeline
from meshwright.timeline.readers.execution_trace.execution_trace_reader import (
    execution_graph_to_timeline,
    read_execution_trace,
)
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from meshwright.timeline.readers.kineto import kineto_reader
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import read_memory_snapshot
from meshwright.timeline.readers.nccl_inspector.inspector_reader import read_nccl_inspector
from meshwright.timeline.readers.nccl_log.nccl_log_reader import (
    nccl_log_to_timeline,
    read_nccl_log,
)
from meshwright.timeline.readers.nsys.nsys_reader import read_nsys
from meshwright.timeline.readers.parsing.event_categories import TraceDetail
from meshwright.timeline.readers.perfetto_json.perfetto_json_reader import read_perfetto_json
from meshwright.timeline.readers.safe_pickle import safe_pickle
from meshwright.timeline.readers.trace_folder import read_trace
from meshwright.timeline.readers.trace_formats import detect_format
from meshwright.timeline.schema import SPAN_COLUMNS_BY_NAME
from meshwright.timeline.store.timeline_folder import read_timeline

ANALYSES: tuple[Callable[[Timeline], object], ...] = (
    notebook.breakdown, notebook.overlap, notebook.idle, notebook.launches, notebook.mfu,
    notebook.steps, notebook.kernels, notebook.roofline, notebook.collectives, notebook.stragglers,
    notebook.critical_path, notebook.find_inefficiencies,
)  # fmt: skip
_ANALYSED = 0.3
"""Share of the timelines that go through all analyses."""
_COMMANDED = 0.1
"""Share of the files that a command is run on, from its words to its screen, page or file."""
_SIZES = (100, 700, 1 << 19)


def _kineto(path: Path, rng: random.Random) -> None:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    # Small buffers cut events everywhere; a bomb read by 100 bytes would only take its time.
    vars(kineto_reader)["BUFFER_BYTES"] = _SIZES[-1] if packed else rng.choice(_SIZES)
    _run_command(_analyze(path, rng), rng)
    _through(lambda: kineto_reader.read_kineto(path, detail=rng.choice(list(TraceDetail))), rng)


def _nsight(path: Path, rng: random.Random) -> None:
    _run_command(_analyze(path, rng), rng)
    _through(lambda: read_nsys(path, detail=rng.choice(list(TraceDetail))), rng)


def _either_way(rng: random.Random) -> None:
    """Have small pickles read as large ones are, at times."""
    vars(safe_pickle)["_LARGE_BYTES"] = rng.choice((0, 1 << 30))


def _flight_recorder(path: Path, rng: random.Random) -> None:
    """Read it beside a sound dump, which always leaves something to judge."""
    _either_way(rng)
    both = [path, path.parent / "sound_rank_1"]
    _run_command(["hang", *map(str, both)], rng)
    diagnose_hang(read_flight_recorder(both))


def _memory(path: Path, rng: random.Random) -> None:
    _either_way(rng)
    _run_command(["memory", str(path)], rng)
    snapshot = read_memory_snapshot(path)
    for each in analyze_memory(snapshot):
        downsample_live_bytes(snapshot, each.live)


def _execution_trace(path: Path, rng: random.Random) -> None:
    graph = read_execution_trace(path)
    with suppress(InputError):  # most have no times
        _through(lambda: execution_graph_to_timeline(graph), rng)


def _log(path: Path, rng: random.Random) -> None:
    _through(lambda: nccl_log_to_timeline(read_nccl_log(path)), rng)


def _inspector(path: Path, rng: random.Random) -> None:
    _run_command(_analyze(path, rng), rng)
    _through(lambda: read_nccl_inspector(path), rng)


def _parquet(path: Path, rng: random.Random) -> None:
    """Read it as the spans of a rank, or as its counters beside sound spans."""
    folder = path.parent / "timeline"
    folder.mkdir(exist_ok=True)
    names = ["rank-00000.parquet", "counters-00000.parquet"]
    rng.shuffle(names)
    (folder / names[0]).write_bytes(path.read_bytes())
    (folder / names[1]).unlink(missing_ok=True)
    if names[0].startswith("counters"):
        (folder / names[1]).write_bytes((path.parent / "sound.parquet").read_bytes())
    _run_command(_analyze(folder, rng), rng)
    _through(lambda: read_timeline(folder), rng)


def _own(path: Path, rng: random.Random) -> None:
    _run_command(_analyze(path, rng), rng)
    _through(lambda: read_perfetto_json(path), rng)


def _folder(path: Path, rng: random.Random) -> None:
    """Read it as one of a folder's files, beside the trace of a rank."""
    folder = path.parent / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "rank-0.json").write_bytes((path.parent / "sound.json").read_bytes())
    (folder / "another.json").write_bytes(path.read_bytes())
    _run_command(_analyze(folder, rng), rng)
    _through(lambda: read_trace(folder), rng)


def _any(path: Path, rng: random.Random) -> None:
    """Let the format be told by the file's first bytes, as the commands do."""
    found = detect_format(path)
    if found is not None and found.reader:
        _through(lambda: read_trace(path), rng)


READERS: dict[str, Callable[[Path, random.Random], None]] = {
    "kineto": _kineto,
    "kineto gz": _kineto,
    "chrome": _kineto,
    "nsight": _nsight,
    "flight recorder": _flight_recorder,
    "flight recorder JSON": _flight_recorder,
    "memory snapshot": _memory,
    "NCCL log": _log,
    "NCCL inspector": _inspector,
    "execution trace": _execution_trace,
    "chakra": _execution_trace,
    "parquet": _parquet,
    "own trace": _own,
    "folder": _folder,
    "any": _any,
}


def _analyze(path: Path, rng: random.Random) -> list[str]:
    out = str(path.parent / "written")
    flags = rng.choice(([], ["--json"], ["--html", out], ["--perfetto", out], ["--compat", "hta"]))
    words = rng.choice(
        (["analyze", *flags], ["analyze", *flags], ["roofline"], ["diff", str(path)])
    )
    return [words[0], str(path), *words[1:], "--no-cache"]


def _run_command(words: list[str], rng: random.Random) -> None:
    """Run a command at times; with `--debug` it raises what it would call its own fault."""
    if rng.random() < _COMMANDED:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            main([*words, "--debug"])


def _through(load: Callable[[], Timeline], rng: random.Random) -> None:
    """Check what was read, also what a damaged file still gave, and analyse some of it."""
    found, fault = check_timeline(load)
    if rng.random() < _ANALYSED:
        for analysis in ANALYSES:
            with suppress(InputError):  # an analysis may say what it lacks
                analysis(found)
    if fault is not None:
        raise fault


def check_timeline(load: Callable[[], Timeline]) -> tuple[Timeline, InputError | None]:
    """Read a timeline, or what a damaged file still gives, and check it by a timeline's rules."""
    fault: InputError | None = None
    try:
        found = load()
    except DamagedFile as damage:
        if not isinstance(damage.readable, Timeline):
            raise
        fault, found = damage, damage.readable
    given = {name: found.spans.column(name) for name in found.spans.column_names}
    if not set(given) <= set(SPAN_COLUMNS_BY_NAME):
        raise AssertionError("columns that no timeline has")
    counters = {name: found.counters.column(name) for name in found.counters.column_names}
    Timeline.from_columns(given, counters, source=found.source)
    return found, fault
