"""All-to-all: every rank has something for every other.

Pairwise: in step t, rank r sends to rank r + t. Hierarchical: what goes to another node crosses the
network once, on the rail of its sender or of its receiver, and is passed on inside the node; each
pair of nodes then exchanges few long messages instead of many short ones. Forwarding behind the
crossing is what DeepEP does; forwarding before it is NCCL's PXN.
"""

from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape
from meshwright.policy.collective.builder import CollectiveBuilder
from meshwright.policy.collective.collective import Collective


def build_pairwise(shape: AlgorithmShape) -> Collective:
    """Send to the next rank, then to the one after it, and so on."""
    n, part = shape.ranks, shape.slots_per_share
    swap = CollectiveBuilder("pairwise", "all_to_all", ranks=n, chunks=n * part)
    _keep_own(swap, n, part)
    with swap.sweep(n - 1, shift=part, arrival_shift=0, dst_shift=1):
        for rank in range(n):
            target = (rank + 1) % n
            for channel, first, count in shape.split_over_channels(part):
                chunk, to = target * part + first, swap.output + rank * part + first
                swap.copy(rank, target, chunk=chunk, to=to, count=count, channel=channel)
    return swap.build()


def build_cross_then_forward(shape: AlgorithmShape) -> Collective:
    """Cross to the same GPU of the target's node, which passes each part to its target."""
    n, width, part = shape.ranks, shape.ranks_per_node, shape.slots_per_share
    nodes = n // width
    swap = CollectiveBuilder("cross_forward", "all_to_all", ranks=n, chunks=n * part)
    landing = swap.allocate_scratch(n * part)
    block = width * part
    _keep_own(swap, n, part)
    _inside(swap, shape, part)
    with swap.sweep(nodes - 1, shift=block, arrival_shift=0, dst_shift=width):
        for rank in range(n):
            target = (rank + width) % n
            for channel, first, count in shape.split_over_channels(block):
                chunk = target // width * block + first
                to = landing + rank // width * block + first
                swap.copy(rank, target, chunk=chunk, to=to, count=count, channel=channel)
    for ahead in range(width):
        with swap.sweep(nodes - 1, shift=-block):
            for rank in range(n):
                node, local = divmod(rank, width)
                source = (node - 1) % nodes * block
                to = (local + ahead) % width
                for channel, first, count in shape.split_over_channels(part):
                    swap.copy(
                        rank,
                        node * width + to,
                        chunk=landing + source + to * part + first,
                        to=swap.output + source + local * part + first,
                        count=count,
                        channel=channel,
                    )
    return swap.build()


def build_forward_then_cross(shape: AlgorithmShape) -> Collective:
    """Collect inside the node at the GPU that stands where the target stands in its own; cross."""
    n, width, part = shape.ranks, shape.ranks_per_node, shape.slots_per_share
    nodes = n // width
    swap = CollectiveBuilder("forward_cross", "all_to_all", ranks=n, chunks=n * part)
    leaving = swap.allocate_scratch(n * part)
    block = width * part
    _keep_own(swap, n, part)
    _inside(swap, shape, part)
    for ahead in range(width):
        with swap.sweep(nodes - 1, shift=block):
            for rank in range(n):
                node, local = divmod(rank, width)
                target = (node + 1) % nodes * block
                to = (local + ahead) % width
                for channel, first, count in shape.split_over_channels(part):
                    swap.copy(
                        rank,
                        node * width + to,
                        chunk=target + to * part + first,
                        to=leaving + target + local * part + first,
                        count=count,
                        channel=channel,
                    )
    with swap.sweep(nodes - 1, shift=block, arrival_shift=0, dst_shift=width):
        for rank in range(n):
            target = (rank + width) % n
            for channel, first, count in shape.split_over_channels(block):
                chunk = leaving + target // width * block + first
                to = swap.output + rank // width * block + first
                swap.copy(rank, target, chunk=chunk, to=to, count=count, channel=channel)
    return swap.build()


def _keep_own(swap: CollectiveBuilder, ranks: int, part: int) -> None:
    """Every rank puts what is for itself into its output."""
    with swap.step():
        for rank in range(ranks):
            swap.copy(rank, rank, chunk=rank * part, to=swap.output + rank * part, count=part)


def _inside(swap: CollectiveBuilder, shape: AlgorithmShape, part: int) -> None:
    """Exchange what stays inside the nodes."""
    width = shape.ranks_per_node
    with swap.sweep(
        width - 1,
        shift=part,
        wrap=width * part,
        arrival_shift=0,
        dst_shift=1,
        dst_wrap=width,
    ):
        for rank in range(shape.ranks):
            target = rank - rank % width + (rank + 1) % width
            for channel, first, count in shape.split_over_channels(part):
                chunk, to = target * part + first, swap.output + rank * part + first
                swap.copy(rank, target, chunk=chunk, to=to, count=count, channel=channel)
