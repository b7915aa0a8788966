"""Signs that ranks disagree: one enters a collective otherwise, or two in another order."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from meshwright.observe.analyze.hang.dump_index import DumpIndex, RankWait
from meshwright.observe.analyze.hang.evidence import FaultEvidence, format_operation
from meshwright.spec.units import format_ranks
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    RecordedGroup,
    RecordedOperation,
)

_SAME_SIZES = frozenset(
    {"all_reduce", "allreduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce"}
)


def _signature(operation: RecordedOperation) -> tuple[object, ...]:
    sizes: object = ()
    if operation.name in _SAME_SIZES:
        sizes = (operation.input_sizes, operation.output_sizes)
    elif operation.name.startswith(("all_to_all", "alltoall")):
        sizes = tuple(shape[1:] for shape in operation.input_sizes)
    return operation.name, operation.dtypes, sizes


def find_mismatches(board: DumpIndex) -> list[FaultEvidence]:
    """Find ranks that entered a collective with another operation, dtype or shape than the rest."""
    found = []
    for group, sequences in board.seen.items():
        for sequence in sorted(sequences):
            # With a smaller message a rank may see its end where all others wait for more.
            waiting = sequences[sequence]
            if not any(each.is_pending for each in waiting.values()):
                continue
            kinds = {rank: _signature(each) for rank, each in waiting.items()}
            if len(set(kinds.values())) < 2:
                continue
            right = _usual(board, group, sequence, kinds)
            for rank, kind in kinds.items():
                if kind != right:
                    found.append(_mismatch(board, rank, waiting, kinds, right))
            break  # what comes after is shifted by this one
    return found


def _usual(
    board: DumpIndex, group: RecordedGroup, sequence: int, kinds: Mapping[int, tuple[object, ...]]
) -> tuple[object, ...] | None:
    """Return what most entered with; between equals, what sister groups do at the same place."""
    votes = Counter(kinds.values()).most_common()
    if votes[0][1] > votes[1][1]:
        return votes[0][0]
    sisters: Counter[tuple[object, ...]] = Counter()
    for other, sequences in board.seen.items():
        if other != group and other.description == group.description:
            for operation in sequences.get(sequence, {}).values():
                kind = _signature(operation)
                if kind in kinds.values():
                    sisters[kind] += 1
    best = sisters.most_common(2)
    if best and (len(best) == 1 or best[0][1] > best[1][1]):
        return best[0][0]
    return None


def _mismatch(
    board: DumpIndex,
    rank: int,
    waiting: Mapping[int, RecordedOperation],
    kinds: Mapping[int, tuple[object, ...]],
    right: tuple[object, ...] | None,
) -> FaultEvidence:
    mine = waiting[rank]
    other = next(each for r, each in waiting.items() if kinds[r] != kinds[rank] and r != rank)
    theirs = [r for r in waiting if kinds[r] == right] or [r for r in waiting if r != rank]
    later = board.seen[mine.group].get(mine.sequence_id + 1, {}).get(rank)
    swapped = later is not None and _signature(later) == _signature(other)
    what = "in the wrong order: " if swapped else ""
    reason = (
        f"entered collective #{mine.sequence_id} of {mine.group.description or mine.group.name} "
        f"{what}with {_shape(mine)}, where {format_ranks(theirs)} entered with {_shape(other)}"
    )
    return FaultEvidence(rank, "order" if swapped else "mismatch", reason, mine, len(theirs))


def _shape(operation: RecordedOperation) -> str:
    sizes = " ".join("×".join(map(str, shape)) for shape in operation.input_sizes)
    return f"{operation.name} {sizes} {' '.join(operation.dtypes)}".rstrip()


def find_order_violations(board: DumpIndex, waits: Iterable[RankWait]) -> list[FaultEvidence]:
    """Find ranks that enqueued two collectives of different groups in an order of their own.

    The sign is a wait in a circle: r is in X and has not done Y; m is in Y and has not done X; both
    belong to both groups. With one order for all, whoever is in the later one has done the earlier.
    Who is right is put to the vote of all ranks of both groups, then of ranks in sister groups.
    """
    found = []
    judged: set[tuple[tuple[RecordedGroup, int], tuple[RecordedGroup, int]]] = set()
    for wait in waits:
        mine, theirs = (
            board.find_oldest_blocking(wait.waiting_rank),
            board.find_oldest_blocking(wait.blocking_rank),
        )
        if theirs is None or mine is not wait.operation or wait.reason == "no dump":
            continue
        if mine.is_p2p or theirs.is_p2p or mine.group == theirs.group:
            continue
        if wait.waiting_rank not in board.find_members(theirs.group):
            continue
        if not board.covers_operation(wait.waiting_rank, theirs) or board.has_completed(
            wait.waiting_rank, theirs
        ):
            continue
        if not board.covers_operation(wait.blocking_rank, mine):
            continue
        a, b = (mine.group, mine.sequence_id), (theirs.group, theirs.sequence_id)
        if (a, b) in judged or (b, a) in judged:
            continue
        judged.add((a, b))
        found += _judge_order(board, mine, theirs)
    return found


def _judge_order(
    board: DumpIndex, one: RecordedOperation, two: RecordedOperation
) -> list[FaultEvidence]:
    orders: dict[int, bool] = {}
    for rank in board.find_members(one.group):
        if rank in board.dumps and rank in board.find_members(two.group):
            first, second = _place(board, rank, one), _place(board, rank, two)
            if first != second:
                orders[rank] = first < second
    votes = Counter(orders.values())
    if votes[True] == votes[False]:
        votes += _sister_votes(board, one, two, orders)
    if votes[True] == votes[False]:  # most ranks are where they should be
        here, there = _waiting_in(board, one), _waiting_in(board, two)
        votes[here > there] += abs(here - there)
    if votes[True] == votes[False]:
        wrong: Collection[bool] = (True, False)
    else:
        wrong = (votes[False] > votes[True],)
    found = []
    for rank, order in sorted(orders.items()):
        if order in wrong:
            before, after = (one, two) if order else (two, one)
            reason = (
                f"enqueued {format_operation(before)} before {format_operation(after)}; "
                f"{format_ranks(r for r in orders if orders[r] != order)} did so the other way "
                f"round"
            )
            found.append(FaultEvidence(rank, "order", reason, before, max(votes.values())))
    return found


def _waiting_in(board: DumpIndex, operation: RecordedOperation) -> int:
    return sum(
        board.is_pending(rank, operation) for rank in board.find_members_with_dump(operation.group)
    )


def _place(board: DumpIndex, rank: int, operation: RecordedOperation) -> float:
    """Return where a rank enqueued a collective: before all it lists, or not yet."""
    mine = board.seen[operation.group].get(operation.sequence_id, {}).get(rank)
    if mine is not None:
        return mine.record_id
    return -math.inf if board.has_enqueued(rank, operation) else math.inf


def _sister_votes(
    board: DumpIndex, one: RecordedOperation, two: RecordedOperation, orders: Mapping[int, bool]
) -> Counter[bool]:
    """Count how ranks that are not concerned order the like operations of their own groups."""
    votes: Counter[bool] = Counter()
    for rank, dump in board.dumps.items():
        if rank in orders:
            continue
        place = {}
        for operation in dump.operations:
            for which in (one, two):
                if (
                    operation.group.description == which.group.description
                    and operation.sequence_id == which.sequence_id
                    and operation.name == which.name
                ):
                    place[which] = operation.record_id
        if len(place) == 2:
            votes[place[one] < place[two]] += 1
    return votes
