"""In-network reduction: switches add what passes through them and send one copy to many.

NVLS is the switch inside a node: each GPU reads the sum of its share from the switch and writes it
back through the switch to all (`multimem` loads and stores). Between nodes go rings or trees, rail
by rail. SHARP is the fabric between nodes: it adds the messages of all nodes and sends back sums.
"""

from collections.abc import Callable

import msgspec

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.algorithms.hierarchical import build_ring_level
from meshwright.policy.collective.algorithms.hierarchy_levels import (
    HierarchyLevel,
    LevelStage,
    build_hierarchical,
)
from meshwright.policy.collective.algorithms.tree import (
    build_complement_tree,
    build_in_order_tree,
    list_hops,
)
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp

FABRIC = "fabric"
"""The switch layer that joins all nodes."""
PIECES = 8
"""Pieces that stream between nodes one after the other."""


def build_nvls(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """The switch of every node adds and spreads; a ring between nodes on every rail."""
    if op == "broadcast":
        return _broadcast(shape)
    shape = _in_nodes(shape)
    nodes = shape.ranks // shape.ranks_per_node
    levels = [_switch_level(shape.ranks_per_node, 0)]
    if nodes > 1:
        levels.append(build_ring_level(nodes))
    return build_hierarchical("nvls", op, shape, levels, _node_switches(nodes))


def build_nvls_tree(shape: AlgorithmShape) -> Collective:
    """The switch of every node adds and spreads; two trees between nodes on every rail."""
    shape = _in_nodes(shape)
    shape = msgspec.structs.replace(
        shape, channels=2 * shape.channels, pieces=shape.get_pieces(PIECES)
    )
    nodes = shape.ranks // shape.ranks_per_node
    trees = HierarchyLevel(nodes, _refuse, _refuse, reduce=_trees, shares=1)
    levels = [_switch_level(shape.ranks_per_node, 0), trees]
    return build_hierarchical("nvls_tree", "all_reduce", shape, levels, _node_switches(nodes))


def build_sharp(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """The fabric adds and spreads; inside nodes, where there are any, their switches do."""
    if op in ("broadcast", "reduce"):
        return _through_fabric(op, shape)
    width = shape.ranks_per_node
    nodes = shape.ranks // width
    if width == 1:
        return build_hierarchical("sharp", op, shape, [_switch_level(nodes, 0, _fabric)], [FABRIC])
    levels = [_switch_level(width, 0), _switch_level(nodes, nodes, _fabric)]
    return build_hierarchical("sharp", op, shape, levels, [*_node_switches(nodes), FABRIC])


def _in_nodes(shape: AlgorithmShape) -> AlgorithmShape:
    """Take all ranks for one node where nodes are not given."""
    return msgspec.structs.replace(shape, per_node=shape.per_node or shape.ranks)


def _node_switches(nodes: int) -> list[str]:
    return [f"nvswitch{node}" for node in range(nodes)]


def _switch_level(
    width: int, first: int, reduce: Callable[[LevelStage], None] | None = None
) -> HierarchyLevel:
    shares = None if reduce is None else 1
    return HierarchyLevel(width, _scatter, _gather, reduce=reduce, shares=shares, switch=first)


def _scatter(stage: LevelStage) -> None:
    """The switch adds everything up; each rank takes its share from it."""
    with stage.step():
        for rank in stage.ranks:
            stage.add(rank, stage.get_switch(rank), 0, stage.group_size)
    with stage.step():
        for rank in stage.ranks:
            stage.copy(stage.get_switch(rank), rank, stage.get_index_in_group(rank), rank=rank)


def _gather(stage: LevelStage) -> None:
    """Each rank gives its share to the switch, which sends all of them to all."""
    with stage.step():
        for rank in stage.ranks:
            stage.copy(rank, stage.get_switch(rank), stage.get_index_in_group(rank))
    with stage.step():
        for rank in stage.ranks:
            stage.copy(stage.get_switch(rank), rank, 0, stage.group_size, rank=rank)


def _fabric(stage: LevelStage) -> None:
    """The fabric adds everything up and sends the sums to all at once; nobody has a share."""
    with stage.step():
        for rank in stage.ranks:
            stage.add(rank, stage.get_switch(rank), 0)
    with stage.step():
        for rank in stage.ranks:
            stage.copy(stage.get_switch(rank), rank, 0, rank=rank)


def _trees(stage: LevelStage) -> None:
    """Stream through two complementary trees over nodes, on every rail."""
    shape, pieces = stage.shape, stage.shape.get_pieces(PIECES)
    kinds = (build_in_order_tree(stage.group_size), build_complement_tree(stage.group_size))
    with stage.builder.sweep(pieces, shift=1, wrap=0):
        for rail in range(stage.stride):
            for channel in range(shape.channels):
                tree = kinds[channel * 2 // shape.channels]
                for src, dst, adds, phase in list_hops("all_reduce", tree):
                    send = stage.builder.add if adds else stage.builder.copy
                    send(
                        stage.get_member(rail, src),
                        stage.get_member(rail, dst),
                        chunk=stage.first_slots[rail] + channel * pieces,
                        channel=channel,
                        phase=phase,
                    )


def _refuse(stage: LevelStage) -> None:
    raise AssertionError(f"trees over {stage.group_size} nodes only reduce")


def _through_fabric(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    n, root = shape.ranks, shape.root
    flow = CollectiveBuilder(
        "sharp", op, ranks=n, chunks=shape.slots_per_share, root=root, switches=[FABRIC]
    )
    givers = range(n) if op == "reduce" else [root]
    takers = [root] if op == "reduce" else [rank for rank in range(n) if rank != root]
    with flow.step():
        for rank in givers:
            for channel, first, count in shape.split_over_channels(shape.slots_per_share):
                send = flow.add if op == "reduce" else flow.copy
                send(rank, n, chunk=first, count=count, channel=channel)
    with flow.step():
        for rank in takers:
            for channel, first, count in shape.split_over_channels(shape.slots_per_share):
                flow.copy(n, rank, chunk=first, count=count, channel=channel)
    return flow.build()


def _broadcast(shape: AlgorithmShape) -> Collective:
    """Pieces go from node to node on the root's rail; each node's switch spreads them."""
    n, width = shape.ranks, _in_nodes(shape).ranks_per_node
    nodes, pieces = n // width, shape.get_pieces(PIECES)
    flow = CollectiveBuilder(
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
    return flow.build()
