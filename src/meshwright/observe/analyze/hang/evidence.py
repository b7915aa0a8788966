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

from meshwright.observe.analyze.hang.dump_index import (
    SYNCHRONIZING_COLLECTIVES,
    DumpIndex,
    RankWait,
)
from meshwright.spec.units import format_ranks
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    RecordedGroup,
    RecordedOperation,
)


class FaultEvidence(NamedTuple):
    """Why a rank is suspected."""

    rank: int
    kind: str
    reason: str
    operation: RecordedOperation | None
    """What the others wait for, or where the rank shows its fault."""
    weight: int
    """How much of it there is: operations; orders clues of one kind."""


def format_operation(operation: RecordedOperation) -> str:
    """Name an operation as people speak of it."""
    group = operation.group
    where = f"{group.description or 'group'} {group.name}".strip()
    if operation.is_p2p:
        arrow = f"{operation.source}→{operation.destination}"
        return f"{operation.name} {arrow} in {where}"
    return f"{operation.name} #{operation.sequence_id} in {where}"


def find_silent_gpus(
    board: DumpIndex, disputed: Collection[tuple[RecordedGroup, int]] = ()
) -> list[FaultEvidence]:
    """Find ranks that still wait for collectives which others, needing their data, saw end.

    A collective of `SYNCHRONIZING_COLLECTIVES` ends nowhere before all have begun it. A rank that
    shows it (and more than it, or work before it) as unfinished runs on a GPU or watchdog that has
    failed. Where ranks entered a collective differently (`disputed`), its end says nothing.
    """
    found = []
    for rank, waiting in board.pending.items():
        oldest = board.find_oldest_blocking(rank)
        against: list[tuple[RecordedOperation, int]] = []
        for operation in waiting:
            if (operation.group, operation.sequence_id) in disputed:
                continue
            if operation.name in SYNCHRONIZING_COLLECTIVES and not operation.is_p2p:
                witness = next(
                    (
                        member
                        for member in board.find_members_with_dump(operation.group)
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
            f"still waits in {format_operation(first)}, which rank {witness} saw end "
            f"({len(against)} such collectives; {also})"
        )
        found.append(FaultEvidence(rank, kind, reason, first, len(against)))
    return found


def find_unstarted_collectives(board: DumpIndex) -> list[FaultEvidence]:
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
        if not operation.started_ns and not any(board.find_operation_waits(rank, operation)):
            reason = (
                f"enqueued {format_operation(operation)} and its GPU never began it: a kernel "
                f"before it does "
                f"not end (the GPUs of {format_ranks(began)} are inside their operations)"
            )
            found.append(FaultEvidence(rank, "started", reason, operation, len(began)))
    return found


def find_aborted_collectives(board: DumpIndex) -> list[FaultEvidence]:
    """Find ranks that gave up a collective by an error, in which others still wait."""
    found = []
    for rank, dump in board.dumps.items():
        for operation in dump.operations:
            if operation.state != "retired" or operation.is_p2p:
                continue
            waiting = [
                r
                for r in board.find_members_with_dump(operation.group)
                if board.is_pending(r, operation)
            ]
            if waiting:
                reason = (
                    f"gave up {format_operation(operation)} by an error, in which "
                    f"{format_ranks(waiting)} still wait"
                )
                found.append(FaultEvidence(rank, "error", reason, operation, len(waiting)))
                break
    return found


def find_stopped_hosts(board: DumpIndex, waits: Iterable[RankWait]) -> list[FaultEvidence]:
    """Find ranks that others wait for although nothing holds up their own GPU."""
    missed: dict[int, list[RankWait]] = defaultdict(list)
    for wait in waits:
        if wait.reason == "missing" and not board.pending.get(wait.blocking_rank):
            missed[wait.blocking_rank].append(wait)
    found = []
    for rank, those in missed.items():
        # The collective that most wait in says more than a single peer's send.
        counts = Counter((wait.operation.group, wait.operation.sequence_id) for wait in those)
        operation = max(
            (wait.operation for wait in those),
            key=lambda each: counts[each.group, each.sequence_id],
        )
        waiters = {wait.waiting_rank for wait in those}
        recorded = board.dumps[rank].operations
        empty = "" if recorded else "; its dump lists no operation"
        reason = (
            f"never enqueued {format_operation(operation)}, which {format_ranks(waiters)} wait "
            f"for, "
            f"and has no unfinished work of its own{empty}"
        )
        found.append(FaultEvidence(rank, "stopped", reason, operation, len(waiters)))
    return found


def find_divergent_ranks(board: DumpIndex, stopped: Sequence[FaultEvidence]) -> list[FaultEvidence]:
    """Find the few that entered a collective which most of the job never did, and all in order.

    Where more than half of the job "stopped" at one place, with nothing unfinished, that place is
    the end of the program or of the data, and whoever went on is the odd one.
    """
    if 2 * len(stopped) <= len(board.world):
        return []
    found = []
    ends = {
        (clue.operation.group, clue.operation.sequence_id) for clue in stopped if clue.operation
    }
    for group, sequence in ends:
        there = board.seen[group].get(sequence, {})
        behind = [rank for rank in board.find_members(group) if rank not in there]
        if (
            all(rank in board.dumps for rank in behind)
            and len({board.last_enqueued(rank, group) for rank in behind}) == 1
        ):
            for rank, operation in there.items():
                reason = (
                    f"went on to {format_operation(operation)}, which {format_ranks(behind)} "
                    f"never enqueued"
                )
                found.append(FaultEvidence(rank, "alone", reason, operation, len(behind)))
    return found


def find_lagging_hosts(board: DumpIndex, failed: Collection[int]) -> list[FaultEvidence]:
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
        twins = [twin for twin in board.find_peers_at_point(rank) if twin not in failed]
        ahead = [
            (lead, twin)
            for twin in twins
            if (lead := board.measure_enqueue_lead(twin, rank)) is not None
        ]
        # One twin far ahead of all others is the odd one itself.
        if not ahead or 2 * len(ahead) <= len(twins):
            continue
        (gap, group), twin = max(ahead, key=lambda each: each[0][0])
        behind = board.last_enqueued(rank, group)
        at = board.find_oldest_blocking(rank) or waiting[0]
        reason = (
            f"its host stopped {gap} collectives before rank {twin}'s in "
            f"{group.description or group.name} (#{behind} against #{behind + gap}), though "
            f"both GPUs stand at {format_operation(at)}"
        )
        found.append(FaultEvidence(rank, "lagging", reason, at, gap))
    return found


def select_unexplained_waits(
    waits: Iterable[RankWait], known: Collection[int]
) -> dict[int, list[RankWait]]:
    """Return, for each rank, the waits of operations that no other rank's fault explains."""
    together: dict[tuple[int, RecordedOperation], list[RankWait]] = defaultdict(list)
    for wait in waits:
        together[wait.waiting_rank, wait.operation].append(wait)
    found: dict[int, list[RankWait]] = defaultdict(list)
    for those in together.values():
        others = {
            wait.blocking_rank
            for wait in those
            if wait.reason == "missing" or wait.blocking_rank in known
        }
        for wait in those:
            if others <= {wait.blocking_rank}:
                found[wait.blocking_rank].append(wait)
    return found


def find_missing_dumps(
    board: DumpIndex, waits: Sequence[RankWait], known: Collection[int]
) -> list[FaultEvidence]:
    """Find ranks without a dump that are the reason somebody waits; without others, all of them."""
    reasons = select_unexplained_waits(waits, known)
    found = []
    for rank in board.ranks_without_dump:
        wrote = "wrote no dump"
        if rank in board.damaged:
            wrote = f"left a broken dump ({board.damaged[rank]})"
        if rank in reasons:
            operation = reasons[rank][0].operation
            ranks = {wait.waiting_rank for wait in reasons[rank]}
            reason = (
                f"{wrote}, and {format_ranks(ranks)} wait for it in {format_operation(operation)}"
            )
            found.append(FaultEvidence(rank, "no dump", reason, operation, len(ranks)))
        elif not known and any(each in reasons for each in board.ranks_without_dump):
            found.append(FaultEvidence(rank, "no dump", wrote, None, 0))
    return found
