"""`diagnose`: which rank holds up a collective, and why. It reads rows of the ledger, nothing else.

Who waits for whom is a path: from this rank to the one it waits for, from there to the next, until
a rank is found that waits for nobody. That one is dead, elsewhere, or stuck.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.collective.ledger import NOTHING, Entry, Spot, State

Why = Literal["dead", "absent", "elsewhere", "stuck", "silent", "finished", "late", "circle"]
WHYS: tuple[Why, ...] = get_args(Why)


class Waiting(NamedTuple):
    """One rank that waits for another."""

    rank: int
    spot: Spot


class Stall(NamedTuple):
    """Why a collective does not go on."""

    rank: int
    """The rank that everything waits for."""
    why: Why
    spot: Spot | None
    """Where that rank is: what it waits for or, where it waits for nothing, what it did last."""
    message: str
    waiting: tuple[Waiting, ...]
    """Who waits for whom, at which step and chunk."""


class CollectiveStalled(MeshwrightError, RuntimeError):
    """A collective does not go on because a rank is missing, late or elsewhere."""

    def __init__(self, stall: Stall, reporter: int) -> None:
        self.stall = stall
        self.reporter = reporter
        """The rank that raised this."""
        super().__init__(stall.message)

    def __reduce__(self) -> tuple[type, tuple[Stall, int]]:
        return type(self), (self.stall, self.reporter)


class Scene(NamedTuple):
    """What is known when somebody asks."""

    me: int
    entries: Sequence[Entry]
    dead: frozenset[int]
    """Ranks whose process is gone."""
    silent: frozenset[int]
    """Ranks that wait, by their row, but did not look around for long: stopped or unreachable."""
    spot: Callable[[int, int], Spot]
    """Names a task of a rank in this rank's collective, by its number."""
    patience_s: float


def diagnose(scene: Scene) -> Stall:
    """Follow who waits for whom from this rank to the one that is to blame."""
    path = [scene.me]
    while True:
        awaited = scene.entries[path[-1]].awaited
        if awaited is None:
            return _plain_fault(scene) or _stall(scene, path[-1], "stuck")
        rank = awaited.peer
        if rank in path:
            return _blamed(scene, path) or _stall(scene, rank, "circle")
        why = _fault(scene, rank, scene.entries[path[-1]])
        if why is not None:
            return _stall(scene, rank, why)
        path.append(rank)


def _blamed(scene: Scene, path: list[int]) -> Stall | None:
    """Return what a rank on the path said when it gave up: whom it named may have come since."""
    gave_up = [scene.entries[rank] for rank in path if rank in _gave_up(scene)]
    said = [(entry.blamed, WHYS[entry.why]) for entry in gave_up if entry.blamed != NOTHING]
    if not said:
        return None
    # Who came late and then found nobody says so of itself; the others know more.
    blamed, why = min(said, key=lambda one: one[1] == "late")
    return _stall(scene, blamed, "late" if blamed == scene.me else why)


def absentee(scene: Scene, missing: set[int]) -> Stall:
    """Say of a rank that did not come to the start of a collective what keeps it."""
    mine = scene.entries[scene.me]
    faults = {rank: _fault(scene, rank, mine) or "stuck" for rank in sorted(missing)}
    order: tuple[Why, ...] = ("dead", "elsewhere", "absent", "silent", "finished", "stuck")
    rank, why = min(faults.items(), key=lambda item: order.index(item[1]))
    return _stall(scene, rank, why)


def _plain_fault(scene: Scene) -> Stall | None:
    """Return a dead or a strayed rank that is not on the path: it is to blame all the same."""
    mine = scene.entries[scene.me]
    found = [
        (rank, _fault(scene, rank, mine))
        for rank, entry in enumerate(scene.entries)
        if rank != scene.me and entry.sequence <= mine.sequence  # who went on is not to blame
    ]
    for wanted in ("dead", "elsewhere", "absent", "silent"):
        for rank, why in found:
            if why is not None and why == wanted:
                return _stall(scene, rank, why)
    return None


def _fault(scene: Scene, rank: int, waiter: Entry) -> Why | None:
    """Return what is wrong with a rank that somebody waits for; None where it waits in turn."""
    entry = scene.entries[rank]
    if rank in scene.dead and entry.state is not State.GAVE_UP:
        return "dead"
    if rank in scene.silent and entry.state is State.INSIDE:
        return "silent"
    if entry.sequence < waiter.sequence:
        # It may be held up itself in an earlier collective, which others have left already.
        held_up = entry.state is not State.OUTSIDE and entry.awaited is not None
        return None if held_up else "absent"
    if entry.sequence > waiter.sequence or entry.signature != waiter.signature:
        return "elsewhere"
    return "finished" if entry.state is State.OUTSIDE else None


def _stall(scene: Scene, rank: int, why: Why) -> Stall:
    entry, mine = scene.entries[rank], scene.entries[scene.me]
    spot = entry.awaited or _last(scene, rank)
    if entry.sequence < mine.sequence and entry.state is State.OUTSIDE:
        spot = None
    lines = [f"collective {mine.sequence} ({mine.text}) stands still: "]
    lines[0] += _said(scene, rank, why, spot)
    waiting = _waiting(scene)
    if waiting:
        shown = [f"rank {one.rank} at {one.spot}" for one in waiting[:8]]
        more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
        lines.append("waiting: " + "; ".join(shown) + more)
    return Stall(rank, why, spot, "\n".join(lines), tuple(waiting))


def _said(scene: Scene, rank: int, why: Why, spot: Spot | None) -> str:
    entry, mine = scene.entries[rank], scene.entries[scene.me]
    name = f"rank {rank}"
    process = f"process {entry.pid}"
    at = f" {'at' if entry.awaited else 'after'} {spot}" if spot else ""
    if spot and entry.sequence < mine.sequence:
        at += f" of collective {entry.sequence} ({entry.text})"
    last = _last(scene, rank)
    did = f"; the last it did was {last}" if entry.awaited and last else ""
    match why:
        case "dead":
            if spot is None:
                at = ", before it came to this collective"
            return f"{name} is dead ({process} is gone){at}{did}"
        case "absent":
            return f"{name} {_absent(entry)}"
        case "elsewhere" if entry.sequence == mine.sequence:
            return f"{name} runs another collective under this number: {entry.text}"
        case "elsewhere":
            return f"{name} has gone on to collective {entry.sequence} ({entry.text})"
        case "finished":
            return f"{name} has finished its part, but what it sent did not arrive"
        case "silent":
            return f"{name} does not respond ({process} may be stopped or unreachable){at}{did}"
        case "stuck":
            long = f"{scene.patience_s:g} s"
            where = f" after {spot}" if spot else " before its first step"
            return f"{name} is stuck: {process} lives, but has done nothing for {long}{where}"
        case "late":
            gone = ", ".join(map(str, sorted(_gave_up(scene))))
            this = ", this one," if rank == scene.me else ""
            return f"{name}{this} came too late: {gone} had given up waiting for it"
        case "circle":
            return f"ranks wait for each other in a circle through {name}{at}"


def _absent(entry: Entry) -> str:
    lives = f"process {entry.pid} lives"
    match entry.state:
        case State.GAVE_UP:
            return f"gave up in collective {entry.sequence} ({entry.text})"
        case State.INSIDE:
            return f"is still in collective {entry.sequence} ({entry.text}), and {lives}"
    before = f"its last was collective {entry.sequence}" if entry.sequence else "it was in none"
    return f"has not arrived; {before}, and {lives}"


def _last(scene: Scene, rank: int) -> Spot | None:
    """Return what a rank did last, where its tasks are known here."""
    entry, mine = scene.entries[rank], scene.entries[scene.me]
    if entry.last == NOTHING or entry.signature != mine.signature:
        return None
    return scene.spot(rank, entry.last)


def _waiting(scene: Scene) -> list[Waiting]:
    """Return who waits for whom, the dead left out."""
    dead = scene.dead - _gave_up(scene)
    return [
        Waiting(rank, entry.awaited)
        for rank, entry in enumerate(scene.entries)
        if entry.awaited is not None and entry.state is not State.OUTSIDE and rank not in dead
    ]


def _gave_up(scene: Scene) -> frozenset[int]:
    return frozenset(
        rank for rank, entry in enumerate(scene.entries) if entry.state is State.GAVE_UP
    )
