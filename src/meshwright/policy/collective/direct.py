"""Direct: every rank sends straight to every other. Fewest hops, for small messages."""

from meshwright.policy.collective.building import Builder
from meshwright.policy.collective.collective import Collective, Op
from meshwright.policy.collective.levels import Level, Stage, over_levels
from meshwright.policy.collective.shape import Shape


def one_shot(shape: Shape) -> Collective:
    """Everybody gets everybody's message and adds all of them up, in the order of the ranks.

    All ranks add in the same order, so their results are the same to the last bit.
    """
    n, size = shape.ranks, shape.part
    flow = Builder("one_shot", "all_reduce", ranks=n, chunks=size)
    table = flow.scratch(n * size)
    with flow.step():
        for rank in range(n):
            flow.copy(rank, rank, chunk=0, to=table + rank * size, count=size)
    with flow.sweep(n - 1, dst_shift=1):
        for rank in range(n):
            for channel, first, count in shape.lanes(size):
                to = table + rank * size + first
                flow.copy(rank, (rank + 1) % n, chunk=first, to=to, count=count, channel=channel)
    with flow.step():
        for rank in range(n):
            flow.copy(rank, rank, chunk=table, to=0, count=size)
    with flow.sweep(n - 1, shift=size, arrival_shift=0, wrap=0):
        for rank in range(n):
            flow.add(rank, rank, chunk=table + size, to=0, count=size)
    return flow.done()


def two_shot(shape: Shape) -> Collective:
    """Every rank adds up one share of the message and gives it to all."""
    return over_levels("two_shot", "all_reduce", shape, [direct_level(shape.ranks)])


def direct(op: Op, shape: Shape) -> Collective:
    """Send every share straight to whom it is for."""
    return over_levels("direct", op, shape, [direct_level(shape.ranks)])


def gather(shape: Shape) -> Collective:
    """Everybody sends to the root."""
    flow = Builder(
        "direct", "gather", ranks=shape.ranks, chunks=shape.ranks * shape.part, root=shape.root
    )
    with flow.step():
        for rank in range(shape.ranks):
            for channel, first, count in shape.lanes(shape.part if rank != shape.root else 0):
                chunk = rank * shape.part + first
                flow.copy(rank, shape.root, chunk=chunk, count=count, channel=channel)
    return flow.done()


def scatter(shape: Shape) -> Collective:
    """The root sends to everybody."""
    flow = Builder(
        "direct", "scatter", ranks=shape.ranks, chunks=shape.ranks * shape.part, root=shape.root
    )
    with flow.step():
        for rank in range(shape.ranks):
            for channel, first, count in shape.lanes(shape.part if rank != shape.root else 0):
                chunk = rank * shape.part + first
                flow.copy(shape.root, rank, chunk=chunk, count=count, channel=channel)
    return flow.done()


def send_recv(shape: Shape) -> Collective:
    """Every rank sends its message to its peer, where it has one."""
    flow = Builder("direct", "send_recv", ranks=shape.ranks, chunks=shape.part, peers=shape.peers)
    with flow.step():
        for rank, peer in enumerate(shape.peers):
            for channel, first, count in shape.lanes(shape.part if peer >= 0 else 0):
                to = flow.output + first
                flow.copy(rank, peer, chunk=first, to=to, count=count, channel=channel)
    return flow.done()


def direct_level(width: int) -> Level:
    """Return the level at which everybody sends to everybody."""
    return Level(width, _scatter, _gather)


def _scatter(stage: Stage) -> None:
    """In step t every rank sends the share of the rank t further on."""
    with stage.sweep(stage.width - 1, shares=1, peers=1):
        for rank in stage.ranks:
            share = (stage.digit(rank) + 1) % stage.width
            stage.add(rank, stage.member(rank, share), share)


def _gather(stage: Stage) -> None:
    with stage.sweep(stage.width - 1, peers=1):
        for rank in stage.ranks:
            own = stage.digit(rank)
            stage.copy(rank, stage.member(rank, (own + 1) % stage.width), own)
