"""What all dumps of a job say together: who enqueued what, who saw what end, who waits where."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.timeline.readers.flight_recorder import Dump, Dumps, Group, Operation

SYMMETRIC = frozenset(
    {"all_reduce", "allreduce", "_all_gather_base", "all_gather", "_reduce_scatter_base",
     "reduce_scatter", "all_to_all", "all_to_allv", "alltoall", "alltoall_base", "barrier",
     "all_barrier", "allreduce_coalesced", "all_reduce_barrier"}
)  # fmt: skip
"""Collectives that end nowhere before every member has begun: each needs data of each."""


class Wait(NamedTuple):
    """A rank cannot go on before another one does something."""

    waiter: int
    on: int
    operation: Operation
    why: str
    """`missing`: not enqueued there; `behind`: older work stands before it; `no dump`."""


class Board:
    """The dumps of a job, indexed for the questions asked of them."""

    def __init__(self, dumps: Dumps) -> None:
        self.dumps: dict[int, Dump] = {dump.rank: dump for dump in dumps.dumps}
        self.damaged = dict(dumps.damaged)
        self.pending: dict[int, list[Operation]] = {
            dump.rank: [operation for operation in dump.operations if operation.pending]
            for dump in dumps.dumps
        }
        self.seen: dict[Group, dict[int, dict[int, Operation]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        """Collectives by group, sequence and rank."""
        self.p2p_groups: set[Group] = set()
        self._enqueued: dict[tuple[int, Group], int] = {}
        self._pairs: dict[tuple[int, Group, str, int, int], list[Operation]] = defaultdict(list)
        for dump in dumps.dumps:
            self._index(dump)
        for dump in dumps.dumps:
            self._count(dump)
        lists = {id(group.ranks): group.ranks for dump in dumps.dumps for group in dump.groups}
        told = {rank for ranks in lists.values() for rank in ranks}
        self.world: tuple[int, ...] = tuple(sorted(told | self.dumps.keys() | self.damaged.keys()))
        self.absent: tuple[int, ...] = tuple(r for r in self.world if r not in self.dumps)
        self._strangers: dict[Group, tuple[int, ...]] = {}
        self._present: dict[Group, tuple[int, ...]] = {}
        self._awaited: dict[tuple[Group, int], list[tuple[int, str]]] = {}
        self._heads: dict[int, list[Operation]] = {}
        self._oldest: dict[int, Operation | None] = {}
        self._likeness: dict[int, list[tuple[str, str, int, int, int]]] = {}

    def _index(self, dump: Dump) -> None:
        for operation in dump.operations:
            if not operation.is_p2p:
                self.seen[operation.group][operation.sequence].setdefault(dump.rank, operation)
                continue
            self.p2p_groups.add(operation.group)
            if operation.pending:
                key = _pair(dump.rank, operation)
                self._pairs[key].append(operation)

    def _count(self, dump: Dump) -> None:
        """Take counts of groups; where a group also sends, its counter mixes both kinds."""
        for group, progress in dump.progress.items():
            if group not in self.p2p_groups:
                self._enqueued[dump.rank, group] = progress.enqueued
        for operation in dump.operations:
            if not operation.is_p2p:
                key = (dump.rank, operation.group)
                self._enqueued[key] = max(self._enqueued.get(key, -1), operation.sequence)

    def members(self, group: Group) -> Sequence[int]:
        """Return a group's ranks; of a group that no dump describes, those that took part."""
        if group.ranks:
            return group.ranks
        if group not in self._strangers:
            ranks = {rank for by_rank in self.seen[group].values() for rank in by_rank}
            self._strangers[group] = tuple(sorted(ranks))
        return self._strangers[group]

    def present(self, group: Group) -> tuple[int, ...]:
        """Return the members of a group that left a dump."""
        if group not in self._present:
            self._present[group] = tuple(r for r in self.members(group) if r in self.dumps)
        return self._present[group]

    def enqueued(self, rank: int, group: Group) -> int:
        """Return the number of the last collective that a rank enqueued in a group, -1 for none."""
        return self._enqueued.get((rank, group), -1)

    def has_enqueued(self, rank: int, operation: Operation) -> bool:
        """Tell whether a rank with a dump enqueued a collective."""
        here = self.seen[operation.group].get(operation.sequence, {})
        return rank in here or self.enqueued(rank, operation.group) >= operation.sequence

    def knows(self, rank: int, operation: Operation) -> bool:
        """Tell whether a rank's dump says what it did in a collective's group.

        A ring that still has its first record has lost nothing: what is not there never was.
        """
        if (rank, operation.group) in self._enqueued:
            return True
        mine = self.dumps[rank].operations
        return bool(mine) and mine[0].record == 0 and operation.group in self.dumps[rank].groups

    def is_pending(self, rank: int, operation: Operation) -> bool:
        """Tell whether a rank waits in a collective."""
        mine = self.seen[operation.group].get(operation.sequence, {}).get(rank)
        return mine is not None and mine.pending

    def has_completed(self, rank: int, operation: Operation) -> bool:
        """Tell whether a rank saw a collective end; dumps may list only what has not."""
        mine = self.seen[operation.group].get(operation.sequence, {}).get(rank)
        if mine is not None:
            return mine.completed
        return self.enqueued(rank, operation.group) >= operation.sequence

    def oldest(self, rank: int) -> Operation | None:
        """Return the oldest operation a rank's GPU can be held up by; sends hold nobody up."""
        if rank not in self._oldest:
            waiting = self.pending.get(rank, [])
            self._oldest[rank] = next((each for each in waiting if each.name != "send"), None)
        return self._oldest[rank]

    def heads(self, rank: int) -> list[Operation]:
        """Return a rank's first unfinished operations, sends among them; a batch begins at once."""
        if rank not in self._heads:
            waiting = self.pending.get(rank, [])
            self._heads[rank] = [each for each in waiting if each.record == waiting[0].record]
        return self._heads[rank]

    def match(self, operation: Operation, peer: int) -> Operation | None:
        """Return the peer's unfinished end of a send or receive."""
        other = "recv" if operation.name == "send" else "send"
        key = (peer, operation.group, other, operation.source, operation.destination)
        found = self._pairs.get(key)
        return found[0] if found else None

    def fronts(self, rank: int) -> list[Operation]:
        """Return the first unfinished operation of each queue: each group, each pair."""
        first: dict[tuple[Group, str, int, int], Operation] = {}
        for operation in self.pending.get(rank, []):
            name = operation.name if operation.is_p2p else ""
            first.setdefault(
                (operation.group, name, operation.source, operation.destination), operation
            )
        return list(first.values())

    def waits(self, rank: int) -> Iterable[Wait]:
        """Say whom a rank waits for, queue by queue."""
        for operation in self.fronts(rank):
            yield from self.waits_in(rank, operation)

    def waits_in(self, rank: int, operation: Operation) -> Iterable[Wait]:
        """Say whom a rank waits for in one operation."""
        if operation.is_p2p:
            return self._wait_for_peer(rank, operation)
        return self._wait_for_members(rank, operation)

    def _wait_for_members(self, rank: int, operation: Operation) -> Iterable[Wait]:
        key = operation.group, operation.sequence
        if key not in self._awaited:  # the same for all who wait in it
            self._awaited[key] = [
                (member, why)
                for member in self.members(operation.group)
                if (why := self._why_awaited(member, operation))
            ]
        return [
            Wait(rank, member, operation, why)
            for member, why in self._awaited[key]
            if member != rank
        ]

    def _why_awaited(self, member: int, operation: Operation) -> str:
        """Say why a member of a group holds up a collective; empty where it does not."""
        if member not in self.dumps:
            return "no dump"
        theirs = self.seen[operation.group].get(operation.sequence, {}).get(member)
        if theirs is None:
            enqueued = self.enqueued(member, operation.group) >= operation.sequence
            return "" if enqueued else "missing"
        oldest = self.oldest(member)
        is_behind = oldest is not None and oldest.record < theirs.record
        return "behind" if theirs.pending and is_behind else ""

    def _wait_for_peer(self, rank: int, operation: Operation) -> Iterable[Wait]:
        peer = peer_of(operation)
        if peer < 0 or peer == rank:
            return
        if peer not in self.dumps:
            yield Wait(rank, peer, operation, "no dump")
            return
        theirs = self.match(operation, peer)
        if theirs is None:
            yield Wait(rank, peer, operation, "missing")
            return
        oldest = self.oldest(peer)
        if oldest is not None and oldest.record < theirs.record:
            yield Wait(rank, peer, operation, "behind")

    def twins(self, rank: int) -> list[int]:
        """Return the ranks of the same stage whose GPUs stand where this one's does."""
        oldest = self.oldest(rank)
        if oldest is not None and not oldest.is_p2p:
            near: Sequence[int] = self.members(oldest.group)
            there = [other for other in near if self.is_pending(other, oldest)]
        else:
            # Own peers, own groups: what is unfinished here must be how it begins there.
            mine = self.likeness(rank)
            groups = [g for g in self.dumps[rank].groups if g not in self.p2p_groups]
            near = sorted({other for group in groups for other in self.members(group)})
            there = [r for r in near if r in self.dumps and self.likeness(r)[: len(mine)] == mine]
        return [other for other in there if other != rank and self.stage(other) == self.stage(rank)]

    def likeness(self, rank: int) -> list[tuple[str, str, int, int, int]]:
        """Return a rank's unfinished work in terms that ranks of sister groups share."""
        if rank not in self._likeness:
            self._likeness[rank] = [
                (each.group.description, each.name, each.sequence,
                 _place(each.group, each.source), _place(each.group, each.destination))
                for each in self.pending[rank]
            ]  # fmt: skip
        return self._likeness[rank]

    def lead(self, rank: int, other: int) -> tuple[int, Group] | None:
        """Return how much more one rank's host enqueued than another's, in the group of most."""
        best: tuple[int, Group] | None = None
        for group in self.dumps[other].groups:
            if rank in self.members(group) and group not in self.p2p_groups:
                theirs = self.enqueued(other, group)
                gap = self.enqueued(rank, group) - theirs
                if theirs >= 0 and gap > (best[0] if best else 0):
                    best = gap, group
        return best

    def stage(self, rank: int) -> tuple[int, ...]:
        """Return a rank's places in the groups that send: ranks of one pipeline stage share it."""
        dump = self.dumps[rank]
        return tuple(
            group.ranks.index(rank)
            for group in sorted(dump.groups)
            if group in self.p2p_groups and rank in group.ranks
        )


def peer_of(operation: Operation) -> int:
    """Return the other end of a send or receive."""
    return operation.destination if operation.name == "send" else operation.source


def _place(group: Group, rank: int) -> int:
    return group.ranks.index(rank) if rank in group.ranks else rank


def _pair(rank: int, operation: Operation) -> tuple[int, Group, str, int, int]:
    return rank, operation.group, operation.name, operation.source, operation.destination
