"""In-network reduction: switches add what passes through them and send one copy to many.

NVLS is the switch inside a node: each GPU reads the sum of its share from the switch and writes it
back through the switch to all (`multimem` loads and stores). Between nodes go rings or trees, rail
by rail. SHARP is the fabric between nodes: it adds the messages of all nodes and sends back sums.
"""

from collections.abc import Callable

import msgspec

from meshwright.policy.collective.building import Builder
from meshwright.policy.collective.collective import Collective, Op
from meshwright.policy.collective.hierarchical import ring_level
from meshwright.policy.collective.levels import Level, Stage, over_levels
from meshwright.policy.collective.shape import Shape
from meshwright.policy.collective.tree import complement_tree, hops, in_order_tree

FABRIC = "fabric"
"""The switch layer that joins all nodes."""
PIECES = 8
"""Pieces that stream between nodes one after the other."""


def nvls(op: Op, shape: Shape) -> Collective:
    """The switch of every node adds and spreads; a ring between nodes on every rail."""
    if op == "broadcast":
        return _broadcast(shape)
    shape = _in_nodes(shape)
    nodes = shape.ranks // shape.width
    levels = [_switch_level(shape.width, 0)]
    if nodes > 1:
        levels.append(ring_level(nodes))
    return over_levels("nvls", op, shape, levels, _node_switches(nodes))


def nvls_tree(shape: Shape) -> Collective:
    """The switch of every node adds and spreads; two trees between nodes on every rail."""
    shape = _in_nodes(shape)
    shape = msgspec.structs.replace(
        shape, channels=2 * shape.channels, pieces=shape.pieces_or(PIECES)
    )
    nodes = shape.ranks // shape.width
    trees = Level(nodes, _refuse, _refuse, reduce=_trees, shares=1)
    levels = [_switch_level(shape.width, 0), trees]
    return over_levels("nvls_tree", "all_reduce", shape, levels, _node_switches(nodes))


def sharp(op: Op, shape: Shape) -> Collective:
    """The fabric adds and spreads; inside nodes, where there are any, their switches do."""
    if op in ("broadcast", "reduce"):
        return _through_fabric(op, shape)
    width = shape.width
    nodes = shape.ranks // width
    if width == 1:
        return over_levels("sharp", op, shape, [_switch_level(nodes, 0, _fabric)], [FABRIC])
    levels = [_switch_level(width, 0), _switch_level(nodes, nodes, _fabric)]
    return over_levels("sharp", op, shape, levels, [*_node_switches(nodes), FABRIC])


def _in_nodes(shape: Shape) -> Shape:
    """Take all ranks for one node where nodes are not given."""
    return msgspec.structs.replace(shape, per_node=shape.per_node or shape.ranks)


def _node_switches(nodes: int) -> list[str]:
    return [f"nvswitch{node}" for node in range(nodes)]


def _switch_level(width: int, first: int, reduce: Callable[[Stage], None] | None = None) -> Level:
    shares = None if reduce is None else 1
    return Level(width, _scatter, _gather, reduce=reduce, shares=shares, switch=first)


def _scatter(stage: Stage) -> None:
    """The switch adds everything up; each rank takes its share from it."""
    with stage.step():
        for rank in stage.ranks:
            stage.add(rank, stage.switch(rank), 0, stage.width)
    with stage.step():
        for rank in stage.ranks:
            stage.copy(stage.switch(rank), rank, stage.digit(rank), rank=rank)


def _gather(stage: Stage) -> None:
    """Each rank gives its share to the switch, which sends all of them to all."""
    with stage.step():
        for rank in stage.ranks:
            stage.copy(rank, stage.switch(rank), stage.digit(rank))
    with stage.step():
        for rank in stage.ranks:
            stage.copy(stage.switch(rank), rank, 0, stage.width, rank=rank)


def _fabric(stage: Stage) -> None:
    """The fabric adds everything up and sends the sums to all at once; nobody has a share."""
    with stage.step():
        for rank in stage.ranks:
            stage.add(rank, stage.switch(rank), 0)
    with stage.step():
        for rank in stage.ranks:
            stage.copy(stage.switch(rank), rank, 0, rank=rank)


def _trees(stage: Stage) -> None:
    """Stream through two complementary trees over nodes, on every rail."""
    shape, pieces = stage.shape, stage.shape.pieces_or(PIECES)
    kinds = (in_order_tree(stage.width), complement_tree(stage.width))
    with stage.flow.sweep(pieces, shift=1, wrap=0):
        for rail in range(stage.stride):
            for channel in range(shape.channels):
                tree = kinds[channel * 2 // shape.channels]
                for src, dst, adds, phase in hops("all_reduce", tree):
                    send = stage.flow.add if adds else stage.flow.copy
                    send(
                        stage.member(rail, src),
                        stage.member(rail, dst),
                        chunk=stage.firsts[rail] + channel * pieces,
                        channel=channel,
                        phase=phase,
                    )


def _refuse(stage: Stage) -> None:
    raise AssertionError(f"trees over {stage.width} nodes only reduce")


def _through_fabric(op: Op, shape: Shape) -> Collective:
    n, root = shape.ranks, shape.root
    flow = Builder("sharp", op, ranks=n, chunks=shape.part, root=root, switches=[FABRIC])
    givers = range(n) if op == "reduce" else [root]
    takers = [root] if op == "reduce" else [rank for rank in range(n) if rank != root]
    with flow.step():
        for rank in givers:
            for channel, first, count in shape.lanes(shape.part):
                send = flow.add if op == "reduce" else flow.copy
                send(rank, n, chunk=first, count=count, channel=channel)
    with flow.step():
        for rank in takers:
            for channel, first, count in shape.lanes(shape.part):
                flow.copy(n, rank, chunk=first, count=count, channel=channel)
    return flow.done()


def _broadcast(shape: Shape) -> Collective:
    """Pieces go from node to node on the root's rail; each node's switch spreads them."""
    n, width = shape.ranks, _in_nodes(shape).width
    nodes, pieces = n // width, shape.pieces_or(PIECES)
    flow = Builder(
        "nvls",
        "broadcast",
        ranks=n,
        chunks=shape.channels * pieces,
        root=shape.root,
        switches=_node_switches(nodes),
    )
    home, rail = divmod(shape.root, width)
    with flow.sweep(pieces, shift=1, wrap=0):
        for channel in range(shape.channels):
            first = channel * pieces
            for hop in range(nodes):
                node = (home + hop) % nodes
                door, switch = node * width + rail, n + node
                if hop + 1 < nodes:
                    after = (node + 1) % nodes * width + rail
                    flow.copy(door, after, chunk=first, channel=channel, phase=hop)
                if width > 1:
                    flow.copy(door, switch, chunk=first, channel=channel, phase=hop)
                for rank in range(node * width, (node + 1) * width):
                    if rank != door:
                        flow.copy(switch, rank, chunk=first, channel=channel, phase=hop + 1)
    return flow.done()
