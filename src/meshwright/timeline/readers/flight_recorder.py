"""Reads PyTorch's NCCL flight-recorder dumps (pickle or JSON, versions 2.x) into frozen records.

A dump is one rank's ring of collectives with their states. It does not say whose it is: the rank
comes from the file's name (`_dump_12`, `nccl_trace_rank_12`, `host7_12.pickle`) and is held against
the groups the dump lists, all of which contain the rank. Any field may be absent. No torch here.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp of PyTorch. Operations of a coalesced group
carry no state of their own: they take that of the entry that closes the group.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.dump_files import dump_files, rank_in_name
from meshwright.timeline.readers.flight_entries import (
    Entries,
    groups_of,
    in_order,
    progress_of,
    text_of,
    together,
)
from meshwright.timeline.readers.flight_records import (
    Dump,
    Dumps,
    Frame,
    Group,
    Operation,
    Progress,
)
from meshwright.timeline.readers.plain_pickle import loads, read_bounded, without_collection

__all__ = [
    "Dump", "Dumps", "Frame", "Group", "Operation", "Progress", "parse_dump", "read_dump",
    "read_flight_recorder",
]  # fmt: skip


_BYTES_PER_ENTRY = 16
"""Real entries take 150 and more."""
_GROUPS_OF_SAME_RANKS = 8
"""Texts of ranks are kept once in a file: so many groups of a large job may have the same."""


class _OtherFile(InputError):
    """A file that is something else than a dump."""


def read_flight_recorder(paths: Iterable[str | Path]) -> Dumps:
    """Read dumps, given as files or as folders of them; a broken file is kept as evidence."""
    files, notes = dump_files(paths)
    dumps: dict[int, Dump] = {}
    damaged: dict[int, str] = {}
    with without_collection():
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
    return Dumps(tuple(dumps[rank] for rank in sorted(dumps)), damaged, tuple(notes))


def _read_into(
    path: Path, dumps: dict[int, Dump], damaged: dict[int, str], notes: list[str]
) -> None:
    try:
        dump = read_dump(path)
    except DamagedFile as error:
        rank = rank_in_name(path)
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


def read_dump(path: str | Path) -> Dump:
    """Read one dump."""
    path = Path(path)
    raw = read_bounded(path)
    if raw[:1].isspace() or raw[:1] in (b"{", b"["):
        try:
            data = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            what = f"is no whole JSON: {error}"
            raise DamagedFile([Problem(str(path), what, "write the dump again")]) from None
    else:
        data = loads(raw, str(path))
    dump = parse_dump(data, str(path), rank_in_name(path), len(raw))
    return dump._replace(written_ns=path.stat().st_mtime_ns)


def parse_dump(data: Any, where: str, rank: int | None, num_bytes: int) -> Dump:
    """Turn a dump's plain data into records; `rank` is what the file's name says."""
    if isinstance(data, list) and any(isinstance(e, dict) and "state" in e for e in data[:9]):
        data = {"entries": data}  # PyTorch 2.1 and 2.2 wrote the entries alone
    if not isinstance(data, dict) or not isinstance(data.get("entries", []), list | tuple):
        what = "is no flight-recorder dump: it is no mapping with a list of entries"
        raise _OtherFile([Problem(where, what, "name files that the flight recorder wrote")])
    if not data.keys() & {"entries", "pg_config", "pg_status"}:
        what = "is no flight-recorder dump: it has neither entries nor process groups"
        raise _OtherFile([Problem(where, what, "name files that the flight recorder wrote")])
    groups = groups_of(data.get("pg_config"))
    if sum(len(group.ranks) for group in groups.values()) > _GROUPS_OF_SAME_RANKS * num_bytes:
        raise InputError([Problem(where, "unfolds to more than it holds", "write the dump again")])
    rank = _own_rank(rank, groups.values(), where)
    entries = [entry for entry in data.get("entries", []) if isinstance(entry, dict)]
    if len(entries) > num_bytes // _BYTES_PER_ENTRY + 1:
        raise InputError([Problem(where, "lists one entry over and over", "write the dump again")])
    reading = Entries(rank, groups, num_bytes // 2 + 64)
    operations = [reading.operation(entry, place) for place, entry in enumerate(entries)]
    if reading.budget < 0:
        raise InputError([Problem(where, "unfolds to more than it holds", "write the dump again")])
    operations.sort(key=lambda operation: operation.record)
    own_groups = tuple(dict.fromkeys(reading.known.values()))
    progress = progress_of(data.get("pg_status"), reading.ids, groups)
    version = text_of(data.get("version"))
    ordered = tuple(in_order(together(operations)))
    return Dump(rank, where, version, own_groups, progress, ordered)


def _own_rank(named: int | None, groups: Iterable[Group], where: str) -> int:
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
    raise InputError([Problem(where, "does not tell whose dump it is", fix)])
