"""Finds the dumps that ranks wrote, one file each, and reads the rank from their names."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.timeline.readers.flight_recorder.dump_entries import (
    DumpEntryParser,
    coalesce_operations,
    infer_completed,
    parse_groups,
    parse_progress,
    parse_text,
)
from meshwright.timeline.readers.flight_recorder.dump_records import (
    DumpSet,
    FlightRecorderDump,
    GroupProgress,
    RecordedGroup,
    RecordedOperation,
    StackFrame,
)
from meshwright.timeline.readers.safe_pickle.safe_pickle import (
    parse_pickle,
    pause_gc,
    read_bounded_file,
)

_ENDING = re.compile(r"(?:\.(?:pkl|pickle|json|gz|bin|dump|trace|pt|txt))+$", re.IGNORECASE)

_NAMED_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)

_LAST_NUMBER = re.compile(r"(\d{1,7})$")


def find_dumps(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the dumps among files and folders, and a note for each file that was left out."""
    files: list[Path] = []
    notes: list[str] = []
    for path in map(Path, paths):
        with convert_os_errors(path, "read"):
            if not path.exists():
                fix = "name the dumps' files, or their folder"
                raise InputError([Problem(str(path), "there is no such file or folder", fix)])
            if not path.is_dir():
                files.append(path)
                continue
            inside = [inner for inner in sorted(path.iterdir()) if inner.is_file()]
        for inner in inside:
            if _looks_like_a_dump(inner):
                files.append(inner)
            else:
                notes.append(f"{inner.name} is no dump and was left out")
    return files, notes


def _looks_like_a_dump(path: Path) -> bool:
    """Tell a dump in a folder by its name's rank and first byte; an empty file is a failed dump."""
    if parse_rank_from_filename(path) is None or path.suffix in (".log", ".txt", ".md"):
        return False
    with convert_os_errors(path, "read"), path.open("rb") as file:
        head = file.read(2)
    return not head or head[:1] in (b"\x80", b"{", b"[", b"(", b"}", b"]") or head == b"\x1f\x8b"


def parse_rank_from_filename(path: Path) -> int | None:
    """Return the rank that a file's name tells: the one it names, else its last number."""
    stem = _ENDING.sub("", path.name)
    named = _NAMED_RANK.findall(stem)
    if named:
        return int(named[-1])
    last = _LAST_NUMBER.search(stem)
    return int(last[1]) if last else None


__all__ = [
    "DumpSet",
    "FlightRecorderDump",
    "GroupProgress",
    "RecordedGroup",
    "RecordedOperation",
    "StackFrame",
    "parse_dump",
    "read_dump",
    "read_flight_recorder",
]  # fmt: skip

_BYTES_PER_ENTRY = 16
"""Real entries take 150 and more."""

_GROUPS_OF_SAME_RANKS = 8
"""Texts of ranks are kept once in a file: so many groups of a large job may have the same."""


class _OtherFile(InputError):
    """A file that is something else than a dump."""


def read_flight_recorder(paths: Iterable[str | Path]) -> DumpSet:
    """Read dumps, given as files or as folders of them; a broken file is kept as evidence."""
    files, notes = find_dumps(paths)
    dumps: dict[int, FlightRecorderDump] = {}
    damaged: dict[int, str] = {}
    with pause_gc():
        for path in files:
            _read_into(path, dumps, damaged, notes)
    if not dumps:
        where = ", ".join(str(path) for path in paths) or "dumps"
        fix = "name the files that the flight recorder wrote (default: /tmp/nccl_trace_rank_N)"
        why = f": {next(iter(damaged.values()))}" if damaged else ""
        what = f"holds no flight-recorder dump that can be read{why}"
        raise InputError([Problem(where, what, fix)])
    for rank in dumps:
        damaged.pop(rank, None)
    return DumpSet(tuple(dumps[rank] for rank in sorted(dumps)), damaged, tuple(notes))


def _read_into(
    path: Path, dumps: dict[int, FlightRecorderDump], damaged: dict[int, str], notes: list[str]
) -> None:
    try:
        dump = read_dump(path)
    except DamagedFile as error:
        rank = parse_rank_from_filename(path)
        if rank is None:
            notes.append(str(error))
        else:
            damaged[rank] = error.problems[0].what
        return
    except _OtherFile as error:
        notes.append(f"{path.name} {error.problems[0].what}")
        return
    if dump.rank in dumps:
        what = f"is of rank {dump.rank}, as {dumps[dump.rank].path} is"
        raise InputError([Problem(str(path), what, "give the dumps of one job and one moment")])
    dumps[dump.rank] = dump


def read_dump(path: str | Path) -> FlightRecorderDump:
    """Read one dump."""
    path = Path(path)
    raw = read_bounded_file(path)
    if raw[:1].isspace() or raw[:1] in (b"{", b"["):
        try:
            data = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            what = f"is no whole JSON: {error}"
            raise DamagedFile([Problem(str(path), what, "write the dump again")]) from None
    else:
        data = parse_pickle(raw, str(path))
    dump = parse_dump(data, str(path), parse_rank_from_filename(path), len(raw))
    return dump._replace(file_modified_ns=path.stat().st_mtime_ns)


def parse_dump(data: Any, where: str, rank: int | None, num_bytes: int) -> FlightRecorderDump:
    """Turn a dump's plain data into records; `rank` is what the file's name says."""
    if isinstance(data, list) and any(isinstance(e, dict) and "state" in e for e in data[:9]):
        data = {"entries": data}  # PyTorch 2.1 and 2.2 wrote the entries alone
    if not isinstance(data, dict) or not isinstance(data.get("entries", []), list | tuple):
        what = "is no flight-recorder dump: it is no mapping with a list of entries"
        raise _OtherFile([Problem(where, what, "name files that the flight recorder wrote")])
    if not data.keys() & {"entries", "pg_config", "pg_status"}:
        what = "is no flight-recorder dump: it has neither entries nor process groups"
        raise _OtherFile([Problem(where, what, "name files that the flight recorder wrote")])
    groups = parse_groups(data.get("pg_config"))
    if sum(len(group.ranks) for group in groups.values()) > _GROUPS_OF_SAME_RANKS * num_bytes:
        raise InputError([Problem(where, "unfolds to more than it holds", "write the dump again")])
    rank = _own_rank(rank, groups.values(), where)
    entries = [entry for entry in data.get("entries", []) if isinstance(entry, dict)]
    if len(entries) > num_bytes // _BYTES_PER_ENTRY + 1:
        raise InputError([Problem(where, "lists one entry over and over", "write the dump again")])
    reading = DumpEntryParser(rank, groups, num_bytes // 2 + 64)
    operations = [reading.parse_operation(entry, place) for place, entry in enumerate(entries)]
    if reading.budget < 0:
        raise InputError([Problem(where, "unfolds to more than it holds", "write the dump again")])
    operations.sort(key=lambda operation: operation.record_id)
    own_groups = tuple(dict.fromkeys(reading.parsed_groups.values()))
    progress = parse_progress(data.get("pg_status"), reading.ids, groups)
    version = parse_text(data.get("version"))
    ordered = tuple(infer_completed(coalesce_operations(operations)))
    return FlightRecorderDump(rank, where, version, own_groups, progress, ordered)


def _own_rank(named: int | None, groups: Iterable[RecordedGroup], where: str) -> int:
    """Hold the name's rank against the groups, all of which contain the rank that wrote them."""
    possible: set[int] | None = None
    for ranks in {id(group.ranks): group.ranks for group in groups}.values():
        if ranks:
            possible = set(ranks) if possible is None else possible.intersection(ranks)
    if possible and len(possible) == 1 and named not in possible:
        return next(iter(possible))
    if named is not None:
        return named
    fix = "let the file's name end with the rank, such as nccl_trace_rank_12"
    raise InputError([Problem(where, "the dump has no rank", fix)])
