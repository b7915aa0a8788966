"""Ranks the culprits of a hang, and tells causes from consequences.

A rank waits for another where that one has not enqueued the collective, or is held up before it.
Following the waits ends at ranks that wait for nobody: those that show a fault of their own
(`clues.py`) are culprits, all who reach one of them are consequences. Whoever waits and reaches
none is looked at again: the ranks where those waits end are named, with less certainty.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshwright.observe.analyze.hang.board import Board, Wait
from meshwright.observe.analyze.hang.clues import (
    Clue,
    given_up,
    gone_on_alone,
    lagging_hosts,
    never_started,
    only_reasons,
    silent_gpus,
    stopped_hosts,
    title,
    without_dump,
)
from meshwright.observe.analyze.hang.components import last_components
from meshwright.observe.analyze.hang.disagreements import mismatches, wrong_orders
from meshwright.observe.analyze.hang.motion import Motion, motion_of
from meshwright.observe.analyze.hang.peers import crossed, wrong_peers
from meshwright.timeline.readers.flight_recorder import Dumps, Frame, Operation

_CERTAIN = (
    "gpu", "error", "mismatch", "order", "peer", "alone", "stopped", "started", "lagging",
    "crossed",
)  # fmt: skip
"""Kinds whose evidence lies in the rank's own dump, strongest first."""
_MOST_FOLLOWED = 256
_NEXT = {
    "gpu": "look for Xid errors (dmesg, DCGM) on the GPU of rank {rank}; drain its node",
    "late": "look for Xid and link errors on the node of rank {rank}",
    "started": "attach cuda-gdb, or take a profile: a kernel of rank {rank} does not end",
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


class Culprit(NamedTuple):
    """A rank named as a cause."""

    rank: int
    kind: str
    certainty: str
    """`certain`: its own dump shows it; `likely`: others' dumps do; `possible`: one of several."""
    reason: str
    others: tuple[str, ...]
    """Further signs."""
    waiting: int
    """Ranks that wait for it, directly or through others."""
    source: str
    """File, line and function it stands at, or the waiting ranks do; empty without stacks."""
    next: str


class Stall(NamedTuple):
    """An operation in which ranks wait."""

    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    source: str
    consequence: bool
    """Whether no culprit is among those it waits for: it stalls because of others."""


class Verdict(NamedTuple):
    """What a set of dumps says."""

    culprits: tuple[Culprit, ...]
    """Those to look at first: of the strongest evidence there is."""
    suspects: tuple[Culprit, ...]
    """Those to look at if the first are in order."""
    stalls: tuple[Stall, ...]
    world: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks without a readable dump."""
    waiting: tuple[int, ...]
    """Ranks with unfinished work that are no culprits: consequences."""
    motion: Motion | None = None
    """How long the job had waited when it was dumped; None where the files do not tell."""


def diagnose(dumps: Dumps) -> Verdict:
    """Name the ranks that caused a hang, most certain first."""
    board = Board(dumps)
    motion = motion_of(dumps.dumps)
    waits = [wait for rank in board.pending for wait in board.waits(rank)]
    if motion is not None and motion.is_usual:
        # What others have not done yet they are about to do; a disagreement stays one.
        clues = [*mismatches(board), *given_up(board)]
        waits = waits if clues else []
    else:
        clues = _clues(board, waits)
        clues += crossed(board, board.pending.keys() - _explained(clues, waits))
        clues += _together(board, _explained(clues, waits))
    certain = [clue for clue in clues if clue.kind in _CERTAIN]
    likely = [clue for clue in clues if clue.kind == "no dump"]
    few = len(board.absent) <= max(2, len(board.world) // 8)
    first = certain + likely if few or not certain else certain
    if not first:
        late = [clue for clue in clues if clue.kind == "late"]
        first = late or clues
    top = {clue.rank for clue in first}
    by_rank: dict[int, list[Clue]] = defaultdict(list)
    for clue in sorted(clues, key=lambda clue: (_strength(clue), -clue.weight)):
        by_rank[clue.rank].append(clue)
    behind = _waiters(waits)
    # Where very many are named, whoever waits for each through others is not followed.
    held_up = {
        rank: len(_reaching({rank}, behind) if place < _MOST_FOLLOWED else behind[rank])
        for place, rank in enumerate(by_rank)
    }
    ranked = [_culprit(board, signs, held_up[rank]) for rank, signs in by_rank.items()]
    ranked.sort(key=lambda each: (_order(each.kind), -each.waiting, each.rank))
    culprits = tuple(each for each in ranked if each.rank in top)
    suspects = tuple(each for each in ranked if each.rank not in top)
    waiting = tuple(
        sorted(rank for rank, those in board.pending.items() if those and rank not in top)
    )
    stalls = _stalls(waits, top)
    return Verdict(culprits, suspects, stalls, board.world, board.absent, waiting, motion)


def _explained(clues: Sequence[Clue], waits: Sequence[Wait]) -> set[int]:
    """Return the ranks that are named, and those whose waits lead to one."""
    named = {clue.rank for clue in clues}
    return named | _reaching(named, _waiters(wait for wait in waits if wait.waiter not in named))


def _clues(board: Board, waits: Sequence[Wait]) -> list[Clue]:
    """Collect every sign of a rank's own fault; a rank with a failed GPU shows no others."""
    odd = mismatches(board)
    disputed = {(c.operation.group, c.operation.sequence) for c in odd if c.operation is not None}
    silent = silent_gpus(board, disputed)
    failed = {clue.rank for clue in silent if clue.kind == "gpu"}
    live = [wait for wait in waits if wait.waiter not in failed]
    found = [*silent, *odd, *never_started(board), *given_up(board)]
    found += wrong_orders(board, live)
    misled = wrong_peers(board, live)
    lost = {clue.operation for clue in misled}
    stopped = stopped_hosts(board, [wait for wait in live if wait.operation not in lost])
    found += misled
    found += gone_on_alone(board, stopped) or stopped
    found += lagging_hosts(board, {clue.rank for clue in found})
    known = {clue.rank for clue in found if clue.kind in _CERTAIN}
    reasons = only_reasons(live, known)
    found = [
        clue._replace(kind="gpu") if clue.kind == "late" and clue.rank in reasons else clue
        for clue in found
    ]
    known = {clue.rank for clue in found if clue.kind in _CERTAIN}
    return found + without_dump(board, live, known)


def _together(board: Board, explained: Collection[int]) -> list[Clue]:
    """Name the ranks where unexplained waits end: inside one operation, or in a circle.

    Here only the oldest operation of a rank counts: it is what its GPU is in.
    """
    left = {
        rank: oldest
        for rank in board.pending
        if rank not in explained and (oldest := board.oldest(rank)) is not None
    }
    edges: dict[int, set[int]] = {rank: set() for rank in left}
    for rank, oldest in left.items():
        edges[rank] = {wait.on for wait in board.waits_in(rank, oldest) if wait.on in edges}
    found: dict[int, Clue] = {}
    for ranks in last_components(edges):
        for rank in ranks:
            oldest = left[rank]
            reason = f"is in {title(oldest)} with its peers, and it does not end"
            found[rank] = Clue(rank, "together", reason, oldest, 0)
            if oldest.is_p2p and oldest.source in board.dumps:
                reason = f"its {title(oldest)} does not end"
                found.setdefault(oldest.source, Clue(oldest.source, "together", reason, oldest, 0))
    return list(found.values())


def _waiters(waits: Iterable[Wait]) -> defaultdict[int, set[int]]:
    """Return, by rank, those that wait for it."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for wait in waits:
        found[wait.on].add(wait.waiter)
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


def _strength(clue: Clue) -> int:
    return _order(clue.kind)


def _culprit(board: Board, signs: Sequence[Clue], waiting: int) -> Culprit:
    best = signs[0]
    certainty = "certain" if best.kind in _CERTAIN else "likely"
    if best.kind in ("late", "together"):
        certainty = "possible"
    operation = best.operation
    last = board.pending.get(best.rank) or ()
    frames = next((each.frames for each in reversed(last) if each.frames), ())
    if not frames and operation is not None:
        frames = operation.frames
    return Culprit(
        best.rank,
        best.kind,
        certainty,
        best.reason,
        tuple(clue.reason for clue in signs[1:]),
        waiting,
        source_line(frames),
        _NEXT[best.kind].format(rank=best.rank),
    )


_LIBRARIES = ("site-packages/torch/", "dist-packages/torch/", "/torch/", "<frozen", "<string>")


def source_line(frames: Sequence[Frame]) -> str:
    """Return the innermost line of the user's own code."""
    own = [frame for frame in frames if not any(part in frame.file for part in _LIBRARIES)]
    for frame in [*own, *frames]:
        if frame.file:
            return f"{frame.file}:{frame.line} {frame.name}"
    return ""


def _stalls(waits: Sequence[Wait], top: Collection[int]) -> tuple[Stall, ...]:
    """Gather the waits by operation; those in which a culprit is missing first."""
    waiting: dict[tuple[object, ...], set[int]] = defaultdict(set)
    missing: dict[tuple[object, ...], set[int]] = defaultdict(set)
    sample: dict[tuple[object, ...], Operation] = {}
    for wait in waits:
        if wait.why == "behind":
            continue
        each = wait.operation
        key = (each.group, each.name, each.sequence, each.source, each.destination)
        waiting[key].add(wait.waiter)
        missing[key].add(wait.on)
        sample.setdefault(key, each)
    found = [
        Stall(
            title(each),
            tuple(sorted(waiting[key])),
            tuple(sorted(missing[key])),
            source_line(each.frames),
            missing[key].isdisjoint(top),
        )
        for key, each in sample.items()
    ]
    found.sort(key=lambda stall: (stall.consequence, -len(stall.waiting), stall.operation))
    return tuple(found)
