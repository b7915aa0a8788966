"""Recursive halving and doubling: exchange with ranks at distances that are powers of two.

Halving gives away half of what is left in each step and ends with the sum of one share; doubling is
the way back. All-reduce as one after the other is Rabenseifner's (2004): 2·log₂ n steps and as few
bytes as a ring. Where n is no power of two, every second of the first ranks leaves its message to
its neighbour before and gets the result from it afterwards (as in MPICH).
"""

from collections.abc import Iterator

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.algorithms.hierarchy_levels import (
    HierarchyLevel,
    LevelStage,
    build_hierarchical,
)
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp


def build_halving_doubling(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Halve, double, or halve and then double."""
    return build_hierarchical("halving_doubling", op, shape, [build_halving_level(shape.ranks)])


def build_recursive_doubling(shape: AlgorithmShape) -> Collective:
    """Exchange whole messages at doubling distances: log₂ n steps, the fewest there can be.

    What arrives is put aside in one of two places in turn, since the partner reads at that time
    what it will be added to.
    """
    n, size = shape.ranks, shape.slots_per_share
    flow = CollectiveBuilder("recursive_doubling", "all_reduce", ranks=n, chunks=size)
    aside = flow.allocate_scratch(2 * size)
    seats = _Seats(n)

    def whole(src: int, dst: int, *, adds: bool = False, to: int = 0) -> None:
        for channel, first, count in shape.split_over_channels(size):
            send = flow.add if adds else flow.copy
            send(src, dst, chunk=first, to=to + first, count=count, channel=channel)

    with flow.step():
        for folded, keeper in seats.folded():
            whole(folded, keeper, adds=True)
    for turn, distance in enumerate(seats.distances()):
        to = aside + turn % 2 * size
        with flow.step():
            for seat in range(seats.count):
                whole(seats.digit(seat), seats.digit(seat ^ distance), to=to)
        with flow.step():
            for seat in range(seats.count):
                rank = seats.digit(seat)
                flow.add(rank, rank, chunk=to, to=0, count=size)
    with flow.step():
        for folded, keeper in seats.folded():
            whole(keeper, folded)
    return flow.build()


def build_halving_level(width: int) -> HierarchyLevel:
    """Return the level at which ranks halve and double."""
    return HierarchyLevel(
        width, _halve, _double, reduce=_halve_and_double, shares=_Seats(width).count
    )


class _Seats:
    """The largest power of two among n ranks: who sits there, and who leaves it to a neighbour."""

    def __init__(self, n: int) -> None:
        self.count = 1 << (n.bit_length() - 1)
        self.rest = n - self.count

    def digit(self, seat: int) -> int:
        """Return who has a seat."""
        return 2 * seat + 1 if seat < self.rest else seat + self.rest

    def first(self, seat: int) -> int:
        """Return the first share of a seat, where it takes care of those of two ranks."""
        return 2 * seat if seat < self.rest else seat + self.rest

    def distances(self) -> list[int]:
        """Return the powers of two below the number of seats."""
        return [1 << bit for bit in range(self.count.bit_length() - 1)]

    def folded(self) -> Iterator[tuple[int, int]]:
        """Go through those without a seat, with the neighbour that takes care of them."""
        for seat in range(self.rest):
            yield 2 * seat, 2 * seat + 1


def _halve(stage: LevelStage) -> None:
    seats = _Seats(stage.group_size)
    _fold(stage, seats, stage.group_size)
    _exchange_halves(stage, seats, [seats.first(seat) for seat in range(seats.count + 1)])
    with stage.step():
        for group in _groups(stage):
            for folded, keeper in seats.folded():
                stage.copy(stage.get_member(group, keeper), stage.get_member(group, folded), folded)


def _double(stage: LevelStage) -> None:
    seats, width = _Seats(stage.group_size), stage.group_size
    with stage.step():
        for group in _groups(stage):
            for folded, keeper in seats.folded():
                stage.copy(stage.get_member(group, folded), stage.get_member(group, keeper), folded)
    _exchange_doubles(stage, seats, [seats.first(seat) for seat in range(seats.count + 1)])
    with stage.step():
        for group in _groups(stage):
            for folded, keeper in seats.folded():
                src, dst = stage.get_member(group, keeper), stage.get_member(group, folded)
                stage.copy(src, dst, 0, folded)
                stage.copy(src, dst, folded + 1, width - folded - 1)


def _halve_and_double(stage: LevelStage) -> None:
    """All-reduce: no share has an owner, so there are as many shares as seats."""
    seats = _Seats(stage.group_size)
    firsts = list(range(seats.count + 1))
    _fold(stage, seats, seats.count)
    _exchange_halves(stage, seats, firsts)
    _exchange_doubles(stage, seats, firsts)
    with stage.step():
        for group in _groups(stage):
            for folded, keeper in seats.folded():
                src, dst = stage.get_member(group, keeper), stage.get_member(group, folded)
                stage.copy(src, dst, 0, seats.count)


def _fold(stage: LevelStage, seats: _Seats, shares: int) -> None:
    with stage.step():
        for group in _groups(stage):
            for folded, keeper in seats.folded():
                stage.add(
                    stage.get_member(group, folded), stage.get_member(group, keeper), 0, shares
                )


def _exchange_halves(stage: LevelStage, seats: _Seats, firsts: list[int]) -> None:
    for distance in reversed(seats.distances()):
        with stage.step():
            for src, dst, theirs in _partners(stage, seats, distance):
                begin = theirs - theirs % distance
                share, end = firsts[begin], firsts[begin + distance]
                stage.add(src, dst, share, end - share)


def _exchange_doubles(stage: LevelStage, seats: _Seats, firsts: list[int]) -> None:
    for distance in seats.distances():
        with stage.step():
            for src, dst, theirs in _partners(stage, seats, distance):
                own = theirs ^ distance
                begin = own - own % distance
                share, end = firsts[begin], firsts[begin + distance]
                stage.copy(src, dst, share, end - share)


def _partners(stage: LevelStage, seats: _Seats, distance: int) -> Iterator[tuple[int, int, int]]:
    """Go through (sender, receiver, the receiver's seat)."""
    for group in _groups(stage):
        for seat in range(seats.count):
            theirs = seat ^ distance
            sender = stage.get_member(group, seats.digit(seat))
            yield sender, stage.get_member(group, seats.digit(theirs)), theirs


def _groups(stage: LevelStage) -> Iterator[int]:
    """Go through the first rank of every group."""
    return (rank for rank in stage.ranks if stage.get_index_in_group(rank) == 0)
