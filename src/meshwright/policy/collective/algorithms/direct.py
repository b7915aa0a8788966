"""Direct: every rank sends straight to every other. Fewest hops, for small messages."""

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.algorithms.hierarchy_levels import (
    HierarchyLevel,
    LevelStage,
    build_hierarchical,
)
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp


def build_one_shot(shape: AlgorithmShape) -> Collective:
    """Everybody gets everybody's message and adds all of them up, in the order of the ranks.

    All ranks add in the same order, so their results are the same to the last bit.
    """
    n, size = shape.ranks, shape.slots_per_share
    flow = CollectiveBuilder("one_shot", "all_reduce", ranks=n, chunks=size)
    table = flow.allocate_scratch(n * size)
    with flow.step():
        for rank in range(n):
            flow.copy(rank, rank, chunk=0, to=table + rank * size, count=size)
    with flow.sweep(n - 1, dst_shift=1):
        for rank in range(n):
            for channel, first, count in shape.split_over_channels(size):
                to = table + rank * size + first
                flow.copy(rank, (rank + 1) % n, chunk=first, to=to, count=count, channel=channel)
    with flow.step():
        for rank in range(n):
            flow.copy(rank, rank, chunk=table, to=0, count=size)
    with flow.sweep(n - 1, shift=size, arrival_shift=0, wrap=0):
        for rank in range(n):
            flow.add(rank, rank, chunk=table + size, to=0, count=size)
    return flow.build()


def build_two_shot(shape: AlgorithmShape) -> Collective:
    """Every rank adds up one share of the message and gives it to all."""
    return build_hierarchical("two_shot", "all_reduce", shape, [build_direct_level(shape.ranks)])


def build_direct_send(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Send every share straight to whom it is for."""
    return build_hierarchical("direct", op, shape, [build_direct_level(shape.ranks)])


def build_gather(shape: AlgorithmShape) -> Collective:
    """Everybody sends to the root."""
    flow = CollectiveBuilder(
        "direct",
        "gather",
        ranks=shape.ranks,
        chunks=shape.ranks * shape.slots_per_share,
        root=shape.root,
    )
    with flow.step():
        for rank in range(shape.ranks):
            for channel, first, count in shape.split_over_channels(
                shape.slots_per_share if rank != shape.root else 0
            ):
                chunk = rank * shape.slots_per_share + first
                flow.copy(rank, shape.root, chunk=chunk, count=count, channel=channel)
    return flow.build()


def build_scatter(shape: AlgorithmShape) -> Collective:
    """The root sends to everybody."""
    flow = CollectiveBuilder(
        "direct",
        "scatter",
        ranks=shape.ranks,
        chunks=shape.ranks * shape.slots_per_share,
        root=shape.root,
    )
    with flow.step():
        for rank in range(shape.ranks):
            for channel, first, count in shape.split_over_channels(
                shape.slots_per_share if rank != shape.root else 0
            ):
                chunk = rank * shape.slots_per_share + first
                flow.copy(shape.root, rank, chunk=chunk, count=count, channel=channel)
    return flow.build()


def build_send_recv(shape: AlgorithmShape) -> Collective:
    """Every rank sends its message to its peer, where it has one."""
    flow = CollectiveBuilder(
        "direct", "send_recv", ranks=shape.ranks, chunks=shape.slots_per_share, peers=shape.peers
    )
    with flow.step():
        for rank, peer in enumerate(shape.peers):
            for channel, first, count in shape.split_over_channels(
                shape.slots_per_share if peer >= 0 else 0
            ):
                to = flow.output + first
                flow.copy(rank, peer, chunk=first, to=to, count=count, channel=channel)
    return flow.build()


def build_direct_level(width: int) -> HierarchyLevel:
    """Return the level at which everybody sends to everybody."""
    return HierarchyLevel(width, _scatter, _gather)


def _scatter(stage: LevelStage) -> None:
    """In step t every rank sends the share of the rank t further on."""
    with stage.sweep(stage.group_size - 1, shares=1, peers=1):
        for rank in stage.ranks:
            share = (stage.get_index_in_group(rank) + 1) % stage.group_size
            stage.add(rank, stage.get_member(rank, share), share)


def _gather(stage: LevelStage) -> None:
    with stage.sweep(stage.group_size - 1, peers=1):
        for rank in stage.ranks:
            own = stage.get_index_in_group(rank)
            stage.copy(rank, stage.get_member(rank, (own + 1) % stage.group_size), own)
