"""What all dumps of a job say together: who enqueued what, who saw what end, who waits where."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    DumpSet,
    FlightRecorderDump,
    RecordedGroup,
    RecordedOperation,
)

SYNCHRONIZING_COLLECTIVES = frozenset(
    {"all_reduce", "allreduce", "_all_gather_base", "all_gather", "_reduce_scatter_base",
     "reduce_scatter", "all_to_all", "all_to_allv", "alltoall", "alltoall_base", "barrier",
     "all_barrier", "allreduce_coalesced", "all_reduce_barrier"}
)  # fmt: skip
"""Collectives that end nowhere before every member has begun: each needs data of each."""


class RankWait(NamedTuple):
    """A rank cannot go on before another one does something."""

    waiting_rank: int
    blocking_rank: int
    operation: RecordedOperation
    reason: str
    """`missing`: not enqueued there; `behind`: older work stands before it; `no dump`."""


class DumpIndex:
    """The dumps of a job, indexed for the questions asked of them."""

    def __init__(self, dumps: DumpSet) -> None:
        self.dumps: dict[int, FlightRecorderDump] = {dump.rank: dump for dump in dumps.dumps}
        self.damaged = dict(dumps.damaged)
        self.pending: dict[int, list[RecordedOperation]] = {
            dump.rank: [operation for operation in dump.operations if operation.is_pending]
            for dump in dumps.dumps
        }
        self.seen: dict[RecordedGroup, dict[int, dict[int, RecordedOperation]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        """Collectives by group, sequence and rank."""
        self.p2p_groups: set[RecordedGroup] = set()
        self._enqueued: dict[tuple[int, RecordedGroup], int] = {}
        self._pairs: dict[tuple[int, RecordedGroup, str, int, int], list[RecordedOperation]] = (
            defaultdict(list)
        )
        for dump in dumps.dumps:
            self._index(dump)
        for dump in dumps.dumps:
            self._count(dump)
        lists = {id(group.ranks): group.ranks for dump in dumps.dumps for group in dump.groups}
        told = {rank for ranks in lists.values() for rank in ranks}
        self.world: tuple[int, ...] = tuple(sorted(told | self.dumps.keys() | self.damaged.keys()))
        self.ranks_without_dump: tuple[int, ...] = tuple(
            r for r in self.world if r not in self.dumps
        )
        self._strangers: dict[RecordedGroup, tuple[int, ...]] = {}
        self._present: dict[RecordedGroup, tuple[int, ...]] = {}
        self._awaited: dict[tuple[RecordedGroup, int], list[tuple[int, str]]] = {}
        self._heads: dict[int, list[RecordedOperation]] = {}
        self._oldest: dict[int, RecordedOperation | None] = {}
        self._likeness: dict[int, list[tuple[str, str, int, int, int]]] = {}

    def _index(self, dump: FlightRecorderDump) -> None:
        for operation in dump.operations:
            if not operation.is_p2p:
                self.seen[operation.group][operation.sequence_id].setdefault(dump.rank, operation)
                continue
            self.p2p_groups.add(operation.group)
            if operation.is_pending:
                key = _pair(dump.rank, operation)
                self._pairs[key].append(operation)

    def _count(self, dump: FlightRecorderDump) -> None:
        """Take counts of groups; where a group also sends, its counter mixes both kinds."""
        for group, progress in dump.progress.items():
            if group not in self.p2p_groups:
                self._enqueued[dump.rank, group] = progress.last_enqueued
        for operation in dump.operations:
            if not operation.is_p2p:
                key = (dump.rank, operation.group)
                self._enqueued[key] = max(self._enqueued.get(key, -1), operation.sequence_id)

    def find_members(self, group: RecordedGroup) -> Sequence[int]:
        """Return a group's ranks; of a group that no dump describes, those that took part."""
        if group.ranks:
            return group.ranks
        if group not in self._strangers:
            ranks = {rank for by_rank in self.seen[group].values() for rank in by_rank}
            self._strangers[group] = tuple(sorted(ranks))
        return self._strangers[group]

    def find_members_with_dump(self, group: RecordedGroup) -> tuple[int, ...]:
        """Return the members of a group that left a dump."""
        if group not in self._present:
            self._present[group] = tuple(r for r in self.find_members(group) if r in self.dumps)
        return self._present[group]

    def last_enqueued(self, rank: int, group: RecordedGroup) -> int:
        """Return the number of the last collective that a rank enqueued in a group, -1 for none."""
        return self._enqueued.get((rank, group), -1)

    def has_enqueued(self, rank: int, operation: RecordedOperation) -> bool:
        """Tell whether a rank with a dump enqueued a collective."""
        here = self.seen[operation.group].get(operation.sequence_id, {})
        return rank in here or self.last_enqueued(rank, operation.group) >= operation.sequence_id

    def covers_operation(self, rank: int, operation: RecordedOperation) -> bool:
        """Tell whether a rank's dump says what it did in a collective's group.

        A ring that still has its first record has lost nothing: what is not there never was.
        """
        if (rank, operation.group) in self._enqueued:
            return True
        mine = self.dumps[rank].operations
        return bool(mine) and mine[0].record_id == 0 and operation.group in self.dumps[rank].groups

    def is_pending(self, rank: int, operation: RecordedOperation) -> bool:
        """Tell whether a rank waits in a collective."""
        mine = self.seen[operation.group].get(operation.sequence_id, {}).get(rank)
        return mine is not None and mine.is_pending

    def has_completed(self, rank: int, operation: RecordedOperation) -> bool:
        """Tell whether a rank saw a collective end; dumps may list only what has not."""
        mine = self.seen[operation.group].get(operation.sequence_id, {}).get(rank)
        if mine is not None:
            return mine.is_completed
        return self.last_enqueued(rank, operation.group) >= operation.sequence_id

    def find_oldest_blocking(self, rank: int) -> RecordedOperation | None:
        """Return the oldest operation a rank's GPU can be held up by; sends hold nobody up."""
        if rank not in self._oldest:
            waiting = self.pending.get(rank, [])
            self._oldest[rank] = next((each for each in waiting if each.name != "send"), None)
        return self._oldest[rank]

    def find_first_pending(self, rank: int) -> list[RecordedOperation]:
        """Return a rank's first unfinished operations, sends among them; a batch begins at once."""
        if rank not in self._heads:
            waiting = self.pending.get(rank, [])
            self._heads[rank] = [each for each in waiting if each.record_id == waiting[0].record_id]
        return self._heads[rank]

    def match_p2p(self, operation: RecordedOperation, peer: int) -> RecordedOperation | None:
        """Return the peer's unfinished end of a send or receive."""
        other = "recv" if operation.name == "send" else "send"
        key = (peer, operation.group, other, operation.source, operation.destination)
        found = self._pairs.get(key)
        return found[0] if found else None

    def find_pending_per_queue(self, rank: int) -> list[RecordedOperation]:
        """Return the first unfinished operation of each queue: each group, each pair."""
        first: dict[tuple[RecordedGroup, str, int, int], RecordedOperation] = {}
        for operation in self.pending.get(rank, []):
            name = operation.name if operation.is_p2p else ""
            first.setdefault(
                (operation.group, name, operation.source, operation.destination), operation
            )
        return list(first.values())

    def find_waits(self, rank: int) -> Iterable[RankWait]:
        """Say whom a rank waits for, queue by queue."""
        for operation in self.find_pending_per_queue(rank):
            yield from self.find_operation_waits(rank, operation)

    def find_operation_waits(self, rank: int, operation: RecordedOperation) -> Iterable[RankWait]:
        """Say whom a rank waits for in one operation."""
        if operation.is_p2p:
            return self._wait_for_peer(rank, operation)
        return self._wait_for_members(rank, operation)

    def _wait_for_members(self, rank: int, operation: RecordedOperation) -> Iterable[RankWait]:
        key = operation.group, operation.sequence_id
        if key not in self._awaited:  # the same for all who wait in it
            self._awaited[key] = [
                (member, why)
                for member in self.find_members(operation.group)
                if (why := self._why_awaited(member, operation))
            ]
        return [
            RankWait(rank, member, operation, why)
            for member, why in self._awaited[key]
            if member != rank
        ]

    def _why_awaited(self, member: int, operation: RecordedOperation) -> str:
        """Say why a member of a group holds up a collective; empty where it does not."""
        if member not in self.dumps:
            return "no dump"
        theirs = self.seen[operation.group].get(operation.sequence_id, {}).get(member)
        if theirs is None:
            enqueued = self.last_enqueued(member, operation.group) >= operation.sequence_id
            return "" if enqueued else "missing"
        oldest = self.find_oldest_blocking(member)
        is_behind = oldest is not None and oldest.record_id < theirs.record_id
        return "behind" if theirs.is_pending and is_behind else ""

    def _wait_for_peer(self, rank: int, operation: RecordedOperation) -> Iterable[RankWait]:
        peer = get_peer_rank(operation)
        if peer < 0 or peer == rank:
            return
        if peer not in self.dumps:
            yield RankWait(rank, peer, operation, "no dump")
            return
        theirs = self.match_p2p(operation, peer)
        if theirs is None:
            yield RankWait(rank, peer, operation, "missing")
            return
        oldest = self.find_oldest_blocking(peer)
        if oldest is not None and oldest.record_id < theirs.record_id:
            yield RankWait(rank, peer, operation, "behind")

    def find_peers_at_point(self, rank: int) -> list[int]:
        """Return the ranks of the same stage whose GPUs stand where this one's does."""
        oldest = self.find_oldest_blocking(rank)
        if oldest is not None and not oldest.is_p2p:
            near: Sequence[int] = self.find_members(oldest.group)
            there = [other for other in near if self.is_pending(other, oldest)]
        else:
            # Own peers, own groups: what is unfinished here must be how it begins there.
            mine = self.describe_pending(rank)
            groups = [g for g in self.dumps[rank].groups if g not in self.p2p_groups]
            near = sorted({other for group in groups for other in self.find_members(group)})
            there = [
                r for r in near if r in self.dumps and self.describe_pending(r)[: len(mine)] == mine
            ]
        return [
            other
            for other in there
            if other != rank and self.find_stage_key(other) == self.find_stage_key(rank)
        ]

    def describe_pending(self, rank: int) -> list[tuple[str, str, int, int, int]]:
        """Return a rank's unfinished work in terms that ranks of sister groups share."""
        if rank not in self._likeness:
            self._likeness[rank] = [
                (each.group.description, each.name, each.sequence_id,
                 _place(each.group, each.source), _place(each.group, each.destination))
                for each in self.pending[rank]
            ]  # fmt: skip
        return self._likeness[rank]

    def measure_enqueue_lead(self, rank: int, other: int) -> tuple[int, RecordedGroup] | None:
        """Return how much more one rank's host enqueued than another's, in the group of most."""
        best: tuple[int, RecordedGroup] | None = None
        for group in self.dumps[other].groups:
            if rank in self.find_members(group) and group not in self.p2p_groups:
                theirs = self.last_enqueued(other, group)
                gap = self.last_enqueued(rank, group) - theirs
                if theirs >= 0 and gap > (best[0] if best else 0):
                    best = gap, group
        return best

    def find_stage_key(self, rank: int) -> tuple[int, ...]:
        """Return a rank's places in the groups that send: ranks of one pipeline stage share it."""
        dump = self.dumps[rank]
        return tuple(
            group.ranks.index(rank)
            for group in sorted(dump.groups)
            if group in self.p2p_groups and rank in group.ranks
        )


def get_peer_rank(operation: RecordedOperation) -> int:
    """Return the other end of a send or receive."""
    return operation.destination if operation.name == "send" else operation.source


def _place(group: RecordedGroup, rank: int) -> int:
    return group.ranks.index(rank) if rank in group.ranks else rank


def _pair(rank: int, operation: RecordedOperation) -> tuple[int, RecordedGroup, str, int, int]:
    return rank, operation.group, operation.name, operation.source, operation.destination
