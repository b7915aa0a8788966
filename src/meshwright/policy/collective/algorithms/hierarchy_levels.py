"""Collectives over levels: ranks in nodes, nodes in pods, pods in the cluster.

Reduce-scatter goes from the innermost level outwards and all-gather back. At a level, the ranks
that differ only in that digit of their number exchange what is left of the message. The message is
numbered by the same digits, innermost first, so what a rank holds is one run at every level.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp


class HierarchyLevel(NamedTuple):
    """How ranks that differ in one digit exchange."""

    group_size: int
    """Ranks that exchange with each other."""
    scatter: "Callable[[LevelStage], None]"
    """Leave each with the sum of its own share."""
    gather: "Callable[[LevelStage], None]"
    """Give every share to all."""
    reduce: "Callable[[LevelStage], None] | None" = None
    """Give the sum to all; reduce-scatter and all-gather, where it has no way of its own."""
    shares: int | None = None
    """Shares that the message is cut into at this level, if not one per rank (all-reduce only)."""
    switch: int | None = None
    """The first switch of the level, if it works with one for each group of ranks."""


class LevelStage(NamedTuple):
    """One level at work: who exchanges with whom, and which slots."""

    builder: CollectiveBuilder
    shape: AlgorithmShape
    level: HierarchyLevel
    stride: int
    """How far apart neighbours of the level are."""
    share_slots: int
    """Slots of one share."""
    first_slots: Sequence[int]
    """Where the message of this level begins, for each rank."""
    order: Sequence[int]
    """What the numbers of slots stand for; empty where they are slots."""

    @property
    def group_size(self) -> int:
        """Return the ranks of a group."""
        return self.level.group_size

    @property
    def ranks(self) -> range:
        """Return all ranks."""
        return range(self.shape.ranks)

    def get_index_in_group(self, rank: int) -> int:
        """Return the number of a rank in its group."""
        return rank // self.stride % self.group_size

    def get_member(self, rank: int, digit: int) -> int:
        """Return the rank with a number in the group of another."""
        return rank + (digit - self.get_index_in_group(rank)) * self.stride

    def get_switch(self, rank: int) -> int:
        """Return the switch of a rank's group."""
        first = self.level.switch or 0
        return self.shape.ranks + first + rank // (self.stride * self.group_size)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Collect the moves of one step."""
        with self.builder.sweep(1, order=self.order):
            yield

    @contextmanager
    def sweep(self, span: int, *, shares: int = 0, peers: int = 0) -> Iterator[None]:
        """Collect the moves of a step that is repeated with other shares or other peers."""
        with self.builder.sweep(
            span,
            shift=shares * self.share_slots,
            wrap=self.group_size * self.share_slots,
            dst_shift=peers * self.stride,
            dst_wrap=self.group_size * self.stride,
            order=self.order,
        ):
            yield

    def copy(self, src: int, dst: int, share: int, count: int = 1, *, rank: int = -1) -> None:
        """Send shares on; `rank` says whose they are where the source is a switch."""
        first = self.first_slots[src if rank < 0 else rank] + share * self.share_slots
        for channel, begin, run in self.shape.split_over_channels(count * self.share_slots):
            self.builder.copy(src, dst, chunk=first + begin, count=run, channel=channel)

    def add(self, src: int, dst: int, share: int, count: int = 1) -> None:
        """Add shares to those of another."""
        first = self.first_slots[src] + share * self.share_slots
        for channel, begin, run in self.shape.split_over_channels(count * self.share_slots):
            self.builder.add(src, dst, chunk=first + begin, count=run, channel=channel)


def build_hierarchical(
    name: str,
    op: CollectiveOp,
    shape: AlgorithmShape,
    levels: Sequence[HierarchyLevel],
    switches: Sequence[str] = (),
) -> Collective:
    """Return reduce-scatter outwards, all-gather inwards, or both around the outermost level."""
    shares = [level.group_size for level in levels]
    if op == "all_reduce":
        shares[-1] = levels[-1].shares or shares[-1]
    sizes = [shape.slots_per_share]
    for share in reversed(shares):
        sizes.insert(0, sizes[0] * share)
    flow = CollectiveBuilder(name, op, ranks=shape.ranks, chunks=sizes[0], switches=switches)
    order = [] if op == "all_reduce" or len(levels) == 1 else _transposed(shape, levels)
    stages, stride, firsts = [], 1, [0] * shape.ranks
    for level, size in zip(levels, sizes[1:], strict=True):
        stage = LevelStage(flow, shape, level, stride, size, firsts, order)
        stages.append(stage)
        firsts = [firsts[rank] + stage.get_index_in_group(rank) * size for rank in stage.ranks]
        stride *= level.group_size
    last = stages[-1].level.reduce
    if op == "all_reduce" and last is not None:
        for stage in stages[:-1]:
            stage.level.scatter(stage)
        last(stages[-1])
        for stage in reversed(stages[:-1]):
            stage.level.gather(stage)
        return flow.build()
    if op in ("all_reduce", "reduce_scatter"):
        for stage in stages:
            stage.level.scatter(stage)
    if op in ("all_reduce", "all_gather"):
        for stage in reversed(stages):
            stage.level.gather(stage)
    return flow.build()


def _transposed(shape: AlgorithmShape, levels: Sequence[HierarchyLevel]) -> list[int]:
    """Return the slots in the order of their owners' digits, innermost first."""
    owners, stride = [0], 1
    for level in levels:
        owners = [owner + digit * stride for owner in owners for digit in range(level.group_size)]
        stride *= level.group_size
    return [
        owner * shape.slots_per_share + index
        for owner in owners
        for index in range(shape.slots_per_share)
    ]
