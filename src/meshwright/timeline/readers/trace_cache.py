"""Keeps what was read from a trace as columns, so that a second read takes a tenth of the time.

One file per trace in the user's cache folder, in Arrow's stream format, mapped into memory: for a
trace of 852 MB that takes 0.002 CPU seconds and 314 MB of disk. Packed with LZ4 it would be 44 MB
but 0.1 to 0.8 s, and our Parquet files take 1.2 s. A file is known by the trace's path, size and
times of change, by how it is read and by the code that reads; it takes its name when it is
complete, so any number of writers may run. Whatever cannot be read is dropped and read again from
the trace.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache as once
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from meshwright.timeline.columns import arrow_schema
from meshwright.timeline.schema import (
    COUNTER_COLUMNS_BY_NAME,
    SCHEMA_VERSION,
    SPAN_COLUMNS_BY_NAME,
    TimelineSource,
)
from meshwright.timeline.timeline import Timeline

CACHE_ENV_VAR = "MESHWRIGHT_CACHE"
"""The variable that says where the cache lies, or `off`."""
_SUFFIX = ".trace.arrow"
_ABOUT = b"meshwright"
_GIB = 1 << 30


class TraceCache(NamedTuple):
    """A folder of what was read before."""

    folder: Path
    max_bytes: int = 4 * _GIB
    """Beyond it, those that were used least recently go."""
    min_file_bytes: int = 1 << 18
    """Smaller traces are read as fast as their columns."""


def open_default_cache() -> TraceCache | None:
    """The user's cache, or None where `MESHWRIGHT_CACHE` is `off`."""
    said = os.environ.get(CACHE_ENV_VAR, "").strip()
    if said.lower() in {"off", "0", "no", "false"}:
        return None
    if said:
        return TraceCache(Path(said).expanduser())
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # Nobody's home.
        return None
    return TraceCache(root / "meshwright" / "traces")


def read_through_cache(
    cache: TraceCache | None, path: Path, reader: str, read: Callable[[], Timeline]
) -> Timeline:
    """What `read` makes of a trace, from the cache where it is there; `reader` says how it reads.

    A damaged trace is not kept: its reader raises each time.
    """
    try:
        entry = None if cache is None else _entry(cache, path, reader)
    except OSError:
        entry = None
    if cache is None or entry is None:
        return read()
    known = load_entry(entry)
    if known is not None:
        return known
    timeline = read()
    with suppress(OSError, pa.ArrowException):
        _save(cache, entry, timeline)
    return timeline


def _entry(cache: TraceCache, path: Path, reader: str) -> Path | None:
    """Where the columns of a trace lie, whether they are there or not."""
    state = path.stat()
    if state.st_size < cache.min_file_bytes:
        return None
    # A copy that keeps the time of its last write has its own time of change.
    times = (state.st_mtime_ns, state.st_ctime_ns)
    parts = (str(path.resolve()), state.st_size, times, reader, SCHEMA_VERSION, _code())
    return cache.folder / (hashlib.sha256(repr(parts).encode()).hexdigest()[:40] + _SUFFIX)


@once
def _code() -> str:
    """The digest of all code that makes timelines: a number kept by hand would be forgotten."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_entry(entry: Path) -> Timeline | None:
    """Return the timeline of a cache file; None where there is none, or one that is damaged."""
    try:
        if not _is_ours(entry):
            return None
        file = pa.memory_map(str(entry))
        tables = [pa.ipc.open_stream(file).read_all() for _ in range(2)]
        for table, columns in zip(tables, _COLUMNS, strict=True):
            _check(table, columns)
        about = msgspec.json.decode(tables[0].schema.metadata[_ABOUT], type=_About)
        os.utime(entry)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException, msgspec.MsgspecError):
        with suppress(OSError):
            entry.unlink()
        return None
    spans, counters = (table.replace_schema_metadata() for table in tables)
    return Timeline(spans=spans, counters=counters, source=about.source, metadata=about.metadata)


_COLUMNS = tuple(
    arrow_schema(columns.values()) for columns in (SPAN_COLUMNS_BY_NAME, COUNTER_COLUMNS_BY_NAME)
)


def _is_ours(entry: Path) -> bool:
    """Say whether nobody else can have written a file: it is read as if we had."""
    state = entry.stat()
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _check(table: pa.Table, columns: pa.Schema) -> None:
    """Raise where a table has other columns than a timeline, or values that make no sense."""
    table.validate(full=True)  # a hundredth of a second for some 200 MB
    names = table.column_names
    if len(set(names)) < len(names) or any(
        columns.field(field.name).type != field.type for field in table.schema
    ):
        raise pa.ArrowInvalid("it has columns of another kind")


class _About(msgspec.Struct):
    source: TimelineSource
    metadata: dict[str, str]


def _save(cache: TraceCache, entry: Path, timeline: Timeline) -> None:
    cache.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = msgspec.json.encode(_About(timeline.source, timeline.metadata))
    unfinished = entry.with_name(f"{entry.name}.{os.getpid()}.{os.urandom(4).hex()}.partial")
    try:
        unfinished.touch(mode=0o600)  # whatever the umask says: `_is_ours` looks at it
        with pa.OSFile(str(unfinished), "wb") as file:
            for table in (timeline.spans, timeline.counters):
                whole = table.replace_schema_metadata({_ABOUT: about})
                with pa.ipc.new_stream(file, whole.schema) as stream:
                    stream.write_table(whole)
        unfinished.replace(entry)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    _make_room(cache)


def _make_room(cache: TraceCache) -> None:
    """Drop what was used least recently, and unfinished files that their writers left."""
    files = []
    for item in cache.folder.iterdir():
        if _SUFFIX not in item.name:
            continue
        with suppress(OSError):
            state = item.stat()
            files.append((state.st_mtime, state.st_size, item))
    total = sum(size for _, size, _ in files)
    for _, size, item in sorted(files):
        if total <= cache.max_bytes:
            return
        with suppress(OSError):
            item.unlink()
        total -= size
