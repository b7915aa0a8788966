"""Turns the fields of a flight recorder's dump into records; any of them may be absent or odd.

Peers' names of point-to-point operations ("send 0->3") count within the group, so they are
translated to ranks of the job.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from meshwright.timeline.readers.flight_records import Frame, Group, Operation, Progress


def groups_of(config: Any) -> dict[str, Group]:
    """Return the groups that a dump describes, by name."""
    found: dict[str, Group] = {}
    seen: dict[int, tuple[int, ...]] = {}  # a file may name one list over and over
    if isinstance(config, dict):
        for key, value in config.items():
            if isinstance(value, dict):
                name = text_of(value.get("name")) or text_of(key)
                told = value.get("ranks")
                if id(told) not in seen:
                    seen[id(told)] = _ranks(told)
                found[name] = Group(name, text_of(value.get("desc")), seen[id(told)])
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


def progress_of(
    status: Any, ids: Mapping[str, Group], groups: Mapping[str, Group]
) -> dict[Group, Progress]:
    """Give each group its counts. They are told by a number that only this rank knows.

    Entries tell which group a number means. Where a rank has none left, both lists stand in
    the order in which the groups were made: equally long lists are matched place by place.
    """
    if not isinstance(status, dict):
        return {}
    rows = {text_of(key): value for key, value in status.items() if isinstance(value, dict)}
    meaning = dict(ids)
    if all(map(str.isdecimal, [*rows, *groups])) and all(len(name) < 10 for name in groups):
        in_order = sorted(groups.values(), key=lambda group: int(group.name))
        used = [key for key in rows if whole_of(rows[key].get("last_enqueued_collective"), -1) >= 0]
        for keys in (list(rows), used):
            if len(keys) == len(in_order):
                paired = dict(zip(sorted(keys, key=int), in_order, strict=True))
                if all(paired.get(key, group) == group for key, group in ids.items()):
                    meaning = paired | meaning
                break
    return {
        meaning[key]: Progress(
            whole_of(row.get("last_enqueued_collective"), -1),
            whole_of(row.get("last_started_collective"), -1),
            whole_of(row.get("last_completed_collective"), -1),
        )
        for key, row in rows.items()
        if key in meaning
    }


_P2P = re.compile(r"^(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")


def operation_of(
    entry: Mapping[Any, Any],
    rank: int,
    known: dict[str, Group],
    seen: dict[int, tuple[Frame, ...]],
    budget: list[int],
) -> Operation:
    """Return one entry as a record; lists that the file shares are counted against `budget`."""
    group = _group_of(entry, known)
    title = text_of(entry.get("profiling_name")).rpartition(":")[2]
    name, source, destination = title, -1, -1
    told = _P2P.match(title)
    if told:
        name = told[1]
        mine, other = _job_rank(group, rank, int(told[2]), int(told[3]))
        source, destination = (mine, other) if name == "send" else (other, mine)
    is_p2p = bool(entry.get("is_p2p")) or told is not None
    return Operation(
        record=whole_of(entry.get("record_id")),
        group=group,
        name=name,
        sequence=whole_of(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
                        or entry.get("seq_id")),
        is_p2p=is_p2p,
        source=source,
        destination=destination,
        state=_state(entry),
        created_ns=whole_of(entry.get("time_created_ns"))
        or 1000 * whole_of(entry.get("time_created_us")),
        started_ns=whole_of(entry.get("time_discovered_started_ns")),
        completed_ns=whole_of(entry.get("time_discovered_completed_ns")),
        input_sizes=_sizes(entry.get("input_sizes"), budget),
        output_sizes=_sizes(entry.get("output_sizes"), budget),
        dtypes=_words(entry.get("input_dtypes") or entry.get("output_dtypes"), budget),
        timeout_ms=whole_of(entry.get("timeout_ms")),
        frames=_frames(entry.get("frames"), seen, budget),
    )  # fmt: skip


def _state(entry: Mapping[Any, Any]) -> str:
    """Return an entry's state; one that was retired is waited for no more.

    Backends without events (gloo) leave the state as it was and retire what has ended. With NCCL,
    retired but not completed means that it ended by an error.
    """
    state = text_of(entry.get("state"))
    if entry.get("retired") is True and state != "completed":
        is_nccl = text_of(entry.get("profiling_name")).startswith(("nccl", "rccl"))
        return "retired" if is_nccl else "completed"
    return state


def together(operations: Sequence[Operation]) -> list[Operation]:
    """Give the operations of coalesced groups the state of the entry that closes their group.

    Inside a group they are recorded without state and share a number; all begin at once. Coalesced
    collectives become one operation with the sizes of all.
    """
    batches: dict[tuple[Group, bool, int], list[Operation]] = {}
    for each in operations:
        batches.setdefault((each.group, each.is_p2p, each.sequence), []).append(each)
    found = []
    for batch in batches.values():
        last = batch[-1]
        if len(batch) == 1 or not last.name.endswith("coalesced"):
            found += batch
            continue
        members = [
            each._replace(record=last.record, state=last.state, started_ns=last.started_ns,
                          completed_ns=last.completed_ns, frames=each.frames or last.frames)
            for each in batch[:-1]
        ]  # fmt: skip
        found += members if last.is_p2p else [_joined(members)]
    return sorted(found, key=lambda each: each.record)


def _joined(members: Sequence[Operation]) -> Operation:
    names = dict.fromkeys(each.name for each in members)
    return members[0]._replace(
        name="+".join(names),
        input_sizes=tuple(size for each in members for size in each.input_sizes),
        output_sizes=tuple(size for each in members for size in each.output_sizes),
        dtypes=tuple(word for each in members for word in each.dtypes),
    )


def _group_of(entry: Mapping[Any, Any], known: dict[str, Group]) -> Group:
    told = entry.get("process_group")
    if isinstance(told, list | tuple) and told:
        name = text_of(told[0])
        description = text_of(told[1]) if len(told) > 1 else ""
    else:
        name, description = text_of(entry.get("pg_name")) or text_of(entry.get("pg_id")), ""
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


def whole_of(value: Any, default: int = 0) -> int:
    """Return an integer of 64 bits, or what stands for none."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else default


def text_of(value: Any) -> str:
    """Return a text of bounded length; numbers count as texts."""
    if isinstance(value, str):
        return value[:4096]
    return str(value) if type(value) is int and abs(value) < 1 << 64 else ""


def _sizes(value: Any, budget: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        [tuple([whole_of(size) for size in _list(shape, budget)]) for shape in _list(value, budget)]
    )


def _words(value: Any, budget: list[int]) -> tuple[str, ...]:
    return tuple([text_of(word) for word in _list(value, budget)])


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
            Frame(
                text_of(frame.get("name")),
                text_of(frame.get("filename")),
                whole_of(frame.get("line")),
            )
            for frame in _list(value, budget)
            if isinstance(frame, dict)
        )
    return seen[id(value)]
