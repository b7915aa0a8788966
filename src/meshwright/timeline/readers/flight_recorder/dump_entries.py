"""Turns the fields of a flight recorder's dump into records; any of them may be absent or odd.

Peers' names of point-to-point operations ("send 0->3") count within the group, so they are
translated to ranks of the job.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.timeline.readers.flight_recorder.dump_records import (
    GroupProgress,
    RecordedGroup,
    RecordedOperation,
    StackFrame,
)


def parse_groups(config: Any) -> dict[str, RecordedGroup]:
    """Return the groups that a dump describes, by name."""
    found: dict[str, RecordedGroup] = {}
    seen: dict[int, tuple[int, ...]] = {}  # a file may name one list over and over
    if isinstance(config, dict):
        for key, value in config.items():
            if isinstance(value, dict):
                name = parse_text(value.get("name")) or parse_text(key)
                told = value.get("ranks")
                if id(told) not in seen:
                    seen[id(told)] = _ranks(told)
                found[name] = RecordedGroup(name, parse_text(value.get("desc")), seen[id(told)])
    return found


_NUMBER = re.compile(r"\d{1,9}")


_LONG = 1 << 16


@lru_cache(maxsize=4096)
def _ranks_in(text: str) -> tuple[int, ...]:
    """Read a list of ranks; dumps of one job repeat the same ones, and equal tuples are one."""
    return tuple(dict.fromkeys(int(number) for number in _NUMBER.findall(text)))


def _ranks(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return _ranks_in(value) if len(value) < _LONG else _ranks_in.__wrapped__(value)
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(rank for rank in value if type(rank) is int and rank >= 0))
    return ()


def parse_progress(
    status: Any, ids: Mapping[str, RecordedGroup], groups: Mapping[str, RecordedGroup]
) -> dict[RecordedGroup, GroupProgress]:
    """Give each group its counts. They are told by a number that only this rank knows.

    Entries tell which group a number means. Where a rank has none left, both lists stand in
    the order in which the groups were made: equally long lists are matched place by place.
    """
    if not isinstance(status, dict):
        return {}
    rows = {parse_text(key): value for key, value in status.items() if isinstance(value, dict)}
    meaning = dict(ids)
    if all(map(str.isdecimal, [*rows, *groups])) and all(len(name) < 10 for name in groups):
        in_order = sorted(groups.values(), key=lambda group: int(group.name))
        used = [
            key for key in rows if parse_int64(rows[key].get("last_enqueued_collective"), -1) >= 0
        ]
        for keys in (list(rows), used):
            if len(keys) == len(in_order):
                paired = dict(zip(sorted(keys, key=int), in_order, strict=True))
                if all(paired.get(key, group) == group for key, group in ids.items()):
                    meaning = paired | meaning
                break
    return {
        meaning[key]: GroupProgress(
            parse_int64(row.get("last_enqueued_collective"), -1),
            parse_int64(row.get("last_started_collective"), -1),
            parse_int64(row.get("last_completed_collective"), -1),
        )
        for key, row in rows.items()
        if key in meaning
    }


_P2P = re.compile(r"^(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")


class DumpEntryParser:
    """Turns the entries of one dump into records; what they repeat is worked out once."""

    def __init__(self, rank: int, groups: Mapping[str, RecordedGroup], budget: int) -> None:
        self.rank = rank
        self.parsed_groups = dict(groups)
        """Groups by name, those included that only entries name."""
        self.ids: dict[str, RecordedGroup] = {}
        """Groups by the number that only this rank knows them by."""
        self.budget = budget
        """How many items of lists may still be unfolded: a file may name one list many times."""
        self._titles: dict[tuple[str, str], _Title] = {}
        self._frames: dict[int, StackFrame] = {}

    def parse_operation(self, entry: Mapping[Any, Any], place: int) -> RecordedOperation:
        """Return the entry at a place of the list as a record."""
        get = entry.get
        group = self._group(get("process_group"), entry)
        number = get("pg_id")
        if number is not None:
            self.ids[parse_text(number)] = group
        told = parse_text(get("profiling_name"))
        title = self._titles.get((told, group.name))
        if title is None:
            title = self._titles[told, group.name] = _title(told, group, self.rank)
        is_p2p = title.is_p2p or bool(get("is_p2p"))
        record = get("record_id")
        state = parse_text(get("state"))
        completed_ns = parse_int64(get("time_discovered_completed_ns"))
        if state != "completed" and get("retired") is True:
            # Backends without events (gloo) leave the state as it was and retire what has ended.
            # With NCCL, retired but not completed means that it ended by an error.
            state = "retired" if title.is_nccl else "completed"
        return RecordedOperation(
            place if record is None else parse_int64(record),  # versions before 2.1: in order
            group,
            title.name,
            parse_int64(get("p2p_seq_id" if is_p2p else "collective_seq_id") or get("seq_id")),
            is_p2p,
            title.source,
            title.destination,
            state,
            parse_int64(get("time_created_ns")) or 1000 * parse_int64(get("time_created_us")),
            parse_int64(get("time_discovered_started_ns")),
            completed_ns,
            self._sizes(get("input_sizes")),
            self._sizes(get("output_sizes")),
            self._words(get("input_dtypes") or get("output_dtypes")),
            parse_int64(get("timeout_ms")),
            # What has ended well is nobody's place any more, and most of a ring has.
            () if state == "completed" else self._stack(get("frames")),
        )

    def _group(self, told: Any, entry: Mapping[Any, Any]) -> RecordedGroup:
        if isinstance(told, list | tuple) and told:
            name = parse_text(told[0])
            description = parse_text(told[1]) if len(told) > 1 else ""
        else:
            name = parse_text(entry.get("pg_name")) or parse_text(entry.get("pg_id"))
            description = ""
        group = self.parsed_groups.get(name)
        if group is None:
            group = self.parsed_groups[name] = RecordedGroup(name, description, ())
        return group

    def _list(self, value: Any) -> Sequence[Any]:
        """Return a list, as long as all lists unfolded so far are no more than the file's bytes."""
        if not isinstance(value, list | tuple):
            return ()
        self.budget -= len(value)
        return value if self.budget >= 0 else ()

    def _sizes(self, value: Any) -> tuple[tuple[int, ...], ...]:
        return tuple([_whole(self._list(shape)) for shape in self._list(value)])

    def _words(self, value: Any) -> tuple[str, ...]:
        return tuple([parse_text(word) for word in self._list(value)])

    def _stack(self, value: Any) -> tuple[StackFrame, ...]:
        return tuple([self._frame(each) for each in self._list(value) if isinstance(each, dict)])

    def _frame(self, told: dict[Any, Any]) -> StackFrame:
        found = self._frames.get(id(told))
        if found is None:
            found = self._frames[id(told)] = StackFrame(
                parse_text(told.get("name")),
                parse_text(told.get("filename")),
                parse_int64(told.get("line")),
            )
        return found


class _Title(NamedTuple):
    """What the name of an operation says, in a group."""

    name: str
    is_nccl: bool
    is_p2p: bool
    source: int
    destination: int


def _title(told: str, group: RecordedGroup, rank: int) -> _Title:
    library, _, name = told.rpartition(":")
    is_nccl = library.startswith(("nccl", "rccl"))
    ends = _P2P.match(name)
    if not ends:
        return _Title(name, is_nccl, False, -1, -1)
    mine, other = _job_rank(group, rank, int(ends[2]), int(ends[3]))
    source, destination = (mine, other) if ends[1] == "send" else (other, mine)
    return _Title(ends[1], is_nccl, True, source, destination)


def _whole(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(values) if set(map(type, values)) <= _INT else tuple(map(parse_int64, values))


_INT = {int}


def coalesce_operations(operations: Sequence[RecordedOperation]) -> list[RecordedOperation]:
    """Give the operations of coalesced groups the state of the entry that closes their group.

    Inside a group they are recorded without state and share a number; all begin at once. Coalesced
    collectives become one operation with the sizes of all.
    """
    batches: dict[tuple[RecordedGroup, bool, int], list[RecordedOperation]] = {}
    for each in operations:
        batches.setdefault((each.group, each.is_p2p, each.sequence_id), []).append(each)
    found = []
    for batch in batches.values():
        last = batch[-1]
        if len(batch) == 1 or not last.name.endswith("coalesced"):
            found += batch
            continue
        members = [
            each._replace(record_id=last.record_id, state=last.state, started_ns=last.started_ns,
                          completed_ns=last.completed_ns, frames=each.frames or last.frames)
            for each in batch[:-1]
        ]  # fmt: skip
        found += members if last.is_p2p else [_joined(members)]
    return sorted(found, key=lambda each: each.record_id)


def infer_completed(operations: Sequence[RecordedOperation]) -> list[RecordedOperation]:
    """Count what a rank enqueued in a group before something it saw end as ended too.

    Collectives of a group run in order. The mark of one may be late, or lost where many threads
    make it, as gloo's do.
    """
    last: dict[RecordedGroup, int] = {}
    for each in operations:
        if each.is_completed and not each.is_p2p:
            last[each.group] = max(last.get(each.group, -1), each.sequence_id)
    return [
        each._replace(state="completed")
        if each.is_pending and not each.is_p2p and each.sequence_id < last.get(each.group, -1)
        else each
        for each in operations
    ]


def _joined(members: Sequence[RecordedOperation]) -> RecordedOperation:
    names = dict.fromkeys(each.name for each in members)
    return members[0]._replace(
        name="+".join(names),
        input_sizes=tuple(size for each in members for size in each.input_sizes),
        output_sizes=tuple(size for each in members for size in each.output_sizes),
        dtypes=tuple(word for each in members for word in each.dtypes),
    )


def _job_rank(group: RecordedGroup, rank: int, mine: int, other: int) -> tuple[int, int]:
    """Translate a group's own numbers, unless the name already speaks of the job's ranks."""
    ranks = group.ranks
    if mine < len(ranks) and ranks[mine] == rank and other < len(ranks):
        return rank, ranks[other]
    if mine == rank and (not ranks or other in ranks):
        return rank, other
    return rank, ranks[other] if other < len(ranks) else other


def parse_int64(value: Any, default: int = 0) -> int:
    """Return an integer of 64 bits, or what stands for none."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else default


def parse_text(value: Any) -> str:
    """Return a text of bounded length; numbers count as texts."""
    if isinstance(value, str):
        return value[:4096]
    return str(value) if type(value) is int and abs(value) < 1 << 64 else ""
