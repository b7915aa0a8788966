"""`verify`: is a schedule sound? Names the rank and the action where it is not.

Sound means: every microbatch passes every chunk once forward and once backward, on the rank that
holds the chunk; ranks that run their lists in order, waiting for what they need, all finish; sends
and receives, where written, match; and no rank holds more than it may.
"""

from collections import deque
from collections.abc import Iterator

from meshwright.errors import Problem
from meshwright.policy.pipeline.activations import in_flight
from meshwright.policy.pipeline.matching import mismatches
from meshwright.policy.pipeline.schedule import OPS, TRANSFERS, Action, Schedule, groups
from meshwright.policy.pipeline.walk import Rules, Sends, Walk, givers, walk

MOST_LISTED = 16
"""Problems of one sort that are listed one by one; the rest are counted."""


def verify(
    schedule: Schedule, *, sends: Sends = "rendezvous", max_in_flight: int | None = None
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
        problems += _short(mismatches(schedule))
    if problems:
        return problems  # a list with holes deadlocks for that reason alone
    return _deadlock(schedule, sends) + _short(_excess(schedule, max_in_flight))


def at(rank: int, index: int) -> str:
    """Name a place in a schedule."""
    return f"rank {rank}, action {index}"


def _short(problems: Iterator[Problem]) -> tuple[Problem, ...]:
    listed: list[Problem] = []
    more = 0
    for problem in problems:
        if len(listed) < MOST_LISTED:
            listed.append(problem)
        else:
            more += 1
    if more:
        listed.append(Problem("schedule", f"{more} more problems like these"))
    return tuple(listed)


def _shape(schedule: Schedule) -> Iterator[Problem]:
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


def _places(schedule: Schedule) -> Iterator[Problem]:
    """Every action names an existing chunk and microbatch, and stands on the right rank."""
    routes = schedule.route_by_microbatch()
    chunks, microbatches = schedule.chunks, schedule.microbatches
    for rank, lane in enumerate(schedule.actions):
        for index, action in enumerate(lane):
            op, chunk, microbatch, _ = action
            if op not in OPS:
                yield Problem(at(rank, index), f"{op!r} is not one of {', '.join(sorted(OPS))}")
            elif not (0 <= chunk < chunks and 0 <= microbatch < microbatches):
                what = f"{action}: there are {chunks} chunks and {microbatches} microbatches"
                yield Problem(at(rank, index), what)
            elif routes[microbatch][chunk] != rank:
                fix = f"move it to rank {routes[microbatch][chunk]}"
                yield Problem(at(rank, index), f"{action} does not belong on this rank", fix)


def _counts(schedule: Schedule) -> Iterator[Problem]:
    """Every microbatch passes every chunk once: F, and B or both I and W."""
    width = schedule.microbatches
    seen: dict[str, dict[int, int]] = {"F": {}, "B": {}, "I": {}, "W": {}}
    for rank, lane in enumerate(schedule.actions):
        for index, action in enumerate(lane):
            if action.op in TRANSFERS:
                continue
            found = seen[action.op]
            key = action.chunk * width + action.microbatch
            if key in found:
                fix = f"it stands at action {found[key]} already"
                yield Problem(at(rank, index), f"{action} for the second time", fix)
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


def _joins(schedule: Schedule) -> Iterator[Problem]:
    """What starts together is a batch of transfers, or one forward and one backward."""
    for rank, lane in enumerate(schedule.actions):
        if lane and lane[0].joined:
            yield Problem(at(rank, 0), f"{lane[0]} is joined to nothing", "clear `joined`")
        if not any(action.joined for action in lane):
            continue
        index = 0
        for group in groups(lane):
            ops = [action.op for action in group]
            moves = sum(op in TRANSFERS for op in ops)
            overlap = len(ops) == 2 and "F" in ops and bool({"B", "I"} & set(ops))
            if len(ops) > 1 and moves != len(ops) and not overlap:
                what = f"{', '.join(ops)} start together"
                fix = "join transfers with transfers, or one F with one B or I"
                yield Problem(at(rank, index), what, fix)
            index += len(group)


def _excess(schedule: Schedule, most: int | None) -> Iterator[Problem]:
    if most is None:
        return
    for rank, held in enumerate(in_flight(schedule)):
        if held > most:
            yield Problem(f"rank {rank}", f"holds {held} chunk-microbatches, more than {most}")


def _deadlock(schedule: Schedule, sends: Sends) -> tuple[Problem, ...]:
    rules = Rules(schedule, sends)
    walked = walk(rules)
    if not walked.stuck:
        return ()
    circle = _shortest_circle(rules, walked)
    firsts = [_first_indices(lane) for lane in rules.cut]
    lines = []
    for rank, index, other, later in circle:
        own, wanted = _shown(rules.cut[rank][index]), _shown(rules.cut[other][later])
        where = "the same rank" if other == rank else f"rank {other}"
        lines.append(
            f"rank {rank} waits at action {firsts[rank][index]} ({own}) for action "
            f"{firsts[other][later]} of {where} ({wanted})"
        )
    rank, index = circle[0][:2]
    how = fix = ""
    if schedule.has_transfers:
        how = f" with {sends} sends"
        if sends == "rendezvous" and not walk(Rules(schedule, "buffered")).stuck:
            fix = "buffer the sends, batch them with the receives, or use with_transfers"
    what = f"deadlock{how}: " + "; ".join(lines)
    return (Problem(at(rank, firsts[rank][index]), what, fix),)


def _shortest_circle(rules: Rules, walked: Walk) -> list[tuple[int, int, int, int]]:
    """Return the fewest ranks that wait for each other: rank, group, other rank, its group."""
    source = givers(rules)
    waits = {
        rank: [source[key] for key in missing if key in source]
        for rank, missing in walked.missing.items()
    }
    best: list[int] = []
    for start in waits:
        path = _way_back(start, waits)
        if path and (not best or len(path) < len(best)):
            best = path
    circle = []
    for rank, other in zip(best, [*best[1:], best[0]], strict=True):
        later = next(index for target, index in waits[rank] if target == other)
        circle.append((rank, walked.stuck[rank], other, later))
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


def _first_indices(cut: list[tuple[Action, ...]]) -> list[int]:
    firsts = [0]
    for group in cut:
        firsts.append(firsts[-1] + len(group))
    return firsts


def _shown(group: tuple[Action, ...]) -> str:
    return " with ".join(str(action) for action in group)
