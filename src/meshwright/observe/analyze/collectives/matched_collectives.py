"""Collectives matched across ranks: who arrived when, how long the transfer took, how fast it was.

The i-th collective of a group on one rank is the i-th on every other. A collective cannot end
before its last member arrives; what a rank spends in it before that is *arrival wait*, what comes
after is *transfer*. Sends and receives are no collectives; `pipeline` reads those.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.collectives.call_matcher import CollectiveMismatch, match_positions
from meshwright.observe.analyze.collectives.collective_calls import (
    COLLECTIVE_OPS,
    CollectiveCalls,
    ProcessGroupRanks,
    find_collective_calls,
)
from meshwright.observe.analyze.spans.intervals import Flags, Ints
from meshwright.policy.collective.bus_bandwidth import bus_factor
from meshwright.timeline.timeline import Timeline


class CollectiveMembers(NamedTuple):
    """One row for every rank of every matched collective, by collective and then by rank."""

    call_index: Ints
    """Place in `MatchedCalls`."""
    rank: Ints
    row: Ints
    """Row in the rank's own timeline."""
    start_ns: Ints
    """When the rank arrived: its kernel began."""
    end_ns: Ints


class MatchedCalls(NamedTuple):
    """One row for every matched collective, in the order of time."""

    group: Ints
    """Place in `MatchedCollectives.groups`."""
    op: Ints
    """Place in `COLLECTIVE_OPS`."""
    bytes: Ints
    """Size as nccl-tests counts it, the larger of what a rank gives and gets; -1 unknown. Where
    ranks differ, as in an uneven all-to-all, that of the largest."""
    dtype: Ints
    """Place in `MatchedCollectives.dtypes`; -1 unknown."""
    first_member: Ints
    """Place of its first member; they stand together."""
    num_members: Ints
    """How many members were seen."""
    is_complete: Flags
    """Whether every rank of the group was seen."""


class MatchedCollectives(NamedTuple):
    """Every collective that at least two ranks show."""

    groups: tuple[ProcessGroupRanks, ...]
    dtypes: tuple[str, ...]
    calls: MatchedCalls
    members: CollectiveMembers
    mismatches: tuple[CollectiveMismatch, ...]
    """Where ranks of a group did not do the same."""
    num_unmatched: int
    """Collectives that only one rank shows."""

    @property
    def arrival_ns(self) -> Ints:
        """When the last member arrived, per collective."""
        return _reduce(np.maximum, self.members.start_ns, self.calls.first_member)

    @property
    def end_ns(self) -> Ints:
        """When the last member was done, per collective."""
        return _reduce(np.maximum, self.members.end_ns, self.calls.first_member)

    @property
    def wait_ns(self) -> Ints:
        """How long each member waited for the last one to arrive, at most its own length."""
        members = self.members
        late = self.arrival_ns[members.call_index] - members.start_ns
        wait: Ints = np.minimum(late, members.end_ns - members.start_ns)
        return wait

    @property
    def transfer_ns(self) -> Ints:
        """How long the data took, per collective: what the rank that waited least spent in it.

        The last to arrive has nothing to wait for. Its own length needs no second clock, so the
        figure stands where clocks disagree.
        """
        return _reduce(
            np.minimum, self.members.end_ns - self.members.start_ns, self.calls.first_member
        )

    @property
    def last_rank(self) -> Ints:
        """Which rank arrived last, per collective."""
        return self._extreme(self.members.start_ns, -1)

    @property
    def first_rank(self) -> Ints:
        """Which rank arrived first, per collective."""
        return self._extreme(self.members.start_ns, 0)

    @property
    def bytes_per_s(self) -> tuple[Ints, Ints]:
        """Algorithm and bus bandwidth per collective, bytes a second; NaN where no size is known.

        Bus bandwidth as nccl-tests counts it, so that it compares with a link's speed.
        """
        calls = self.calls
        transfer_s = np.where(self.transfer_ns > 0, self.transfer_ns, np.nan) / 1e9
        size = np.array([group.size for group in self.groups] or [1])[calls.group]
        factor = np.array(
            [
                bus_factor(COLLECTIVE_OPS[op], max(1, n))
                for op, n in zip(calls.op, size, strict=True)
            ]
        ).reshape(-1)
        algorithm = np.where(calls.bytes > 0, calls.bytes, np.nan) / transfer_s
        return algorithm, algorithm * factor

    def _extreme(self, values: Ints, which: int) -> Ints:
        order = np.lexsort((self.members.rank, values, self.members.call_index))
        place = (
            self.calls.first_member
            if which == 0
            else self.calls.first_member + self.calls.num_members - 1
        )
        ranks: Ints = self.members.rank[order][place]
        return ranks


class CollectiveSizeRow(NamedTuple):
    """What the collectives of one group, kind, size and element type did."""

    group: str
    num_ranks: int
    op: str
    dtype: str
    bytes: int
    num_calls: int
    member_ranks: tuple[int, ...]
    """The ranks of the group."""
    transfer_median_ns: float
    transfer_total_ns: int
    wait_total_ns: int
    """Arrival wait of all members together."""
    algorithm_bytes_per_s: float
    """Median."""
    bus_bytes_per_s: float
    """Median."""
    slowest_bus_bytes_per_s: float
    fastest_bus_bytes_per_s: float


def match_collectives(timeline: Timeline, parts: Sequence[Timeline] = ()) -> MatchedCollectives:
    """Match the collectives of all ranks; `parts` come from `find_collective_calls`."""
    found = find_collective_calls(timeline, parts)
    place = match_positions(found)
    return _collected(found, place.position, place.is_matchable, place.mismatches)


def sum_by_size(collectives: MatchedCollectives) -> tuple[CollectiveSizeRow, ...]:
    """Sum up by group, kind, element type and size; those that took longest come first."""
    calls = collectives.calls
    keys = np.column_stack([calls.group, calls.op, calls.dtype, calls.bytes])
    if not len(keys):
        return ()
    distinct, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.reshape(-1)
    algorithm, bus = collectives.bytes_per_s
    transfer = collectives.transfer_ns
    waits = np.bincount(collectives.members.call_index, collectives.wait_ns, minlength=len(keys))
    rows = []
    for number, (group, op, dtype, size) in enumerate(distinct.tolist()):
        own = np.flatnonzero(which == number)
        known = size > 0 and bool(np.any(transfer[own] > 0))
        speeds = bus[own][~np.isnan(bus[own])]
        rows.append(
            CollectiveSizeRow(
                group=collectives.groups[group].label,
                num_ranks=collectives.groups[group].size,
                op=COLLECTIVE_OPS[op],
                dtype=collectives.dtypes[dtype] if dtype >= 0 else "",
                bytes=size,
                num_calls=own.size,
                member_ranks=collectives.groups[group].ranks,
                transfer_median_ns=float(np.median(transfer[own])),
                transfer_total_ns=int(transfer[own].sum()),
                wait_total_ns=int(waits[own].sum()),
                algorithm_bytes_per_s=float(np.nanmedian(algorithm[own])) if known else np.nan,
                bus_bytes_per_s=float(np.median(speeds)) if known else np.nan,
                slowest_bus_bytes_per_s=float(speeds.min()) if known else np.nan,
                fastest_bus_bytes_per_s=float(speeds.max()) if known else np.nan,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.transfer_total_ns))


def shift_members(
    collectives: MatchedCollectives, offset_ns: dict[int, Ints]
) -> MatchedCollectives:
    """Return the same with every rank's members moved, as `clocks` says; one offset per member."""
    members = collectives.members
    start, end = members.start_ns.copy(), members.end_ns.copy()
    for rank, offset in offset_ns.items():
        own = members.rank == rank
        start[own] -= offset
        end[own] -= offset
    return collectives._replace(members=members._replace(start_ns=start, end_ns=end))


def _collected(
    found: CollectiveCalls, position: Ints, keep: Flags, mismatches: tuple[CollectiveMismatch, ...]
) -> MatchedCollectives:
    """Put what has the same place in the same group together."""
    rows = np.flatnonzero(keep)
    rows = rows[np.lexsort((found.rank[rows], position[rows], found.group[rows]))]
    group, place = found.group[rows], position[rows]
    opens = np.ones(rows.size, dtype=np.bool_)
    opens[1:] = (group[1:] != group[:-1]) | (place[1:] != place[:-1])
    number = np.cumsum(opens) - 1
    counts = np.bincount(number, minlength=0)
    alone = int((counts < 2).sum())
    rows, number = rows[counts[number] > 1], number[counts[number] > 1]
    # In the order of time: by when the last member arrived.
    distinct, number = np.unique(number, return_inverse=True)
    latest = np.full(distinct.size, np.iinfo(np.int64).min)
    np.maximum.at(latest, number, found.start_ns[rows])
    rank_of = np.empty(distinct.size, dtype=np.int64)
    rank_of[np.argsort(latest, kind="stable")] = np.arange(distinct.size)
    call = rank_of[number]
    order = np.lexsort((found.rank[rows], call))
    rows, call = rows[order], call[order]
    members = np.bincount(call, minlength=distinct.size)
    first = np.cumsum(members) - members
    lead = rows[first] if rows.size else rows
    sizes = np.array([one.size for one in found.groups] or [0])
    return MatchedCollectives(
        groups=found.groups,
        dtypes=found.dtypes,
        calls=MatchedCalls(
            group=found.group[lead],
            op=found.op[lead],
            bytes=_reduce(np.maximum, found.bytes[rows], first),
            dtype=found.dtype[lead],
            first_member=first,
            num_members=members,
            is_complete=members >= sizes[found.group[lead]],
        ),
        members=CollectiveMembers(
            call, found.rank[rows], found.row[rows], found.start_ns[rows], found.end_ns[rows]
        ),
        mismatches=mismatches,
        num_unmatched=alone,
    )


def _reduce(ufunc: np.ufunc, values: Ints, first: Ints) -> Ints:
    if not first.size:
        return values[:0]
    reduced: Ints = ufunc.reduceat(values, first)
    return reduced
