"""`AlgorithmShape`: what a collective algorithm is built for. Every builder takes one."""

from collections.abc import Iterator, Sequence
from math import prod

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.builder import MAX_ROWS, check_ring_order
from meshwright.policy.collective.collective import ROOTED_OPS, CollectiveOp
from meshwright.policy.collective.contract import find_count_problems, find_peer_problems

_NEEDS = {
    "per_node": "say how many ranks a node has",
    "nodes_per_pod": "say how many nodes a pod has",
    "counts": "give the chunks that each rank has for each other",
    "peers": "give the rank that each rank sends to, -1 for none",
}


class AlgorithmShape(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks, how they lie in nodes and pods, and how the message is cut."""

    ranks: int
    per_node: int | None = None
    """Ranks of a node, which are neighbours in number; the last node may have fewer."""
    nodes_per_pod: int | None = None
    channels: int = 1
    """Parallel lanes, each with a part of the message."""
    pieces: int | None = None
    """Pieces that stream one after the other on each channel; algorithms have their defaults."""
    root: int = 0
    aggregate: int | None = None
    """For PAT: how many ranks' chunks travel in one message; as many as fit, where not given."""
    orders: tuple[tuple[int, ...], ...] = ()
    """The order of the ranks around the ring of each channel."""
    counts: tuple[tuple[int, ...], ...] = ()
    """For all_to_all_v: the chunks that each rank (row) sends to each rank (column)."""
    peers: tuple[int, ...] = ()
    """For send_recv: the rank that each rank sends to; -1 for none."""

    @property
    def nodes(self) -> list[list[int]]:
        """Return the ranks of each node; every rank is a node where `per_node` is not given."""
        return split_groups(range(self.ranks), self.per_node or 1)

    @property
    def ranks_per_node(self) -> int:
        """Return the ranks of a node, all nodes being equal."""
        width = min(self.per_node or 1, self.ranks)
        if self.ranks % width:
            what = f"{self.ranks} ranks do not fill nodes of {width}"
            fix = f"use a multiple of {width} ranks, or a per_node that divides {self.ranks}"
            raise InputError([Problem("per_node", what, fix)])
        return width

    @property
    def slots_per_share(self) -> int:
        """Return the slots of the smallest share: one for each piece of each channel."""
        return self.channels * self.get_pieces(1)

    def split_over_channels(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Cut a run of slots into equal moves: the channel, the first slot and how many."""
        pieces = self.get_pieces(1)
        each = count // self.slots_per_share
        for lane in range(self.slots_per_share):
            yield lane // pieces, lane * each, each

    def get_pieces(self, default: int) -> int:
        """Return the pieces that were asked for, or a default."""
        return default if self.pieces is None else self.pieces


def split_groups(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Cut ranks into neighbouring groups of a size; the last one may be smaller."""
    return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]


def rotate(ranks: Sequence[int], by: int) -> list[int]:
    """Return ranks in the same cyclic order, beginning further on."""
    by %= len(ranks)
    return [*ranks[by:], *ranks[:by]]


def list_ring_orders(shape: AlgorithmShape) -> list[tuple[int, ...]]:
    """Return the order of ranks around the ring of each channel.

    Inside nodes, channel after channel begins at another GPU, so that each network card carries
    the ring of one channel. Every second node is passed backwards: a ring then leaves a node and
    enters the next one on the same rail (with an odd number of nodes all but the last hop do).
    """
    if shape.orders:
        given = [check_ring_order(order, shape.ranks) for order in shape.orders]
        return [given[channel % len(given)] for channel in range(shape.channels)]
    if shape.per_node is None or shape.per_node >= shape.ranks:
        return [tuple(range(shape.ranks))] * shape.channels
    orders = []
    for channel in range(shape.channels):
        order: list[int] = []
        for number, node in enumerate(shape.nodes):
            passed = rotate(node, get_channel_gpu(channel, shape.channels, shape))
            order += reversed(passed) if number % 2 else passed
        orders.append(tuple(order))
    return orders


def get_channel_gpu(channel: int, channels: int, shape: AlgorithmShape) -> int:
    """Return the GPU of a node through which a channel goes, channels being spread over all.

    Where the last node has fewer GPUs, but one for each channel, those that it has are used.
    """
    per_node = shape.per_node or 1
    last = shape.ranks % per_node
    per_node = last if channels <= last else per_node
    return channel * per_node // channels if channels < per_node else channel % per_node


def require_valid_shape(
    name: str, op: CollectiveOp, shape: AlgorithmShape, needs: Sequence[str]
) -> AlgorithmShape:
    """Return a shape that makes sense for an algorithm, or refuse it with every fault it has."""
    problems = [
        Problem(field, f"{name} for {op} does not use it", f"leave it out, or use it for {where}")
        for field, where, fits in (
            ("orders", "ring", name == "ring"),
            ("aggregate", "pat", name == "pat"),
            ("counts", "all_to_all_v", op == "all_to_all_v"),
            ("peers", "send_recv", op == "send_recv"),
        )
        if getattr(shape, field) and not fits
    ]
    problems += [
        Problem(name, f"is {value}", "use 1 or more")
        for name, value in (
            ("ranks", shape.ranks),
            ("per_node", shape.per_node),
            ("nodes_per_pod", shape.nodes_per_pod),
            ("channels", shape.channels),
            ("pieces", shape.pieces),
            ("aggregate", shape.aggregate),
        )
        if value is not None and value < 1
    ]
    if not problems:
        problems += _size_problems(shape)
    if op in ROOTED_OPS and not 0 <= shape.root < shape.ranks:
        what = f"there is no rank {shape.root} among {shape.ranks}"
        problems.append(Problem("root", what, f"use 0 to {shape.ranks - 1}"))
    problems += [
        Problem(name, "is needed by this algorithm", _NEEDS[name])
        for name in needs
        if getattr(shape, name) in {None, ()}
    ]
    if op == "all_to_all_v" and shape.counts:
        problems += find_count_problems(shape.counts, shape.ranks)
    if op == "send_recv" and shape.peers:
        problems += find_peer_problems(shape.peers, shape.ranks)
    if shape.nodes_per_pod is not None and shape.per_node is None:
        problems.append(Problem("per_node", "pods consist of nodes", _NEEDS["per_node"]))
    if problems:
        raise InputError(problems)
    return shape


def _size_problems(shape: AlgorithmShape) -> list[Problem]:
    """Return what makes a shape too large: every rank states a move for each of its lanes."""
    sizes = {"ranks": shape.ranks, "channels": shape.channels, "pieces": shape.get_pieces(1)}
    together = prod(sizes.values())
    if together <= MAX_ROWS:
        return []
    largest = max(sizes, key=lambda name: sizes[name])
    rest = together // sizes[largest]
    what = " × ".join(f"{value:,} {name}" for name, value in sizes.items() if value > 1)
    fix = f"use {max(1, MAX_ROWS // rest):,} or fewer"
    return [Problem(largest, f"{what} are more than {MAX_ROWS:,}", fix)]
