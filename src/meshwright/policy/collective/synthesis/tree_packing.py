"""`pack_trees`: spanning trees that share a network of GPUs without overfilling any link.

Edmonds' arborescences, grown edge by edge in the manner of Tarjan and of Bérczi and Frank: an edge
joins a tree as often as the remaining capacity can still feed every other tree, which one maximum
flow tells. Trees that are alike grow together, with a weight.
"""

from typing import NamedTuple

from meshwright.policy.collective.synthesis.max_flow import ResidualGraph
from meshwright.policy.collective.synthesis.tree_scaling import IntMatrix


class SpanningTree(NamedTuple):
    """A tree that spans all GPUs."""

    root: int
    edges: tuple[tuple[int, int], ...]
    """From parent to child, parents first."""
    weight: int
    """How many trees are like this."""


class _Growing:
    """A tree on its way."""

    def __init__(self, root: int, weight: int) -> None:
        self.root, self.weight = root, weight
        self.edges: list[tuple[int, int]] = []
        self.depth = {root: 0}
        self.refused: set[tuple[int, int]] = set()
        """Edges that some other tree needs. What is left only gets less, so they stay refused."""

    def part(self, weight: int) -> "_Growing":
        twin = _Growing(self.root, weight)
        twin.edges, twin.depth, twin.refused = self.edges[:], dict(self.depth), set(self.refused)
        return twin


def pack_trees(capacity: IntMatrix, roots: list[int]) -> list[SpanningTree]:
    """Return trees from every root, as many as asked, that fit into whole capacities.

    All trees grow in turns, and level by level, so that none is left with long detours only.
    """
    gpus = len(capacity)
    rest = ResidualGraph(capacity)
    trees = [_Growing(root, count) for root, count in enumerate(roots) if count]
    level = 0
    while any(len(tree.depth) < gpus for tree in trees):
        assert level < gpus, "no edge can join a tree, although the flows said that trees exist"
        turns = list(trees)
        while turns:
            tree = turns.pop(0)
            found = _grow(rest, tree, level, [other for other in trees if other is not tree])
            if found is None:
                continue
            (u, t), times = found
            if times < tree.weight:
                other = tree.part(tree.weight - times)
                trees.append(other)
                turns.append(other)
                tree.weight = times
            rest.adjust_capacity(u, t, -times)
            tree.edges.append((u, t))
            tree.depth[t] = tree.depth[u] + 1
            turns.append(tree)
        level += 1
    return [SpanningTree(tree.root, tuple(tree.edges), tree.weight) for tree in trees]


def _grow(
    rest: ResidualGraph, tree: _Growing, level: int, others: list[_Growing]
) -> tuple[tuple[int, int], int] | None:
    """Return an edge from this level of a tree, and for how many trees like it it can be taken."""
    best: tuple[tuple[int, int], int] | None = None
    size = len(rest.residual_capacity)
    edges = [
        (-rest.residual_capacity[u][t], (t - u) % size, u, t)
        for u, depth in tree.depth.items()
        if depth == level
        for t in range(size)
        if rest.residual_capacity[u][t] and t not in tree.depth and (u, t) not in tree.refused
    ]
    for _, _, u, t in sorted(edges):
        times = _spare(rest, (u, t), tree, others)
        if times == tree.weight:
            return (u, t), times
        if not times:
            tree.refused.add((u, t))
        elif best is None or times > best[1]:
            best = (u, t), times
    return best


def _spare(
    rest: ResidualGraph, edge: tuple[int, int], tree: _Growing, others: list[_Growing]
) -> int:
    """Return how often an edge can be taken so that all other trees can still be completed.

    Every set of GPUs that a tree has not met needs one more edge into it. The least surplus over
    the sets that contain t and not u is a minimum cut from u to t, once each other tree offers
    the vertices that it has as a way to them from u.
    """
    u, t = edge
    size = len(rest.residual_capacity)
    most = min(rest.residual_capacity[u][t], tree.weight)
    # A tree that already has t asks nothing of a set around t.
    asking = [other for other in others if t not in other.depth]
    grown = [other for other in asking if len(other.depth) > 1]
    fed = rest.add_vertices(len(grown))
    asked = sum(other.weight for other in asking)
    for other in asking:
        if len(other.depth) == 1 and other.root != u:
            fed.adjust_capacity(u, other.root, other.weight)
    for index, other in enumerate(grown, size):
        fed.adjust_capacity(u, index, other.weight)
        fed.add_edges(index, other.depth, asked + most)  # as much as anybody could want
    surplus = fed.send_flow(u, t, asked + most) - asked
    return int(min(most, max(surplus, 0)))
