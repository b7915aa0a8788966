"""`diagnose_stall`: which rank blocks a collective, and why. It reads only the progress table.

Who waits for whom is a path: from this rank to the one it waits for, from there to the next, until
a rank is found that waits for nobody. That one is dead, elsewhere, or stuck.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.collective.progress_table import (
    NO_VALUE,
    PlanPosition,
    ProgressState,
    RankProgress,
)

StallCause = Literal[
    "dead", "absent", "other_collective", "stuck", "no_heartbeat", "finished", "late", "circle"
]
STALL_CAUSES: tuple[StallCause, ...] = get_args(StallCause)


class WaitEdge(NamedTuple):
    """One rank that waits for another."""

    rank: int
    position: PlanPosition


class CollectiveStall(NamedTuple):
    """Why a collective does not go on."""

    blamed_rank: int
    """The rank that everything waits for."""
    cause: StallCause
    position: PlanPosition | None
    """Where that rank is: what it waits for or, where it waits for nothing, what it did last."""
    message: str
    wait_chain: tuple[WaitEdge, ...]
    """Who waits for whom, at which step and chunk."""


class CollectiveStallError(MeshwrightError, RuntimeError):
    """A collective does not go on because a rank is missing, late or elsewhere."""

    def __init__(self, stall: CollectiveStall, reporter: int) -> None:
        self.stall = stall
        self.reporter = reporter
        """The rank that raised this."""
        super().__init__(stall.message)

    def __reduce__(self) -> tuple[type, tuple[CollectiveStall, int]]:
        return type(self), (self.stall, self.reporter)


class StallSnapshot(NamedTuple):
    """What is known when somebody asks."""

    rank: int
    entries: Sequence[RankProgress]
    dead_ranks: frozenset[int]
    """Ranks whose process is gone."""
    without_heartbeat: frozenset[int]
    """Ranks that wait, by their row, but did not look around for long: stopped or unreachable."""
    get_position: Callable[[int, int], PlanPosition]
    """Names a task of a rank in this rank's collective, by its number."""
    timeout_s: float


def diagnose_stall(scene: StallSnapshot) -> CollectiveStall:
    """Follow who waits for whom from this rank to the one that is to blame."""
    path = [scene.rank]
    while True:
        awaited = scene.entries[path[-1]].waiting_for
        if awaited is None:
            return _plain_fault(scene) or _stall(scene, path[-1], "stuck")
        rank = awaited.peer
        if rank in path:
            return _blamed(scene, path) or _stall(scene, rank, "circle")
        why = _fault(scene, rank, scene.entries[path[-1]])
        if why is not None:
            return _stall(scene, rank, why)
        path.append(rank)


def _blamed(scene: StallSnapshot, path: list[int]) -> CollectiveStall | None:
    """Return what a rank on the path said when it gave up: whom it named may have come since."""
    gave_up = [scene.entries[rank] for rank in path if rank in _gave_up(scene)]
    said = [
        (entry.blamed_rank, STALL_CAUSES[entry.stall_cause])
        for entry in gave_up
        if entry.blamed_rank != NO_VALUE
    ]
    if not said:
        return None
    # Who came late and then found nobody says so of itself; the others know more.
    blamed, why = min(said, key=lambda one: one[1] == "late")
    return _stall(scene, blamed, "late" if blamed == scene.rank else why)


def diagnose_missing_rank(scene: StallSnapshot, missing: set[int]) -> CollectiveStall:
    """Say why a rank has not entered a collective."""
    mine = scene.entries[scene.rank]
    faults = {rank: _fault(scene, rank, mine) or "stuck" for rank in sorted(missing)}
    order: tuple[StallCause, ...] = (
        "dead",
        "other_collective",
        "absent",
        "no_heartbeat",
        "finished",
        "stuck",
    )
    rank, why = min(faults.items(), key=lambda item: order.index(item[1]))
    return _stall(scene, rank, why)


def _plain_fault(scene: StallSnapshot) -> CollectiveStall | None:
    """Return a dead or a strayed rank that is not on the path: it is to blame all the same."""
    mine = scene.entries[scene.rank]
    found = [
        (rank, _fault(scene, rank, mine))
        for rank, entry in enumerate(scene.entries)
        if rank != scene.rank and entry.sequence <= mine.sequence  # who went on is not to blame
    ]
    for wanted in ("dead", "other_collective", "absent", "no_heartbeat"):
        for rank, why in found:
            if why is not None and why == wanted:
                return _stall(scene, rank, why)
    return None


def _fault(scene: StallSnapshot, rank: int, waiter: RankProgress) -> StallCause | None:
    """Return what is wrong with a rank that somebody waits for; None where it waits in turn."""
    entry = scene.entries[rank]
    if rank in scene.dead_ranks and entry.state is not ProgressState.ABORTED:
        return "dead"
    if rank in scene.without_heartbeat and entry.state is ProgressState.ENTERED:
        return "no_heartbeat"
    if entry.sequence < waiter.sequence:
        # It may be held up itself in an earlier collective, which others have left already.
        held_up = entry.state is not ProgressState.NOT_ENTERED and entry.waiting_for is not None
        return None if held_up else "absent"
    if entry.sequence > waiter.sequence or entry.signature != waiter.signature:
        return "other_collective"
    return "finished" if entry.state is ProgressState.NOT_ENTERED else None


def _stall(scene: StallSnapshot, rank: int, why: StallCause) -> CollectiveStall:
    entry, mine = scene.entries[rank], scene.entries[scene.rank]
    spot = entry.waiting_for or _last(scene, rank)
    if entry.sequence < mine.sequence and entry.state is ProgressState.NOT_ENTERED:
        spot = None
    lines = [f"collective {mine.sequence} ({mine.collective_name}) stands still: "]
    lines[0] += _said(scene, rank, why, spot)
    waiting = _waiting(scene)
    if waiting:
        shown = [f"rank {one.rank} at {one.position}" for one in waiting[:8]]
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        lines.append("waiting: " + "; ".join(shown) + more)
    return CollectiveStall(rank, why, spot, "\n".join(lines), tuple(waiting))


def _said(scene: StallSnapshot, rank: int, why: StallCause, spot: PlanPosition | None) -> str:
    entry, mine = scene.entries[rank], scene.entries[scene.rank]
    name = f"rank {rank}"
    process = f"process {entry.pid}"
    at = f" {'at' if entry.waiting_for else 'after'} {spot}" if spot else ""
    if spot and entry.sequence < mine.sequence:
        at += f" of collective {entry.sequence} ({entry.collective_name})"
    last = _last(scene, rank)
    did = f"; the last it did was {last}" if entry.waiting_for and last else ""
    match why:
        case "dead":
            if spot is None:
                at = ", before it entered this collective"
            return f"{name} is dead ({process} is gone){at}{did}"
        case "absent":
            return f"{name} {_absent(entry)}"
        case "other_collective" if entry.sequence == mine.sequence:
            return f"{name} runs another collective under this number: {entry.collective_name}"
        case "other_collective":
            return f"{name} has gone on to collective {entry.sequence} ({entry.collective_name})"
        case "finished":
            return f"{name} has finished its part, but what it sent did not arrive"
        case "no_heartbeat":
            return f"{name} does not respond ({process} may be stopped or unreachable){at}{did}"
        case "stuck":
            long = f"{scene.timeout_s:g} s"
            where = f" after {spot}" if spot else " before its first step"
            return f"{name} is stuck: {process} lives, but has done nothing for {long}{where}"
        case "late":
            gone = ", ".join(map(str, sorted(_gave_up(scene))))
            this = ", this one," if rank == scene.rank else ""
            return f"{name}{this} came too late: {gone} had given up waiting for it"
        case "circle":
            return f"ranks wait for each other in a circle through {name}{at}"


def _absent(entry: RankProgress) -> str:
    lives = f"process {entry.pid} lives"
    match entry.state:
        case ProgressState.ABORTED:
            return f"gave up in collective {entry.sequence} ({entry.collective_name})"
        case ProgressState.ENTERED:
            return f"is still in collective {entry.sequence} ({entry.collective_name}), and {lives}"
    before = f"its last was collective {entry.sequence}" if entry.sequence else "it was in none"
    return f"has not arrived; {before}, and {lives}"


def _last(scene: StallSnapshot, rank: int) -> PlanPosition | None:
    """Return what a rank did last, where its tasks are known here."""
    entry, mine = scene.entries[rank], scene.entries[scene.rank]
    if entry.last_task == NO_VALUE or entry.signature != mine.signature:
        return None
    return scene.get_position(rank, entry.last_task)


def _waiting(scene: StallSnapshot) -> list[WaitEdge]:
    """Return who waits for whom, the dead left out."""
    dead = scene.dead_ranks - _gave_up(scene)
    return [
        WaitEdge(rank, entry.waiting_for)
        for rank, entry in enumerate(scene.entries)
        if entry.waiting_for is not None
        and entry.state is not ProgressState.NOT_ENTERED
        and rank not in dead
    ]


def _gave_up(scene: StallSnapshot) -> frozenset[int]:
    return frozenset(
        rank for rank, entry in enumerate(scene.entries) if entry.state is ProgressState.ABORTED
    )
