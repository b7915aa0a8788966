"""Reads PyTorch's NCCL flight-recorder dumps (pickle or JSON, versions 2.x) into frozen records.

A dump is one rank's ring of collectives with their states. It does not say whose it is: the rank
comes from the file's name (`_dump_12`, `nccl_trace_rank_12`, `host7_12.pickle`) and is held against
the groups the dump lists, all of which contain the rank. Any field may be absent. No torch here.

Format: torch/csrc/distributed/c10d/FlightRecorder.hpp of PyTorch; peers' names of point-to-point
operations ("send 0->3") count within the group, so they are translated to ranks of the job.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.dump_files import dump_files, rank_in_name
from meshwright.timeline.readers.plain_pickle import loads, read_bounded

PENDING = frozenset({"scheduled", "started"})


class Frame(NamedTuple):
    """One line of the stack that enqueued an operation."""

    name: str
    file: str
    line: int


class Group(NamedTuple):
    """A process group, known across ranks by its name and its members."""

    name: str
    description: str
    ranks: tuple[int, ...]


class Progress(NamedTuple):
    """How far a rank came in a group: numbers of collectives, -1 where not told."""

    enqueued: int
    started: int
    completed: int


class Operation(NamedTuple):
    """One collective or point-to-point operation as one rank saw it."""

    record: int
    group: Group
    name: str
    """Without the library: `all_to_all`, `send`."""
    sequence: int
    """Number of the collective within its group; of a point-to-point operation, its own count."""
    is_p2p: bool
    source: int
    destination: int
    """Ranks of the job, -1 for collectives and where not told."""
    state: str
    created_ns: int
    started_ns: int
    completed_ns: int
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    timeout_ms: int
    frames: tuple[Frame, ...]

    @property
    def pending(self) -> bool:
        """Whether the rank had not seen it end."""
        return self.state in PENDING and not self.completed_ns


class Dump(NamedTuple):
    """What one rank wrote down."""

    rank: int
    path: str
    version: str
    groups: tuple[Group, ...]
    progress: Mapping[Group, Progress]
    operations: tuple[Operation, ...]
    """In the order they were enqueued."""


class Dumps(NamedTuple):
    """The dumps of a job, and what could not be read."""

    dumps: tuple[Dump, ...]
    damaged: Mapping[int, str]
    """Ranks whose file is there but broken, and why."""
    notes: tuple[str, ...]


def read_flight_recorder(paths: Iterable[str | Path]) -> Dumps:
    """Read dumps, given as files or as folders of them; a broken file is kept as evidence."""
    files, notes = dump_files(paths)
    dumps: dict[int, Dump] = {}
    damaged: dict[int, str] = {}
    for path in files:
        try:
            dump = read_dump(path)
        except DamagedFile as error:
            rank = rank_in_name(path)
            if rank is None:
                notes.append(str(error))
            else:
                damaged[rank] = error.problems[0].what
            continue
        if dump.rank in dumps:
            what = f"is of rank {dump.rank}, as {dumps[dump.rank].path} is"
            raise InputError([Problem(str(path), what, "give the dumps of one job and one moment")])
        dumps[dump.rank] = dump
    if not dumps:
        where = ", ".join(str(path) for path in paths) or "dumps"
        fix = "name the files that the flight recorder wrote (default: /tmp/nccl_trace_rank_N)"
        raise InputError([Problem(where, "holds no flight-recorder dump that can be read", fix)])
    for rank in dumps:
        damaged.pop(rank, None)
    return Dumps(tuple(dumps[rank] for rank in sorted(dumps)), damaged, tuple(notes))


def read_dump(path: str | Path) -> Dump:
    """Read one dump."""
    path = Path(path)
    raw = read_bounded(path)
    if raw[:1].isspace() or raw[:1] == b"{":
        try:
            data = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            what = f"is no whole JSON: {error}"
            raise DamagedFile([Problem(str(path), what, "write the dump again")]) from None
    else:
        data = loads(raw, str(path))
    return parse_dump(data, str(path), rank_in_name(path), len(raw))


def parse_dump(data: Any, where: str, rank: int | None, num_bytes: int) -> Dump:
    """Turn a dump's plain data into records; `rank` is what the file's name says."""
    if not isinstance(data, dict) or not isinstance(data.get("entries", []), list | tuple):
        what = "is no flight-recorder dump: it is no mapping with a list of entries"
        raise InputError([Problem(where, what, "name files that the flight recorder wrote")])
    if not data.keys() & {"entries", "pg_config", "pg_status"}:
        what = "is no flight-recorder dump: it has neither entries nor process groups"
        raise InputError([Problem(where, what, "name files that the flight recorder wrote")])
    groups = _groups(data.get("pg_config"))
    rank = _own_rank(rank, groups.values(), where)
    entries = [entry for entry in data.get("entries", []) if isinstance(entry, dict)]
    if len(entries) > num_bytes:
        raise InputError([Problem(where, "lists one entry over and over", "write the dump again")])
    seen: dict[int, tuple[Frame, ...]] = {}
    budget = [num_bytes]
    known = dict(groups)
    operations = sorted(
        (_operation(entry, rank, known, seen, budget) for entry in entries),
        key=lambda operation: operation.record,
    )
    if budget[0] < 0:
        raise InputError([Problem(where, "unfolds to more than it holds", "write the dump again")])
    own_groups = tuple(dict.fromkeys(known.values()))
    ids = {
        _text(entry.get("pg_id")): operation.group
        for entry, operation in zip(
            sorted(entries, key=lambda entry: _whole(entry.get("record_id"))),
            operations,
            strict=True,
        )
        if entry.get("pg_id") is not None
    }
    progress = _progress(data.get("pg_status"), ids, groups)
    version = _text(data.get("version"))
    return Dump(rank, where, version, own_groups, progress, tuple(operations))


def _own_rank(named: int | None, groups: Iterable[Group], where: str) -> int:
    """Hold the name's rank against the groups, all of which contain the rank that wrote them."""
    possible: set[int] | None = None
    for group in groups:
        if group.ranks:
            possible = set(group.ranks) if possible is None else possible & set(group.ranks)
    if possible and len(possible) == 1 and named not in possible:
        return next(iter(possible))
    if named is not None:
        return named
    fix = "let the file's name end with the rank, such as nccl_trace_rank_12"
    raise InputError([Problem(where, "does not tell whose dump it is", fix)])


# Fields


def _groups(config: Any) -> dict[str, Group]:
    found: dict[str, Group] = {}
    if isinstance(config, dict):
        for key, value in config.items():
            if isinstance(value, dict):
                name = _text(value.get("name")) or _text(key)
                ranks = _ranks(value.get("ranks"))
                found[name] = Group(name, _text(value.get("desc")), ranks)
    return found


_NUMBER = re.compile(r"\d{1,9}")


def _ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(dict.fromkeys(int(number) for number in _NUMBER.findall(value)))
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(rank for rank in value if type(rank) is int and rank >= 0))
    return ()


def _progress(
    status: Any, ids: Mapping[str, Group], groups: Mapping[str, Group]
) -> dict[Group, Progress]:
    """Give each group its counts. They are told by a number that only this rank knows.

    Entries tell which group a number means. Where a rank has none left, both lists stand in
    the order in which the groups were made: equally long lists are matched place by place.
    """
    if not isinstance(status, dict):
        return {}
    rows = {_text(key): value for key, value in status.items() if isinstance(value, dict)}
    meaning = dict(ids)
    if all(map(str.isdecimal, [*rows, *groups])) and all(len(name) < 10 for name in groups):
        in_order = sorted(groups.values(), key=lambda group: int(group.name))
        used = [key for key in rows if _whole(rows[key].get("last_enqueued_collective"), -1) >= 0]
        for keys in (list(rows), used):
            if len(keys) == len(in_order):
                paired = dict(zip(sorted(keys, key=int), in_order, strict=True))
                if all(paired.get(key, group) == group for key, group in ids.items()):
                    meaning = paired | meaning
                break
    return {
        meaning[key]: Progress(
            _whole(row.get("last_enqueued_collective"), -1),
            _whole(row.get("last_started_collective"), -1),
            _whole(row.get("last_completed_collective"), -1),
        )
        for key, row in rows.items()
        if key in meaning
    }


_P2P = re.compile(r"^(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")


def _operation(
    entry: Mapping[Any, Any],
    rank: int,
    known: dict[str, Group],
    seen: dict[int, tuple[Frame, ...]],
    budget: list[int],
) -> Operation:
    group = _group_of(entry, known)
    title = _text(entry.get("profiling_name")).rpartition(":")[2]
    name, source, destination = title, -1, -1
    told = _P2P.match(title)
    if told:
        name = told[1]
        mine, other = _job_rank(group, rank, int(told[2]), int(told[3]))
        source, destination = (mine, other) if name == "send" else (other, mine)
    is_p2p = bool(entry.get("is_p2p")) or told is not None
    return Operation(
        record=_whole(entry.get("record_id")),
        group=group,
        name=name,
        sequence=_whole(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
                        or entry.get("seq_id")),
        is_p2p=is_p2p,
        source=source,
        destination=destination,
        state=_text(entry.get("state")),
        created_ns=_whole(entry.get("time_created_ns")),
        started_ns=_whole(entry.get("time_discovered_started_ns")),
        completed_ns=_whole(entry.get("time_discovered_completed_ns")),
        input_sizes=_sizes(entry.get("input_sizes"), budget),
        output_sizes=_sizes(entry.get("output_sizes"), budget),
        dtypes=_words(entry.get("input_dtypes") or entry.get("output_dtypes"), budget),
        timeout_ms=_whole(entry.get("timeout_ms")),
        frames=_frames(entry.get("frames"), seen, budget),
    )  # fmt: skip


def _group_of(entry: Mapping[Any, Any], known: dict[str, Group]) -> Group:
    told = entry.get("process_group")
    if isinstance(told, list | tuple) and told:
        name = _text(told[0])
        description = _text(told[1]) if len(told) > 1 else ""
    else:
        name, description = _text(entry.get("pg_name")) or _text(entry.get("pg_id")), ""
    if name not in known:
        known[name] = Group(name, description, ())
    return known[name]


def _job_rank(group: Group, rank: int, mine: int, other: int) -> tuple[int, int]:
    """Translate a group's own numbers, unless the name already speaks of the job's ranks."""
    ranks = group.ranks
    if mine < len(ranks) and ranks[mine] == rank and other < len(ranks):
        return rank, ranks[other]
    if mine == rank and (not ranks or other in ranks):
        return rank, other
    return rank, ranks[other] if other < len(ranks) else other


def _whole(value: Any, default: int = 0) -> int:
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else default


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value[:4096]
    return str(value) if type(value) is int and abs(value) < 1 << 64 else ""


def _sizes(value: Any, budget: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(_whole(size) for size in _list(shape, budget)) for shape in _list(value, budget)
    )


def _words(value: Any, budget: list[int]) -> tuple[str, ...]:
    return tuple(_text(word) for word in _list(value, budget))


def _list(value: Any, budget: list[int]) -> Sequence[Any]:
    """Return a list, as long as all lists unfolded so far are no more than the file's bytes."""
    if not isinstance(value, list | tuple):
        return ()
    budget[0] -= len(value)
    return value if budget[0] >= 0 else ()


def _frames(value: Any, seen: dict[int, tuple[Frame, ...]], budget: list[int]) -> tuple[Frame, ...]:
    if not isinstance(value, list | tuple):
        return ()
    if id(value) not in seen:
        seen[id(value)] = tuple(
            Frame(_text(frame.get("name")), _text(frame.get("filename")), _whole(frame.get("line")))
            for frame in _list(value, budget)
            if isinstance(frame, dict)
        )
    return seen[id(value)]
