"""`judge`: who keeps the others waiting, and why. It reads what ranks said last, nothing else.

Whoever is dead, raised or silent is to blame. Else who waits for whom is a path: from a rank to the
members of its group that have not come, from there to those they wait for, until ranks are found
that wait for nobody. Where the path closes, ranks disagree about the order.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from meshwright.run.parallel.status import Seen, Status, describe

_LINES = 16
"""Of a verdict: the rest of a large job is counted."""


class Verdict(msgspec.Struct, frozen=True):
    """Why the job ends."""

    culprits: tuple[int, ...]
    text: str


class Scene(NamedTuple):
    """What is known of all ranks."""

    statuses: Mapping[int, Status]
    dead: frozenset[int] = frozenset()
    """Ranks whose process is gone."""
    silent: frozenset[int] = frozenset()
    """Ranks whose alarm has not been heard for long."""


def judge(scene: Scene, me: int) -> Verdict:
    """Return who keeps this rank waiting."""
    statuses = scene.statuses
    parted = parting(statuses)
    if scene.dead:
        ranks = sorted(scene.dead)
        if parted is not None and set(parted.culprits) & scene.dead:
            # Some libraries end a process that gets more than it expects.
            return _verdict(scene, parted.culprits, f"{parted.text}; {_ranks(ranks)} died of it")
        last = [
            f"rank {rank} died, its process is gone{_last(statuses[rank])}"
            for rank in ranks[:_LINES]
        ]
        return _verdict(scene, ranks, "; ".join(last))
    raised = [rank for rank, each in statuses.items() if each.state == "raised"]
    if raised:
        why = "; ".join(f"rank {rank} raised {statuses[rank].note}" for rank in raised)
        return _verdict(scene, raised, why)
    if parted is not None:
        return _verdict(scene, parted.culprits, parted.text)
    if scene.silent:
        ranks = sorted(scene.silent)
        why = f"{_ranks(ranks)} cannot be heard: stopped, or its host is gone"
        return _verdict(scene, ranks, why + _last(statuses[ranks[0]]))
    return _waited_for(scene, me)


def parting(statuses: Mapping[int, Status]) -> Verdict | None:
    """Return the first two ranks that mean different things by the same number of a group."""
    known: dict[tuple[str, int, int], tuple[int, Seen]] = {}
    for rank, status in sorted(statuses.items()):
        for mine in status.lately if status.at is None else (*status.lately, status.at):
            other, theirs = known.setdefault((mine.group, mine.first, mine.number), (rank, mine))
            if theirs.mark != mine.mark:
                text = (
                    f"ranks {other} and {rank} of group {mine.group} do different things: "
                    f"rank {other} {theirs}; rank {rank} {mine}"
                )
                return Verdict((other, rank), text)
    return None


def absent(statuses: Mapping[int, Status], rank: int) -> list[int]:
    """Return the members that have not come to what a rank waits in."""
    mine = statuses[rank]
    if mine.waits_s is None or mine.at is None:
        return []
    group, number = mine.at.group, mine.at.number
    return [
        other
        for other in mine.members
        if other in statuses and statuses[other].counts.get(group, 0) < number
    ]


def _waited_for(scene: Scene, me: int) -> Verdict:
    statuses, mine = scene.statuses, scene.statuses[me]
    path, culprits, stuck = [me], [], []
    for rank in path:
        if rank != me and statuses[rank].waits_s is None:
            culprits.append(rank)
            continue
        missing = absent(statuses, rank)
        if not missing:
            stuck.append(rank)
        path += [other for other in missing if other not in path]
    if culprits:
        does = "; ".join(describe(statuses[rank]) for rank in culprits[:_LINES])
        why = f"{_ranks(culprits)} did not come to {mine.at}: {does}"
        return _verdict(scene, culprits, why)
    if stuck:
        why = f"all ranks came to {statuses[stuck[0]].at}, but it does not end"
        return _verdict(scene, statuses[stuck[0]].members, why)
    why = f"{_ranks(path)} wait for each other, each in another collective"
    return _verdict(scene, path, why)


def _verdict(scene: Scene, culprits: Sequence[int], why: str) -> Verdict:
    ordered = sorted(scene.statuses, key=lambda rank: (rank not in culprits, rank))
    lines = [
        f"  rank {rank} died{_last(scene.statuses[rank])}"
        if rank in scene.dead
        else f"  {describe(scene.statuses[rank])}"
        for rank in ordered[:_LINES]
    ]
    if len(ordered) > _LINES:
        lines.append(f"  and {len(ordered) - _LINES} more ranks")
    return Verdict(tuple(culprits), "\n".join([why, *lines]))


def _last(status: Status) -> str:
    beside = f" ({status.aside.excuse})" if status.aside is not None and status.aside.excuse else ""
    said = ", before any collective" if status.at is None else f"; it was last in {status.at}"
    return said + beside


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{rest}"
