"""Trees: chunks stream up to a root, where they are summed, and down again. Few steps.

A tree is the parent of every rank. Over nodes, the tree joins one GPU of each node and the others
hang on it as a chain. The double binary tree gives half of the message to each of two trees, the
leaves of one being inside the other, so that every rank sends as much as it receives (Sanders,
Speck and Träff, 2009; the numbering is that of NCCL's `trees.cc`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from meshwright.policy.collective.algorithms.algorithm_shape import (
    AlgorithmShape,
    get_channel_gpu,
    rotate,
)
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import ROOTED_OPS, Collective, CollectiveOp

ParentList = tuple[int, ...]
"""The parent of every rank; -1 for the root."""
PIECES = 16
"""Pieces that stream through a tree one after the other."""


def build_chain(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Stream along all ranks, one after the other."""
    return build_tree_stream(
        "chain", op, shape, _trees(op, shape, [_chain] * shape.channels), PIECES
    )


def build_binary(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Stream through one binary tree per channel."""
    trees = _trees(op, shape, [build_in_order_tree] * shape.channels)
    return build_tree_stream("binary_tree", op, shape, trees, PIECES)


def build_double_binary(op: CollectiveOp, shape: AlgorithmShape) -> Collective:
    """Stream half of the message through each of two complementary trees per channel."""
    kinds = [build_in_order_tree] * shape.channels + [build_complement_tree] * shape.channels
    return build_tree_stream("double_tree", op, shape, _trees(op, shape, kinds), PIECES)


def build_tree_stream(
    name: str, op: CollectiveOp, shape: AlgorithmShape, trees: Sequence[ParentList], pieces: int
) -> Collective:
    """Stream the pieces of each channel through its tree: up, down, or up and then down."""
    pieces = shape.get_pieces(pieces)
    chunks = pieces * len(trees)
    flow = CollectiveBuilder(name, op, ranks=shape.ranks, chunks=chunks, root=shape.root)
    with flow.sweep(pieces, shift=1, wrap=0):
        for channel, tree in enumerate(trees):
            for src, dst, adds, phase in list_hops(op, tree):
                send = flow.add if adds else flow.copy
                send(src, dst, chunk=channel * pieces, channel=channel, phase=phase)
    return flow.build()


def list_hops(op: CollectiveOp, tree: ParentList) -> Iterator[tuple[int, int, bool, int]]:
    """Go through the hops of a piece: source, target, whether it adds, and when it is made."""
    begin = 0
    if op in ("all_reduce", "reduce"):
        send_at = list_upward_steps(tree)
        begin = send_at[tree.index(-1)]
        for rank, parent in enumerate(tree):
            if parent >= 0:
                yield rank, parent, True, send_at[rank]
    if op in ("all_reduce", "broadcast"):
        depth = list_depths(tree)
        for rank, parent in enumerate(tree):
            if parent >= 0:
                yield parent, rank, False, begin + depth[rank] - 1


def build_chain_tree(order: Sequence[int]) -> ParentList:
    """Return the tree in which every rank is the only child of the one before it."""
    tree = [-1] * len(order)
    for parent, child in pairwise(order):
        tree[child] = parent
    return tuple(tree)


def build_in_order_tree(size: int) -> ParentList:
    """Return NCCL's binary tree: odd numbers are leaves, 0 is the root and has one child."""
    tree = [-1] * size
    for rank in range(1, size):
        bit = rank & -rank
        above = (rank ^ bit) | (bit << 1)
        tree[rank] = above if above < size else rank ^ bit
    return tuple(tree)


def build_complement_tree(size: int) -> ParentList:
    """Return a tree with the same root whose inner numbers are the leaves of the first.

    Beside the root 0 there are size − 1 numbers. They are mirrored where that turns odd into even
    ones, and moved by one where it does not.
    """
    others = size - 1
    seat = [0] + [size - r if others % 2 == 0 else r % others + 1 for r in range(1, size)]
    who = {place: rank for rank, place in enumerate(seat)}
    tree = build_in_order_tree(size)
    return tuple(-1 if rank == 0 else who[tree[seat[rank]]] for rank in range(size))


def _chain(size: int) -> ParentList:
    return tuple(range(-1, size - 1))


def list_upward_steps(tree: ParentList) -> list[int]:
    """Return when each rank sends its first piece to its parent; for the root, when it has it.

    A rank takes one piece at a time, so children that are ready together wait for each other.
    """
    below: list[list[int]] = [[] for _ in tree]
    for rank, parent in enumerate(tree):
        if parent >= 0:
            below[parent].append(rank)
    depth = list_depths(tree)
    send_at = [0] * len(tree)
    for rank in sorted(range(len(tree)), key=lambda rank: -depth[rank]):
        free = 0
        for child in sorted(below[rank], key=lambda child: send_at[child]):
            send_at[child] = max(send_at[child], free)
            free = send_at[child] + 1
        send_at[rank] = free
    return send_at


def list_depths(tree: ParentList) -> list[int]:
    """Return how many hops each rank lies below the root."""
    depth = [-1] * len(tree)
    for rank in range(len(tree)):
        path, at = [], rank
        while at >= 0 and depth[at] < 0:
            path.append(at)
            at = tree[at]
        known = depth[at] if at >= 0 else -1
        for step, passed in enumerate(reversed(path), start=1):
            depth[passed] = known + step
    return depth


def _trees(
    op: CollectiveOp, shape: AlgorithmShape, kinds: Sequence[Callable[[int], ParentList]]
) -> list[ParentList]:
    """Return one tree per lane: over nodes as the kind says, with a chain inside each node.

    The lanes enter nodes through different GPUs. Where the operation has a root, its node leads
    and it is first in the chain there.
    """
    nodes, trees = shape.nodes, []
    home = shape.root // (shape.per_node or 1) if op in ROOTED_OPS else 0
    nodes = [*nodes[home:], *nodes[:home]]
    for lane, kind in enumerate(kinds):
        tree, doors = [-1] * shape.ranks, []
        for number, node in enumerate(nodes):
            members = rotate(node, get_channel_gpu(lane, len(kinds), shape))
            doors.append(members[0])
            if number == 0 and op in ROOTED_OPS:
                members = [shape.root, *(rank for rank in members if rank != shape.root)]
            for parent, child in pairwise(members):
                tree[child] = parent
        for number, above in enumerate(kind(len(nodes))):
            if above >= 0:
                tree[doors[number]] = doors[above]
        trees.append(tuple(tree))
    return trees
