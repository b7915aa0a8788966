"""Which collective of one rank is which of another: the same place in the order of their group.

Profiles begin and end at different moments, so a rank may lack the first or the last few. Where the
library numbers its calls, the numbers decide; else the ranks' sequences are laid beside each other
so that most agree in kind and size and their ends lie nearest.
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.collectives.collective_calls import COLLECTIVE_OPS, CollectiveCalls
from meshwright.observe.analyze.spans.intervals import Flags, Ints
from meshwright.timeline.schema import ABSENT

MAX_SHIFT = 64
"""How many collectives a rank may lack at its start."""

MIN_SHARED_CALLS = 8
"""How many collectives two ranks must share to be laid beside each other, or all they have."""

MAX_END_SKEW_NS = 20_000
"""Ends of one collective differ by so much anyway."""


_UNEVEN = [COLLECTIVE_OPS.index(op) for op in ("all_to_all", "gather", "scatter")]


class CollectiveMismatch(NamedTuple):
    """A place where ranks of a group did not do the same."""

    group: str
    position: int
    """Place in the group's order, of what is seen."""
    mismatch_type: str
    """`kind`, `size`, `type` or `missing`."""
    ranks: tuple[int, ...]
    """Those that differ from most."""
    detail: str


class CollectivePositions(NamedTuple):
    """Where every collective stands in the order of its group."""

    position: Ints
    is_matchable: Flags
    """Whether it agrees with the others enough to be matched: of the same kind."""
    mismatches: tuple[CollectiveMismatch, ...]


def match_positions(found: CollectiveCalls) -> CollectivePositions:
    """Number the collectives of every group so that the same ones have the same number."""
    # What a rank gives and gets of these is its own affair.
    size = np.where(np.isin(found.op, _UNEVEN), ABSENT, found.bytes)
    keys = np.column_stack([found.op, size, found.dtype])
    _, key = np.unique(keys, axis=0, return_inverse=True) if len(keys) else (keys, keys[:, :0])
    key = key.reshape(-1)
    position = np.zeros(found.group.size, dtype=np.int64)
    for own in _by_group(found):
        cuts = np.flatnonzero(np.diff(found.rank[own])) + 1
        ranks = np.split(own, cuts)
        _place(found, key, ranks, position)
    return _checked(found, key, position)


def _by_group(found: CollectiveCalls) -> list[Ints]:
    """The rows of each group; they stand together."""
    cuts = np.searchsorted(found.group, np.arange(1, len(found.groups)))
    return np.split(np.arange(found.group.size), cuts) if found.groups else []


def _place(found: CollectiveCalls, key: Ints, ranks: list[Ints], position: Ints) -> None:
    """Number one group's collectives, rank by rank."""
    if all(_numbered(found.sequence[own]) for own in ranks):
        for own in ranks:
            position[own] = found.sequence[own]
        return
    lead = max(ranks, key=len)
    position[lead] = np.arange(lead.size) + MAX_SHIFT
    for own in ranks:
        if own is not lead:
            shift = _shift(found, key, lead, own)
            position[own] = np.arange(own.size) + shift + MAX_SHIFT


def _numbered(sequence: Ints) -> bool:
    return bool(sequence.size and sequence[0] >= 0 and np.all(np.diff(sequence) > 0))


def _shift(found: CollectiveCalls, key: Ints, lead: Ints, own: Ints) -> int:
    """How many places later in the lead's order this rank begins.

    Of the shifts under which most agree in kind and size, those whose ends keep the same distance
    (a wrong one moves them about); of these, the one with least left over on either side, as
    profiles of one job begin and end with the same step; then the one whose ends lie nearest.
    """
    if own.size == lead.size and np.array_equal(key[own], key[lead]):
        apart = found.end_ns[own] - found.end_ns[lead]
        if np.median(np.abs(apart - np.median(apart))) <= MAX_END_SKEW_NS:
            return 0
    spare = lead.size - own.size
    least = min(own.size, max(MIN_SHARED_CALLS, own.size // 2))
    tried = []
    for shift in range(-MAX_SHIFT, spare + MAX_SHIFT + 1):
        first, last = max(0, shift), min(lead.size, own.size + shift)
        if last - first < least:
            continue
        here, there = own[first - shift : last - shift], lead[first:last]
        apart = found.end_ns[here] - found.end_ns[there]
        middle = np.median(apart)
        tried.append(
            _ShiftScore(
                shift,
                float((key[here] == key[there]).mean()),
                float(np.median(np.abs(apart - middle))),
                max(0, -shift, shift - spare),
                abs(float(middle)),
            )
        )
    agree = max(one.agree for one in tried)
    tried = [one for one in tried if one.agree >= agree - 0.005]
    spread = min(one.spread_ns for one in tried)
    tried = [one for one in tried if one.spread_ns <= 2 * spread + MAX_END_SKEW_NS]
    return min(tried, key=lambda one: (one.overhang, one.apart_ns)).shift


class _ShiftScore(NamedTuple):
    """How well two ranks' collectives agree under a shift."""

    shift: int
    agree: float
    """Part that is of the same kind and size."""
    spread_ns: float
    """How much the distance of their ends varies."""
    overhang: int
    """How many are left over beyond the longer sequence."""
    apart_ns: float
    """How far apart ends are."""


def _checked(found: CollectiveCalls, key: Ints, position: Ints) -> CollectivePositions:
    """Find the places where members differ; those of another kind than most are not matched."""
    keep = np.ones(position.size, dtype=np.bool_)
    mismatches: list[CollectiveMismatch] = []
    order = np.lexsort((found.rank, position, found.group))
    group, place = found.group[order], position[order]
    opens = np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(place) != 0)))
    opens = opens[: max(0, order.size)]
    if not order.size:
        return CollectivePositions(position, keep, ())
    low = np.minimum.reduceat(key[order], opens)
    high = np.maximum.reduceat(key[order], opens)
    ends = np.append(opens[1:], order.size)
    for at in np.flatnonzero(low != high).tolist():
        rows = order[opens[at] : ends[at]]
        mismatches.append(_difference(found, key, rows, int(position[rows[0]]), keep))
    mismatches += _missing(found, position)
    return CollectivePositions(position, keep, tuple(mismatches))


def _difference(
    found: CollectiveCalls, key: Ints, rows: Ints, place: int, keep: Flags
) -> CollectiveMismatch:
    values, counts = np.unique(key[rows], return_counts=True)
    most = rows[key[rows] == values[np.argmax(counts)]][0]
    others = rows[key[rows] != key[most]]
    one = others[0]
    if np.any(found.op[others] != found.op[most]):
        what = "kind"
        detail = f"{COLLECTIVE_OPS[found.op[one]]} where most run {COLLECTIVE_OPS[found.op[most]]}"
        keep[others[found.op[others] != found.op[most]]] = False
    elif np.any(found.bytes[others] != found.bytes[most]):
        what = "size"
        detail = f"{found.bytes[one]} bytes where most have {found.bytes[most]}"
    else:
        what, detail = "type", "element types differ"
    ranks = tuple(found.rank[others].tolist())
    return CollectiveMismatch(found.groups[found.group[one]].label, place, what, ranks, detail)


def _missing(found: CollectiveCalls, position: Ints) -> list[CollectiveMismatch]:
    """Ranks that lack a collective between others that they have."""
    gone = []
    for group, own in zip(found.groups, _by_group(found), strict=True):
        places = np.unique(position[own])
        for rank in np.unique(found.rank[own]).tolist():
            there = position[own][found.rank[own] == rank]
            between = places[(places > there.min()) & (places < there.max())]
            holes = np.setdiff1d(between, there)
            gone += [
                CollectiveMismatch(
                    group.label, int(hole), "missing", (rank,), "not in this rank's profile"
                )
                for hole in holes.tolist()
            ]
    return gone
