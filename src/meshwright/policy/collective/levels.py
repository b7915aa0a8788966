"""Collectives over levels: ranks in nodes, nodes in pods, pods in the cluster.

Reduce-scatter goes from the innermost level outwards and all-gather back. At a level, the ranks
that differ only in that digit of their number exchange what is left of the message. The message is
numbered by the same digits, innermost first, so what a rank holds is one run at every level.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.policy.collective.building import Builder
from meshwright.policy.collective.collective import Collective, Op
from meshwright.policy.collective.shape import Shape


class Level(NamedTuple):
    """How ranks that differ in one digit exchange."""

    width: int
    """Ranks that exchange with each other."""
    scatter: "Callable[[Stage], None]"
    """Leave each with the sum of its own share."""
    gather: "Callable[[Stage], None]"
    """Give every share to all."""
    reduce: "Callable[[Stage], None] | None" = None
    """Give the sum to all; reduce-scatter and all-gather, where it has no way of its own."""
    shares: int | None = None
    """Shares that the message is cut into at this level, if not one per rank (all-reduce only)."""
    switch: int | None = None
    """The first switch of the level, if it works with one for each group of ranks."""


class Stage(NamedTuple):
    """One level at work: who exchanges with whom, and which slots."""

    flow: Builder
    shape: Shape
    level: Level
    stride: int
    """How far apart neighbours of the level are."""
    size: int
    """Slots of one share."""
    firsts: Sequence[int]
    """Where the message of this level begins, for each rank."""
    order: Sequence[int]
    """What the numbers of slots stand for; empty where they are slots."""

    @property
    def width(self) -> int:
        """Return the ranks of a group."""
        return self.level.width

    @property
    def ranks(self) -> range:
        """Return all ranks."""
        return range(self.shape.ranks)

    def digit(self, rank: int) -> int:
        """Return the number of a rank in its group."""
        return rank // self.stride % self.width

    def member(self, rank: int, digit: int) -> int:
        """Return the rank with a number in the group of another."""
        return rank + (digit - self.digit(rank)) * self.stride

    def switch(self, rank: int) -> int:
        """Return the switch of a rank's group."""
        first = self.level.switch or 0
        return self.shape.ranks + first + rank // (self.stride * self.width)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Collect the moves of one step."""
        with self.flow.sweep(1, order=self.order):
            yield

    @contextmanager
    def sweep(self, span: int, *, shares: int = 0, peers: int = 0) -> Iterator[None]:
        """Collect the moves of a step that is repeated with other shares or other peers."""
        with self.flow.sweep(
            span,
            shift=shares * self.size,
            wrap=self.width * self.size,
            dst_shift=peers * self.stride,
            dst_wrap=self.width * self.stride,
            order=self.order,
        ):
            yield

    def copy(self, src: int, dst: int, share: int, count: int = 1, *, rank: int = -1) -> None:
        """Send shares on; `rank` says whose they are where the source is a switch."""
        first = self.firsts[src if rank < 0 else rank] + share * self.size
        for channel, begin, run in self.shape.lanes(count * self.size):
            self.flow.copy(src, dst, chunk=first + begin, count=run, channel=channel)

    def add(self, src: int, dst: int, share: int, count: int = 1) -> None:
        """Add shares to those of another."""
        first = self.firsts[src] + share * self.size
        for channel, begin, run in self.shape.lanes(count * self.size):
            self.flow.add(src, dst, chunk=first + begin, count=run, channel=channel)


def over_levels(
    name: str, op: Op, shape: Shape, levels: Sequence[Level], switches: Sequence[str] = ()
) -> Collective:
    """Return reduce-scatter outwards, all-gather inwards, or both around the outermost level."""
    shares = [level.width for level in levels]
    if op == "all_reduce":
        shares[-1] = levels[-1].shares or shares[-1]
    sizes = [shape.part]
    for share in reversed(shares):
        sizes.insert(0, sizes[0] * share)
    flow = Builder(name, op, ranks=shape.ranks, chunks=sizes[0], switches=switches)
    order = [] if op == "all_reduce" or len(levels) == 1 else _transposed(shape, levels)
    stages, stride, firsts = [], 1, [0] * shape.ranks
    for level, size in zip(levels, sizes[1:], strict=True):
        stage = Stage(flow, shape, level, stride, size, firsts, order)
        stages.append(stage)
        firsts = [firsts[rank] + stage.digit(rank) * size for rank in stage.ranks]
        stride *= level.width
    last = stages[-1].level.reduce
    if op == "all_reduce" and last is not None:
        for stage in stages[:-1]:
            stage.level.scatter(stage)
        last(stages[-1])
        for stage in reversed(stages[:-1]):
            stage.level.gather(stage)
        return flow.done()
    if op in ("all_reduce", "reduce_scatter"):
        for stage in stages:
            stage.level.scatter(stage)
    if op in ("all_reduce", "all_gather"):
        for stage in reversed(stages):
            stage.level.gather(stage)
    return flow.done()


def _transposed(shape: Shape, levels: Sequence[Level]) -> list[int]:
    """Return the slots in the order of their owners' digits, innermost first."""
    owners, stride = [0], 1
    for level in levels:
        owners = [owner + digit * stride for owner in owners for digit in range(level.width)]
        stride *= level.width
    return [owner * shape.part + index for owner in owners for index in range(shape.part)]
