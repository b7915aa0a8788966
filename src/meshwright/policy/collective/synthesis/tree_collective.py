"""`build_tree_collective`: trees become a `Collective` whose chunks flow through them in pieces.

Each tree carries one chunk per piece. A row of moves joins the sweep when its first chunk can have
arrived (its phase), so all levels of all trees work at the same time once the pieces flow.
"""

from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective, CollectiveOp
from meshwright.policy.collective.synthesis.tree_packing import SpanningTree

ALGORITHM_NAME = "synthesised"


def build_tree_collective(
    trees: list[SpanningTree],
    op: CollectiveOp,
    ranks: int,
    *,
    root: int = 0,
    pieces: int | None = None,
    summing: list[SpanningTree] | None = None,
) -> Collective:
    """Return the collective in which every tree carries an equal part of the message.

    Sums take the trees backwards; `summing` gives all-reduce others for that, as many from each
    root.
    """
    own = op in ("all_gather", "reduce_scatter")
    held = [sum(tree.weight for tree in trees if tree.root == rank) for rank in range(ranks)]
    per_piece = held[0] if own else sum(held)
    levels = max(map(compute_tree_depth, trees)) + (
        max(map(compute_tree_depth, summing or trees)) if op == "all_reduce" else 0
    )
    span = pieces if pieces is not None else get_default_chunks_per_tree(levels)
    shares = ranks if own else 1
    builder = CollectiveBuilder(
        ALGORITHM_NAME, op, ranks=ranks, chunks=shares * per_piece * span, root=root
    )
    first = [rank * per_piece * span if own else sum(held[:rank]) for rank in range(ranks)]
    with builder.sweep(span, shift=per_piece, wrap=0):
        summed = [0] * len(trees)
        if op in ("all_reduce", "reduce_scatter", "reduce"):
            summed = _sum(builder, summing or trees, first)
            if summing is not None:
                summed = [max(summed)] * len(trees)
        if op in ("all_reduce", "all_gather", "broadcast"):
            _spread(builder, trees, first, summed, lane=1 if op == "all_reduce" else 0)
    return builder.build()


def _sum(builder: CollectiveBuilder, trees: list[SpanningTree], first: list[int]) -> list[int]:
    """Send from the leaves to the roots; return when each root has its sum."""
    ready = []
    for tree, chunk in zip(trees, _chunks(trees, first), strict=True):
        summed, when = _waits(tree)
        ready.append(summed)
        for u, t in tree.edges:
            builder.add(t, u, chunk=chunk, count=tree.weight, phase=when[u, t])
    return ready


def _spread(
    builder: CollectiveBuilder,
    trees: list[SpanningTree],
    first: list[int],
    begin: list[int],
    lane: int,
) -> None:
    """Send from the roots to the leaves, on a lane that does not wait for what is summed."""
    for tree, chunk, start in zip(trees, _chunks(trees, first), begin, strict=True):
        turn = {tree.root: start}
        for u, t in tree.edges:
            turn[t] = turn[u] + 1
            builder.copy(u, t, chunk=chunk, count=tree.weight, channel=lane, phase=turn[u])


def _chunks(trees: list[SpanningTree], first: list[int]) -> list[int]:
    """Return the first chunk of each tree, those of one root lying side by side."""
    free = list(first)
    found = []
    for tree in trees:
        found.append(free[tree.root])
        free[tree.root] += tree.weight
    return found


def get_default_chunks_per_tree(levels: int) -> int:
    """Return how often to cut a tree's part so that filling its levels costs a few percent."""
    return 1 if levels <= 1 else min(96, 12 * (levels - 1))


def _waits(tree: SpanningTree) -> tuple[int, dict[tuple[int, int], int]]:
    """Return when the root has the sum, and when each edge carries its child's, from the leaves.

    A GPU takes the sums of its children one after the other, so each gets a turn of its own.
    """
    children: dict[int, list[int]] = {}
    for u, t in tree.edges:
        children.setdefault(u, []).append(t)
    ready: dict[int, int] = {}
    when: dict[tuple[int, int], int] = {}
    for vertex in (*(t for _, t in reversed(tree.edges)), tree.root):
        free = 0
        for child in sorted(children.get(vertex, ()), key=ready.__getitem__):
            when[vertex, child] = max(free, ready[child])
            free = when[vertex, child] + 1
        ready[vertex] = free
    return ready[tree.root], when


def compute_tree_depth(tree: SpanningTree) -> int:
    """Return how many hops the farthest GPU of a tree is from its root."""
    hops = {tree.root: 0}
    for u, t in tree.edges:
        hops[t] = hops[u] + 1
    return max(hops.values())
