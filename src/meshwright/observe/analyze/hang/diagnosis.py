"""Ranks the culprits of a hang, and tells causes from consequences.

A rank waits for another where that one has not enqueued the collective, or is held up before it.
Following the waits ends at ranks that wait for nobody: those that show a fault of their own
(`evidence.py`) are culprits, all who reach one of them are consequences. Whoever waits and reaches
none is looked at again: the ranks where those waits end are named, with less certainty.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.analyze.hang.collective_mismatches import (
    find_mismatches,
    find_order_violations,
)
from meshwright.observe.analyze.hang.dump_index import DumpIndex, RankWait
from meshwright.observe.analyze.hang.evidence import (
    FaultEvidence,
    find_aborted_collectives,
    find_divergent_ranks,
    find_lagging_hosts,
    find_missing_dumps,
    find_silent_gpus,
    find_stopped_hosts,
    find_unstarted_collectives,
    format_operation,
    select_unexplained_waits,
)
from meshwright.observe.analyze.hang.graph_components import find_sink_components
from meshwright.observe.analyze.hang.p2p_mismatches import find_p2p_deadlocks, find_wrong_peers
from meshwright.observe.analyze.hang.pending_age import PendingAge, measure_pending_age
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    DumpSet,
    RecordedOperation,
    StackFrame,
)

_CERTAIN = (
    "gpu", "error", "mismatch", "order", "peer", "alone", "stopped", "started", "lagging",
    "crossed",
)  # fmt: skip
"""Kinds whose evidence lies in the rank's own dump, strongest first."""
_MOST_FOLLOWED = 256
_NEXT = {
    "gpu": "look for Xid errors (dmesg, DCGM) on the GPU of rank {rank}; drain its node",
    "late": "look for Xid and link errors on the node of rank {rank}",
    "started": "attach cuda-gdb, or take a profile: a kernel of rank {rank} does not complete",
    "mismatch": "compare the shapes and branches that lead rank {rank} here with another rank's",
    "error": "read the log of rank {rank}: NCCL reported an error there",
    "peer": "look at the peer that rank {rank} computes for this send",
    "alone": "rank {rank} runs a step more than the rest: compare lengths of data and loops",
    "crossed": "let one side receive before it sends, or use batch_isend_irecv: rank {rank}",
    "order": "make every rank enqueue these in one order: look for a branch on rank {rank}",
    "stopped": "py-spy dump on rank {rank}: its host stands outside any collective",
    "lagging": "py-spy dump on rank {rank}: its host stands outside any collective",
    "no dump": "look at the log and node of rank {rank}: killed, out of memory, or lost",
    "together": "all entered and none came out: test the links (all_reduce_perf) of these ranks",
}


class CulpritRank(NamedTuple):
    """A rank named as a cause."""

    rank: int
    kind: str
    confidence: str
    """`certain`: its own dump shows it; `likely`: others' dumps do; `possible`: one of several."""
    reason: str
    other_evidence: tuple[str, ...]
    """Further signs."""
    num_waiting: int
    """Ranks that wait for it, directly or through others."""
    source_line: str
    """File, line and function it stands at, or the waiting ranks do; empty without stacks."""
    next_step: str


class BlockedOperation(NamedTuple):
    """An operation in which ranks wait."""

    operation: str
    waiting_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    source_line: str
    is_consequence: bool
    """Whether no culprit is among those it waits for: it is blocked because of others."""


class DumpDiagnosis(NamedTuple):
    """What a set of dumps says."""

    culprits: tuple[CulpritRank, ...]
    """Those to look at first: of the strongest evidence there is."""
    suspects: tuple[CulpritRank, ...]
    """Those to look at if the first are in order."""
    blocked_operations: tuple[BlockedOperation, ...]
    world: tuple[int, ...]
    ranks_without_dump: tuple[int, ...]
    """Ranks without a readable dump."""
    waiting_ranks: tuple[int, ...]
    """Ranks with unfinished work that are no culprits: consequences."""
    pending_age: PendingAge | None = None
    """How long the job had waited when it was dumped; None where the files do not tell."""


def diagnose_hang(dumps: DumpSet) -> DumpDiagnosis:
    """Name the ranks that caused a hang, most certain first."""
    board = DumpIndex(dumps)
    motion = measure_pending_age(dumps.dumps)
    waits = [wait for rank in board.pending for wait in board.find_waits(rank)]
    if motion is not None and motion.is_typical:
        # What others have not done yet they are about to do; a disagreement stays one.
        clues = [*find_mismatches(board), *find_aborted_collectives(board)]
        waits = waits if clues else []
    else:
        clues = _clues(board, waits)
        clues += find_p2p_deadlocks(board, board.pending.keys() - _explained(clues, waits))
        clues += _together(board, _explained(clues, waits))
    certain = [clue for clue in clues if clue.kind in _CERTAIN]
    likely = [clue for clue in clues if clue.kind == "no dump"]
    few = len(board.ranks_without_dump) <= max(2, len(board.world) // 8)
    first = certain + likely if few or not certain else certain
    if not first:
        late = [clue for clue in clues if clue.kind == "late"]
        first = late or clues
    top = {clue.rank for clue in first}
    by_rank: dict[int, list[FaultEvidence]] = defaultdict(list)
    for clue in sorted(clues, key=lambda clue: (_strength(clue), -clue.weight)):
        by_rank[clue.rank].append(clue)
    behind = _waiters(waits)
    # Where very many are named, whoever waits for each through others is not followed.
    held_up = {
        rank: len(_reaching({rank}, behind) if place < _MOST_FOLLOWED else behind[rank])
        for place, rank in enumerate(by_rank)
    }
    ranked = [_culprit(board, signs, held_up[rank]) for rank, signs in by_rank.items()]
    ranked.sort(key=lambda each: (_order(each.kind), -each.num_waiting, each.rank))
    culprits = tuple(each for each in ranked if each.rank in top)
    suspects = tuple(each for each in ranked if each.rank not in top)
    waiting = tuple(
        sorted(rank for rank, those in board.pending.items() if those and rank not in top)
    )
    blocked = _blocked_operations(waits, top)
    return DumpDiagnosis(
        culprits, suspects, blocked, board.world, board.ranks_without_dump, waiting, motion
    )


def _explained(clues: Sequence[FaultEvidence], waits: Sequence[RankWait]) -> set[int]:
    """Return the ranks that are named, and those whose waits lead to one."""
    named = {clue.rank for clue in clues}
    return named | _reaching(
        named, _waiters(wait for wait in waits if wait.waiting_rank not in named)
    )


def _clues(board: DumpIndex, waits: Sequence[RankWait]) -> list[FaultEvidence]:
    """Collect every sign of a rank's own fault; a rank with a failed GPU shows no others."""
    odd = find_mismatches(board)
    disputed = {
        (c.operation.group, c.operation.sequence_id) for c in odd if c.operation is not None
    }
    silent = find_silent_gpus(board, disputed)
    failed = {clue.rank for clue in silent if clue.kind == "gpu"}
    live = [wait for wait in waits if wait.waiting_rank not in failed]
    found = [*silent, *odd, *find_unstarted_collectives(board), *find_aborted_collectives(board)]
    found += find_order_violations(board, live)
    misled = find_wrong_peers(board, live)
    lost = {clue.operation for clue in misled}
    stopped = find_stopped_hosts(board, [wait for wait in live if wait.operation not in lost])
    found += misled
    found += find_divergent_ranks(board, stopped) or stopped
    found += find_lagging_hosts(board, {clue.rank for clue in found})
    known = {clue.rank for clue in found if clue.kind in _CERTAIN}
    reasons = select_unexplained_waits(live, known)
    found = [
        clue._replace(kind="gpu") if clue.kind == "late" and clue.rank in reasons else clue
        for clue in found
    ]
    known = {clue.rank for clue in found if clue.kind in _CERTAIN}
    return found + find_missing_dumps(board, live, known)


def _together(board: DumpIndex, explained: Collection[int]) -> list[FaultEvidence]:
    """Name the ranks where unexplained waits end: inside one operation, or in a circle.

    Here only the oldest operation of a rank counts: it is what its GPU is in.
    """
    left = {
        rank: oldest
        for rank in board.pending
        if rank not in explained and (oldest := board.find_oldest_blocking(rank)) is not None
    }
    edges: dict[int, set[int]] = {rank: set() for rank in left}
    for rank, oldest in left.items():
        edges[rank] = {
            wait.blocking_rank
            for wait in board.find_operation_waits(rank, oldest)
            if wait.blocking_rank in edges
        }
    found: dict[int, FaultEvidence] = {}
    for ranks in find_sink_components(edges):
        for rank in ranks:
            oldest = left[rank]
            reason = f"is in {format_operation(oldest)} with its peers, but it does not complete"
            found[rank] = FaultEvidence(rank, "together", reason, oldest, 0)
            if oldest.is_p2p and oldest.source in board.dumps:
                reason = f"its {format_operation(oldest)} does not complete"
                found.setdefault(
                    oldest.source, FaultEvidence(oldest.source, "together", reason, oldest, 0)
                )
    return list(found.values())


def _waiters(waits: Iterable[RankWait]) -> defaultdict[int, set[int]]:
    """Return, by rank, those that wait for it."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for wait in waits:
        found[wait.blocking_rank].add(wait.waiting_rank)
    return found


def _reaching(targets: Collection[int], waiters: defaultdict[int, set[int]]) -> set[int]:
    """Return the ranks whose waits lead to one of some ranks."""
    found: set[int] = set()
    left = list(targets)
    while left:
        for waiter in waiters[left.pop()]:
            if waiter not in found and waiter not in targets:
                found.add(waiter)
                left.append(waiter)
    return found


def _order(kind: str) -> int:
    return (*_CERTAIN, "no dump", "late", "together").index(kind)


def _strength(clue: FaultEvidence) -> int:
    return _order(clue.kind)


def _culprit(board: DumpIndex, signs: Sequence[FaultEvidence], waiting: int) -> CulpritRank:
    best = signs[0]
    certainty = "certain" if best.kind in _CERTAIN else "likely"
    if best.kind in ("late", "together"):
        certainty = "possible"
    operation = best.operation
    last = board.pending.get(best.rank) or ()
    frames = next((each.frames for each in reversed(last) if each.frames), ())
    if not frames and operation is not None:
        frames = operation.frames
    return CulpritRank(
        best.rank,
        best.kind,
        certainty,
        best.reason,
        tuple(clue.reason for clue in signs[1:]),
        waiting,
        find_user_frame(frames),
        _NEXT[best.kind].format(rank=best.rank),
    )


_LIBRARIES = ("site-packages/torch/", "dist-packages/torch/", "/torch/", "<frozen", "<string>")


def find_user_frame(frames: Sequence[StackFrame]) -> str:
    """Return the innermost line of the user's own code."""
    own = [frame for frame in frames if not any(part in frame.file for part in _LIBRARIES)]
    for frame in [*own, *frames]:
        if frame.file:
            return f"{frame.file}:{frame.line} {frame.name}"
    return ""


def _blocked_operations(
    waits: Sequence[RankWait], top: Collection[int]
) -> tuple[BlockedOperation, ...]:
    """Gather the waits by operation; those in which a culprit is missing first."""
    waiting: dict[tuple[object, ...], set[int]] = defaultdict(set)
    missing: dict[tuple[object, ...], set[int]] = defaultdict(set)
    sample: dict[tuple[object, ...], RecordedOperation] = {}
    for wait in waits:
        if wait.reason == "behind":
            continue
        each = wait.operation
        key = (each.group, each.name, each.sequence_id, each.source, each.destination)
        waiting[key].add(wait.waiting_rank)
        missing[key].add(wait.blocking_rank)
        sample.setdefault(key, each)
    found = [
        BlockedOperation(
            format_operation(each),
            tuple(sorted(waiting[key])),
            tuple(sorted(missing[key])),
            find_user_frame(each.frames),
            missing[key].isdisjoint(top),
        )
        for key, each in sample.items()
    ]
    found.sort(key=lambda one: (one.is_consequence, -len(one.waiting_ranks), one.operation))
    return tuple(found)
