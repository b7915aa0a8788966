"""`diagnose_hang`: which rank blocks the others, and why. It reads only the ranks' last reports.

A rank that died, raised or sends no heartbeat is the culprit. Otherwise the waits are a path: from
a rank to the members of its group that have not entered the collective, from there to the ranks
they wait for, until ranks are found that wait for none. A closed path means different orders.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from meshwright.run.parallel.health.rank_health import (
    CollectiveRecord,
    RankHealth,
    describe_rank_health,
)

_LINES = 16
"""Of a verdict: the rest of a large job is counted."""


class HangDiagnosis(msgspec.Struct, frozen=True):
    """Why the job ends."""

    culprit_ranks: tuple[int, ...]
    message: str


class JobSnapshot(NamedTuple):
    """What is known of all ranks."""

    statuses: Mapping[int, RankHealth]
    dead_ranks: frozenset[int] = frozenset()
    """Ranks whose process is gone."""
    ranks_without_heartbeat: frozenset[int] = frozenset()
    """Ranks whose watchdog has reported nothing for long."""


def diagnose_hang(scene: JobSnapshot, me: int) -> HangDiagnosis:
    """Return the ranks that keep this rank waiting, and why."""
    statuses = scene.statuses
    parted = find_divergence(statuses)
    if scene.dead_ranks:
        ranks = sorted(scene.dead_ranks)
        if parted is not None and set(parted.culprit_ranks) & scene.dead_ranks:
            # Some libraries end a process that gets more than it expects.
            return _verdict(
                scene, parted.culprit_ranks, f"{parted.message}; {_ranks(ranks)} died of it"
            )
        last = [
            f"rank {rank} died, its process is gone{_last(statuses[rank])}"
            for rank in ranks[:_LINES]
        ]
        return _verdict(scene, ranks, "; ".join(last))
    raised = [rank for rank, each in statuses.items() if each.state == "raised"]
    if raised:
        why = "; ".join(f"rank {rank} raised {statuses[rank].error}" for rank in raised)
        return _verdict(scene, raised, why)
    if parted is not None:
        return _verdict(scene, parted.culprit_ranks, parted.message)
    if scene.ranks_without_heartbeat:
        ranks = sorted(scene.ranks_without_heartbeat)
        why = f"{_ranks(ranks)}: no heartbeat: process stopped or host down"
        return _verdict(scene, ranks, why + _last(statuses[ranks[0]]))
    return _waited_for(scene, me)


def find_divergence(statuses: Mapping[int, RankHealth]) -> HangDiagnosis | None:
    """Return the first two ranks that issued different collectives under one number of a group."""
    known: dict[tuple[str, int, int], tuple[int, CollectiveRecord]] = {}
    for rank, status in sorted(statuses.items()):
        for mine in (
            status.recent_collectives
            if status.current_collective is None
            else (*status.recent_collectives, status.current_collective)
        ):
            other, theirs = known.setdefault(
                (mine.group, mine.first_rank, mine.sequence_number), (rank, mine)
            )
            if theirs.signature != mine.signature:
                text = (
                    f"ranks {other} and {rank} of group {mine.group} issued different collectives: "
                    f"rank {other} {theirs}; rank {rank} {mine}"
                )
                return HangDiagnosis((other, rank), text)
    return None


def list_missing_members(statuses: Mapping[int, RankHealth], rank: int) -> list[int]:
    """Return the members that have not entered the collective that a rank waits in."""
    mine = statuses[rank]
    if mine.wait_s is None or mine.current_collective is None:
        return []
    group, number = mine.current_collective.group, mine.current_collective.sequence_number
    return [
        other
        for other in mine.group_ranks
        if other in statuses and statuses[other].collective_counts.get(group, 0) < number
    ]


def _waited_for(scene: JobSnapshot, me: int) -> HangDiagnosis:
    statuses, mine = scene.statuses, scene.statuses[me]
    path, culprits, stuck = [me], [], []
    for rank in path:
        if rank != me and statuses[rank].wait_s is None:
            culprits.append(rank)
            continue
        missing = list_missing_members(statuses, rank)
        if not missing:
            stuck.append(rank)
        path += [other for other in missing if other not in path]
    if culprits:
        verb = "has" if len(culprits) == 1 else "have"
        does = "; ".join(describe_rank_health(statuses[rank]) for rank in culprits[:_LINES])
        why = f"{_ranks(culprits)} {verb} not entered {mine.current_collective}: {does}"
        return _verdict(scene, culprits, why)
    if stuck:
        stuck_in = statuses[stuck[0]].current_collective
        why = f"all ranks entered {stuck_in}, but it does not complete"
        return _verdict(scene, statuses[stuck[0]].group_ranks, why)
    why = f"{_ranks(path)} wait for each other, each in another collective"
    return _verdict(scene, path, why)


def _verdict(scene: JobSnapshot, culprits: Sequence[int], why: str) -> HangDiagnosis:
    ordered = sorted(scene.statuses, key=lambda rank: (rank not in culprits, rank))
    lines = [
        f"  rank {rank} died{_last(scene.statuses[rank])}"
        if rank in scene.dead_ranks
        else f"  {describe_rank_health(scene.statuses[rank])}"
        for rank in ordered[:_LINES]
    ]
    if len(ordered) > _LINES:
        lines.append(f"  and {len(ordered) - _LINES} more ranks")
    return HangDiagnosis(tuple(culprits), "\n".join([why, *lines]))


def _last(status: RankHealth) -> str:
    beside = (
        f" ({status.background.expected_delay})"
        if status.background is not None and status.background.expected_delay
        else ""
    )
    said = (
        ", before any collective"
        if status.current_collective is None
        else f"; it was last in {status.current_collective}"
    )
    return said + beside


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{rest}"
