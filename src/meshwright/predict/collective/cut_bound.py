"""The least time of a collective over cuts of a network: bytes that must cross, over what crosses.

A cut sets one group of ranks apart. What it must send and receive follows from the operation alone
(nccl-tests' convention of size), so the bound holds for every algorithm.
"""

from collections.abc import Sequence
from typing import NamedTuple


class NetworkCut(NamedTuple):
    """Ranks set apart from the others, and what joins them to those."""

    num_ranks: int
    out_bytes_per_s: float
    in_bytes_per_s: float
    has_root: bool = False


def cut_bound_s(
    op: str, ranks: int, nbytes: float, cuts: Sequence[NetworkCut], *, reduces: bool = False
) -> float:
    """Return the least time over all cuts; the cuts of one call are disjoint groups."""
    least = 0.0
    for cut in cuts:
        if 0 < cut.num_ranks < ranks:
            sent, received = count_cut_messages(op, ranks, cut)
            least = max(
                least,
                nbytes * sent / cut.out_bytes_per_s,
                nbytes * received / cut.in_bytes_per_s,
            )
    if op == "all_reduce" and not reduces and sum(cut.num_ranks for cut in cuts) == ranks:
        # Every group but one has to get the sum and one has to get every contribution: together
        # the groups receive the message 2·(groups - 1) times (Patarasuk and Yuan, 2009).
        incoming = sum(cut.in_bytes_per_s for cut in cuts)
        least = max(least, 2 * (len(cuts) - 1) * nbytes / incoming)
    return least


def count_cut_messages(op: str, ranks: int, cut: NetworkCut) -> tuple[float, float]:
    """Return what a group must send and receive, in messages."""
    share = cut.num_ranks / ranks
    if op in ("all_reduce",):
        return 1.0, 1.0
    if op == "all_gather":
        return share, 1 - share
    if op == "reduce_scatter":
        return 1 - share, share
    if op == "all_to_all":
        return cut.num_ranks * (1 - share), cut.num_ranks * (1 - share)
    if op == "broadcast":
        return (1.0, 0.0) if cut.has_root else (0.0, 1.0)
    if op == "reduce":
        return (0.0, 1.0) if cut.has_root else (1.0, 0.0)
    if op == "gather":
        return (0.0, 1 - share) if cut.has_root else (share, 0.0)
    if op == "scatter":
        return (1 - share, 0.0) if cut.has_root else (0.0, share)
    return 0.0, 0.0
