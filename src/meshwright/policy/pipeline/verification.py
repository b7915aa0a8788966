"""Do the sends and receives of a schedule match? It knows nothing of waiting.

Each result that changes ranks is sent once, after it exists, and received once, before its use.
Between two ranks messages arrive in the order they were sent (NCCL knows no tags), so both sides
must list them in the same order.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from meshwright.errors import Problem
from meshwright.policy.pipeline.dependency_walk import (
    DependencyRules,
    DependencyWalk,
    SendMode,
    find_producers,
    walk_schedule,
)
from meshwright.policy.pipeline.in_flight_activations import count_in_flight
from meshwright.policy.pipeline.schedule import (
    PIPELINE_OPS,
    TRANSFER_OPS,
    PipelineAction,
    PipelineOp,
    PipelineSchedule,
    split_concurrent_groups,
)

_Key = tuple[PipelineOp, int, int]

_PASSES: dict[str, tuple[PipelineOp, ...]] = {
    "send_forward": ("F",),
    "recv_forward": ("F",),
    "send_backward": ("B", "I"),
    "recv_backward": ("B", "I"),
}
"""The pass whose result a send takes, or that a receive feeds."""


def find_transfer_mismatches(schedule: PipelineSchedule) -> Iterator[Problem]:
    """Yield every transfer that is missing, needless, doubled, out of place or out of order."""
    wanted = dict(_wanted(schedule))
    sound = True
    for rank, lane in enumerate(schedule.actions):
        seen = {(action.op, action.chunk, action.microbatch): i for i, action in enumerate(lane)}
        for index, action in enumerate(lane):
            if action.op in TRANSFER_OPS:
                for problem in _faults(rank, index, action, seen, wanted):
                    sound = False
                    yield problem
        for key in seen.keys() & wanted.keys():
            del wanted[key]
    for (op, chunk, microbatch), rank in wanted.items():
        sound = False
        what = f"{op} of chunk {chunk}, microbatch {microbatch} is missing"
        yield Problem(f"rank {rank}", what)
    if sound:
        yield from _out_of_order(schedule)


def _wanted(schedule: PipelineSchedule) -> Iterator[tuple[_Key, int]]:
    """Every transfer there must be, with the rank that does it."""
    for microbatch, route in enumerate(schedule.route_by_microbatch()):
        for chunk, (rank, following) in enumerate(pairwise(route)):
            if rank != following:
                yield ("send_forward", chunk, microbatch), rank
                yield ("recv_forward", chunk + 1, microbatch), following
                yield ("send_backward", chunk + 1, microbatch), following
                yield ("recv_backward", chunk, microbatch), rank


def _faults(
    rank: int, index: int, action: PipelineAction, seen: dict[_Key, int], wanted: dict[_Key, int]
) -> Iterator[Problem]:
    where = f"rank {rank}, action {index}"
    op, chunk, microbatch, _ = action
    if (op, chunk, microbatch) not in wanted:
        yield Problem(where, f"{action} moves nothing that another rank needs", "drop it")
        return
    if seen[op, chunk, microbatch] != index:
        yield Problem(where, f"{action} stands here and again further on", "drop one")
        return
    for own in _PASSES[op]:
        use = seen.get((own, chunk, microbatch))
        if use is None:
            continue  # the other form of the backward; a missing pass is reported elsewhere
        if op.startswith("send") and index < use:
            yield Problem(where, f"{action} before it exists", f"move it behind action {use}")
        if op.startswith("recv") and index > use:
            yield Problem(where, f"{action} after its use", f"move it before action {use}")


def _out_of_order(schedule: PipelineSchedule) -> Iterator[Problem]:
    """The first message between every two ranks that the receiver takes for another."""
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    for rank, lane in enumerate(schedule.actions):
        for index, action in enumerate(lane):
            if action.op not in TRANSFER_OPS:
                continue
            op, chunk, microbatch, _ = action
            end, way = op.split("_")
            peer = schedule.peer_rank(action)
            if end == "send":
                to = chunk + 1 if way == "forward" else chunk - 1
                sent.setdefault((rank, peer), []).append((way, to, microbatch))
            else:
                received.setdefault((peer, rank), []).append((way, chunk, microbatch, index))
    for (sender, receiver), messages in sent.items():
        for sends, takes in zip(messages, received[sender, receiver], strict=True):
            if sends != takes[:3]:
                what = (
                    f"takes {takes[0]} for chunk {takes[1]}, microbatch {takes[2]} from rank "
                    f"{sender}, which next sends {sends[0]} for chunk {sends[1]}, microbatch "
                    f"{sends[2]}"
                )
                fix = "list both sides in the same order"
                yield Problem(f"rank {receiver}, action {takes[3]}", what, fix)
                break


MAX_LISTED = 16
"""Problems of one sort that are listed one by one; the rest are counted."""


def verify_schedule(
    schedule: PipelineSchedule, *, sends: SendMode = "rendezvous", max_in_flight: int | None = None
) -> tuple[Problem, ...]:
    """Return what is wrong with a schedule; empty means sound.

    `sends` says how written sends behave: "rendezvous" ones wait for their receiver, the strictest
    reading; "buffered" ones leave at once. `max_in_flight` bounds what each rank may hold, in
    chunk-microbatches.
    """
    problems = _short(_shape(schedule)) or _short(_places(schedule))
    if problems:
        return problems  # the checks below count on names that exist
    problems = _short(_counts(schedule)) + _short(_joins(schedule))
    if schedule.has_transfers:
        problems += _short(find_transfer_mismatches(schedule))
    if problems:
        return problems  # a list with holes deadlocks for that reason alone
    return _deadlock(schedule, sends) + _short(_excess(schedule, max_in_flight))


def format_location(rank: int, index: int) -> str:
    """Name a place in a schedule."""
    return f"rank {rank}, action {index}"


def _short(problems: Iterator[Problem]) -> tuple[Problem, ...]:
    listed: list[Problem] = []
    more = 0
    for problem in problems:
        if len(listed) < MAX_LISTED:
            listed.append(problem)
        else:
            more += 1
    if more:
        listed.append(Problem("schedule", f"{more} more problems like these"))
    return tuple(listed)


def _shape(schedule: PipelineSchedule) -> Iterator[Problem]:
    if schedule.microbatches < 1:
        yield Problem("microbatches", f"{schedule.microbatches} is not at least 1")
    if not schedule.actions:
        yield Problem("actions", "there is no rank")
    if not schedule.routes or not schedule.routes[0]:
        yield Problem("routes", "there is no chunk")
        return
    for number, route in enumerate(schedule.routes):
        if len(route) != len(schedule.routes[0]):
            what = f"passes {len(route)} chunks, the first route {len(schedule.routes[0])}"
            yield Problem(f"routes[{number}]", what)
        for chunk, rank in enumerate(route):
            if not 0 <= rank < schedule.ranks:
                what = f"names rank {rank} of {schedule.ranks}"
                yield Problem(f"routes[{number}][{chunk}]", what)


def _places(schedule: PipelineSchedule) -> Iterator[Problem]:
    """Every action names an existing chunk and microbatch, and stands on the right rank."""
    routes = schedule.route_by_microbatch()
    chunks, microbatches = schedule.chunks, schedule.microbatches
    for rank, lane in enumerate(schedule.actions):
        for index, action in enumerate(lane):
            op, chunk, microbatch, _ = action
            if op not in PIPELINE_OPS:
                yield Problem(
                    format_location(rank, index),
                    f"{op!r} is not one of {', '.join(sorted(PIPELINE_OPS))}",
                )
            elif not (0 <= chunk < chunks and 0 <= microbatch < microbatches):
                what = f"{action}: there are {chunks} chunks and {microbatches} microbatches"
                yield Problem(format_location(rank, index), what)
            elif routes[microbatch][chunk] != rank:
                fix = f"move it to rank {routes[microbatch][chunk]}"
                yield Problem(
                    format_location(rank, index), f"{action} does not belong on this rank", fix
                )


def _counts(schedule: PipelineSchedule) -> Iterator[Problem]:
    """Every microbatch passes every chunk once: F, and B or both I and W."""
    width = schedule.microbatches
    seen: dict[str, dict[int, int]] = {"F": {}, "B": {}, "I": {}, "W": {}}
    for rank, lane in enumerate(schedule.actions):
        for index, action in enumerate(lane):
            if action.op in TRANSFER_OPS:
                continue
            found = seen[action.op]
            key = action.chunk * width + action.microbatch
            if key in found:
                fix = f"it stands at action {found[key]} already"
                yield Problem(format_location(rank, index), f"{action} for the second time", fix)
            found[key] = index
    whole = schedule.chunks * width
    if all(len(seen[op]) == whole for op in "FB") and not seen["I"] and not seen["W"]:
        return
    for key in range(whole):
        chunk, microbatch = divmod(key, width)
        where = f"rank {schedule.rank_of(chunk, microbatch)}"
        parts = {op for op in "FBIW" if key in seen[op]}
        yield from _passes(where, f"chunk {chunk}, microbatch {microbatch}", parts)


def _passes(where: str, what: str, parts: set[str]) -> Iterator[Problem]:
    """Judge the passes of one microbatch through one chunk."""
    if "F" not in parts:
        yield Problem(where, f"F of {what} is missing")
    back = parts - {"F"}
    if not back:
        yield Problem(where, f"the backward of {what} is missing", "add B, or I and W")
    elif "B" in back and len(back) > 1:
        extra = " and ".join(sorted(back - {"B"}))
        yield Problem(where, f"{what} runs {extra} beside B", "keep B, or I and W")
    elif "B" not in back and len(back) == 1:
        (absent,) = {"I", "W"} - back
        yield Problem(where, f"{absent} of {what} is missing beside {back.pop()}")


def _joins(schedule: PipelineSchedule) -> Iterator[Problem]:
    """What starts together is a batch of transfers, or one forward and one backward."""
    for rank, lane in enumerate(schedule.actions):
        if lane and lane[0].is_concurrent:
            yield Problem(
                format_location(rank, 0), f"{lane[0]} is joined to nothing", "clear `joined`"
            )
        if not any(action.is_concurrent for action in lane):
            continue
        index = 0
        for group in split_concurrent_groups(lane):
            ops = [action.op for action in group]
            moves = sum(op in TRANSFER_OPS for op in ops)
            overlap = len(ops) == 2 and "F" in ops and bool({"B", "I"} & set(ops))
            if len(ops) > 1 and moves != len(ops) and not overlap:
                what = f"{', '.join(ops)} start together"
                fix = "join transfers with transfers, or one F with one B or I"
                yield Problem(format_location(rank, index), what, fix)
            index += len(group)


def _excess(schedule: PipelineSchedule, most: int | None) -> Iterator[Problem]:
    if most is None:
        return
    for rank, held in enumerate(count_in_flight(schedule)):
        if held > most:
            yield Problem(f"rank {rank}", f"holds {held} chunk-microbatches, more than {most}")


def _deadlock(schedule: PipelineSchedule, sends: SendMode) -> tuple[Problem, ...]:
    rules = DependencyRules(schedule, sends)
    walked = walk_schedule(rules)
    if not walked.blocked:
        return ()
    circle = _shortest_circle(rules, walked)
    firsts = [_first_indices(lane) for lane in rules.groups_by_rank]
    lines = []
    for rank, index, other, later in circle:
        own, wanted = (
            _shown(rules.groups_by_rank[rank][index]),
            _shown(rules.groups_by_rank[other][later]),
        )
        where = "the same rank" if other == rank else f"rank {other}"
        lines.append(
            f"rank {rank} waits at action {firsts[rank][index]} ({own}) for action "
            f"{firsts[other][later]} of {where} ({wanted})"
        )
    rank, index = circle[0][:2]
    how = fix = ""
    if schedule.has_transfers:
        how = f" with {sends} sends"
        if (
            sends == "rendezvous"
            and not walk_schedule(DependencyRules(schedule, "buffered")).blocked
        ):
            fix = "buffer the sends, batch them with the receives, or use with_transfers"
    what = f"deadlock{how}: " + "; ".join(lines)
    return (Problem(format_location(rank, firsts[rank][index]), what, fix),)


def _shortest_circle(
    rules: DependencyRules, walked: DependencyWalk
) -> list[tuple[int, int, int, int]]:
    """Return the fewest ranks that wait for each other: rank, group, other rank, its group."""
    source = find_producers(rules)
    waits = {
        rank: [source[key] for key in missing if key in source]
        for rank, missing in walked.missing_keys.items()
    }
    best: list[int] = []
    for start in waits:
        path = _way_back(start, waits)
        if path and (not best or len(path) < len(best)):
            best = path
    circle = []
    for rank, other in zip(best, [*best[1:], best[0]], strict=True):
        later = next(index for target, index in waits[rank] if target == other)
        circle.append((rank, walked.blocked[rank], other, later))
    return circle


def _way_back(start: int, waits: dict[int, list[tuple[int, int]]]) -> list[int]:
    """The shortest chain of waiting ranks from `start` back to itself; empty where none is."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for other, _ in waits[rank]:
            if other == start:
                path = [rank]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if other not in came:
                came[other] = rank
                queue.append(other)
    return []


def _first_indices(cut: list[tuple[PipelineAction, ...]]) -> list[int]:
    firsts = [0]
    for group in cut:
        firsts.append(firsts[-1] + len(group))
    return firsts


def _shown(group: tuple[PipelineAction, ...]) -> str:
    return " with ".join(str(action) for action in group)
