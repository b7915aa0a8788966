"""Signs that a rank itself is at fault, read from the dumps; each is a fact, not a score.

gpu      its GPU no longer reports: others saw collectives end that it took part in
started  all are in a collective, and its GPU alone never began it
mismatch it entered a collective with another operation, shape or number format
order    it enqueued two collectives in the other order than the rest
error    it gave a collective up by an error, and others still wait in it
stopped  its GPU has nothing to do, and others wait for what it never enqueued
alone    it went on to a collective that most of the job never enqueued
lagging  its GPU stands where its twins' do, and its host stopped before theirs
no dump  others wait for it, and it wrote no dump, or a broken one
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.analyze.hang.board import SYMMETRIC, Board, Wait
from meshwright.timeline.readers.flight_recorder import Group, Operation


class Clue(NamedTuple):
    """Why a rank is suspected."""

    rank: int
    kind: str
    reason: str
    operation: Operation | None
    """What the others wait for, or where the rank shows its fault."""
    weight: int
    """How much of it there is: operations; orders clues of one kind."""


def title(operation: Operation) -> str:
    """Name an operation as people speak of it."""
    group = operation.group
    where = f"{group.description or 'group'} {group.name}".strip()
    if operation.is_p2p:
        arrow = f"{operation.source}→{operation.destination}"
        return f"{operation.name} {arrow} in {where}"
    return f"{operation.name} #{operation.sequence} in {where}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks shortly: runs as first–last."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs
    )


def silent_gpus(board: Board, disputed: Collection[tuple[Group, int]] = ()) -> list[Clue]:
    """Find ranks that still wait for collectives which others, needing their data, saw end.

    A collective of `SYMMETRIC` ends nowhere before all have begun it. A rank that shows it (and
    more than it, or work before it) as unfinished runs on a GPU or watchdog that has failed.
    Where ranks entered a collective differently (`disputed`), its end says nothing.
    """
    found = []
    for rank, waiting in board.pending.items():
        oldest = board.oldest(rank)
        against: list[tuple[Operation, int]] = []
        for operation in waiting:
            if (operation.group, operation.sequence) in disputed:
                continue
            if operation.name in SYMMETRIC and not operation.is_p2p:
                witness = next(
                    (
                        member
                        for member in board.present(operation.group)
                        if member != rank and board.has_completed(member, operation)
                    ),
                    None,
                )
                if witness is not None:
                    against.append((operation, witness))
        if not against:
            continue
        first, witness = against[0]
        if len(against) == 1 and first is oldest:
            kind, also = "late", "the only one: it may have hung inside, or reported late"
        else:
            kind, also = "gpu", "the GPU or its watchdog stopped reporting"
        reason = (
            f"still waits in {title(first)}, which rank {witness} saw end "
            f"({len(against)} such collectives; {also})"
        )
        found.append(Clue(rank, kind, reason, first, len(against)))
    return found


def never_started(board: Board) -> list[Clue]:
    """Find ranks whose GPU never began its oldest operation (needs timing to be on).

    A GPU that is held up by others spins inside a collective that it has begun. One that has not
    begun although no operation stands before is held up by a kernel of its own.
    """
    starts = {rank: board.pending[rank][0] for rank in board.pending if board.pending[rank]}
    began = [rank for rank, operation in starts.items() if operation.started_ns]
    if not began:
        return []
    found = []
    for rank, operation in starts.items():
        if not operation.started_ns and not any(board.waits_in(rank, operation)):
            reason = (
                f"enqueued {title(operation)} and its GPU never began it: a kernel before it does "
                f"not end (the GPUs of {ranks_text(began)} are inside their operations)"
            )
            found.append(Clue(rank, "started", reason, operation, len(began)))
    return found


def given_up(board: Board) -> list[Clue]:
    """Find ranks that gave up a collective by an error, in which others still wait."""
    found = []
    for rank, dump in board.dumps.items():
        for operation in dump.operations:
            if operation.state != "retired" or operation.is_p2p:
                continue
            waiting = [r for r in board.present(operation.group) if board.is_pending(r, operation)]
            if waiting:
                reason = (
                    f"gave up {title(operation)} by an error, in which "
                    f"{ranks_text(waiting)} still wait"
                )
                found.append(Clue(rank, "error", reason, operation, len(waiting)))
                break
    return found


def stopped_hosts(board: Board, waits: Iterable[Wait]) -> list[Clue]:
    """Find ranks that others wait for although nothing holds up their own GPU."""
    missed: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.why == "missing" and not board.pending.get(wait.on):
            missed[wait.on].append(wait)
    found = []
    for rank, those in missed.items():
        # The collective that most wait in says more than a single peer's send.
        counts = Counter((wait.operation.group, wait.operation.sequence) for wait in those)
        operation = max(
            (wait.operation for wait in those),
            key=lambda each: counts[each.group, each.sequence],
        )
        waiters = {wait.waiter for wait in those}
        recorded = board.dumps[rank].operations
        empty = "" if recorded else "; its dump lists no operation"
        reason = (
            f"never enqueued {title(operation)}, which {ranks_text(waiters)} wait for, "
            f"and has no unfinished work of its own{empty}"
        )
        found.append(Clue(rank, "stopped", reason, operation, len(waiters)))
    return found


def gone_on_alone(board: Board, stopped: Sequence[Clue]) -> list[Clue]:
    """Find the few that entered a collective which most of the job never did, and all in order.

    Where more than half of the job "stopped" at one place, with nothing unfinished, that place is
    the end of the program or of the data, and whoever went on is the odd one.
    """
    if 2 * len(stopped) <= len(board.world):
        return []
    found = []
    ends = {(clue.operation.group, clue.operation.sequence) for clue in stopped if clue.operation}
    for group, sequence in ends:
        there = board.seen[group].get(sequence, {})
        behind = [rank for rank in board.members(group) if rank not in there]
        if (
            all(rank in board.dumps for rank in behind)
            and len({board.enqueued(rank, group) for rank in behind}) == 1
        ):
            for rank, operation in there.items():
                reason = f"went on to {title(operation)}, which {ranks_text(behind)} never enqueued"
                found.append(Clue(rank, "alone", reason, operation, len(behind)))
    return found


def lagging_hosts(board: Board, failed: Collection[int]) -> list[Clue]:
    """Find ranks whose host stopped before their twins' did, at the same point of the GPU.

    Twins are of one pipeline stage and their GPUs stand at the same operation, or at the like one
    of their own groups: hosts run ahead of the GPU until they need its results, so both stop
    at the same line. One that enqueued less than most of its twins in a group they share was
    stopped by something of its own. A rank that failed otherwise is no measure.
    """
    found = []
    for rank, waiting in board.pending.items():
        if not waiting or rank in failed:
            continue
        twins = [twin for twin in board.twins(rank) if twin not in failed]
        ahead = [(lead, twin) for twin in twins if (lead := board.lead(twin, rank)) is not None]
        # One twin far ahead of all others is the odd one itself.
        if not ahead or 2 * len(ahead) <= len(twins):
            continue
        (gap, group), twin = max(ahead, key=lambda each: each[0][0])
        behind = board.enqueued(rank, group)
        at = board.oldest(rank) or waiting[0]
        reason = (
            f"its host stopped {gap} collectives before rank {twin}'s in "
            f"{group.description or group.name} (#{behind} against #{behind + gap}), though "
            f"both GPUs stand at {title(at)}"
        )
        found.append(Clue(rank, "lagging", reason, at, gap))
    return found


def only_reasons(waits: Iterable[Wait], known: Collection[int]) -> dict[int, list[Wait]]:
    """Return, for each rank, the waits of operations that no other rank's fault explains."""
    together: dict[tuple[int, Operation], list[Wait]] = defaultdict(list)
    for wait in waits:
        together[wait.waiter, wait.operation].append(wait)
    found: dict[int, list[Wait]] = defaultdict(list)
    for those in together.values():
        others = {wait.on for wait in those if wait.why == "missing" or wait.on in known}
        for wait in those:
            if others <= {wait.on}:
                found[wait.on].append(wait)
    return found


def without_dump(board: Board, waits: Sequence[Wait], known: Collection[int]) -> list[Clue]:
    """Find ranks without a dump that are the reason somebody waits; without others, all of them."""
    reasons = only_reasons(waits, known)
    found = []
    for rank in board.absent:
        wrote = "wrote no dump"
        if rank in board.damaged:
            wrote = f"left a broken dump ({board.damaged[rank]})"
        if rank in reasons:
            operation = reasons[rank][0].operation
            ranks = {wait.waiter for wait in reasons[rank]}
            reason = f"{wrote}, and {ranks_text(ranks)} wait for it in {title(operation)}"
            found.append(Clue(rank, "no dump", reason, operation, len(ranks)))
        elif not known and any(each in reasons for each in board.absent):
            found.append(Clue(rank, "no dump", wrote, None, 0))
    return found
