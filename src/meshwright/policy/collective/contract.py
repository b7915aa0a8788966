"""What a collective promises: which chunk lies where at the start, and what must lie where at the end.

It knows operations, no algorithm. All-reduce, reduce-scatter, all-gather, broadcast, reduce, gather
and scatter work in place: slot c is chunk c of the message. All-to-all and send-receive have their
input in the first slots and their output in those that follow.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Problem
from meshwright.policy.collective.collective import OPS, ROOTED, SPLIT, Collective, Ints

SUM = -1
"""Wanted in a slot where the contributions of all ranks are to be added up."""


class Contract(NamedTuple):
    """Chunks before and after. An input is known by a number, `rank · width + index`."""

    width: int
    """Inputs that one rank can have."""
    given: Ints
    """Columns: rank, slot, index of the input, and the part of the message it is."""
    wanted: Ints
    """Columns: rank, slot, number of the input (or `SUM`), and the part of the message."""


def contract(collective: Collective) -> Contract:
    """Return what the operation of a collective promises."""
    op, ranks, chunks, root = collective.op, collective.ranks, collective.chunks, collective.root
    everyone, all_chunks = np.arange(ranks), np.arange(chunks)
    whole = _table(everyone, all_chunks)
    if op == "all_reduce":
        return Contract(chunks, _own(whole), _sums(whole))
    if op == "reduce":
        return Contract(chunks, _own(whole), _sums(whole[whole[:, 0] == root]))
    if op == "broadcast":
        return Contract(chunks, _own(whole[whole[:, 0] == root]), _from(whole, root, chunks))
    if op in ("all_to_all_v", "send_recv"):
        return _uneven(collective) if op == "all_to_all_v" else _sent(collective)
    part = chunks // ranks
    mine = whole[whole[:, 1] // part == whole[:, 0]]
    if op == "reduce_scatter":
        return Contract(chunks, _own(whole), _sums(mine))
    if op == "scatter":
        return Contract(chunks, _own(whole[whole[:, 0] == root]), _from(mine, root, chunks))
    if op == "all_to_all":
        owner, index = whole[:, 1] // part, whole[:, 1] % part
        number = owner * chunks + whole[:, 0] * part + index
        out = np.column_stack((whole[:, 0], chunks + whole[:, 1], number, whole[:, 1]))
        return Contract(chunks, _own(whole), out.astype(np.int32))
    receivers = whole if op == "all_gather" else whole[whole[:, 0] == root]
    owner = receivers[:, 1] // part
    number = owner * chunks + receivers[:, 1]
    out = np.column_stack((receivers, number, receivers[:, 1]))
    return Contract(chunks, _own(mine), out.astype(np.int32))


def input_slots(collective: Collective) -> tuple[int, int]:
    """Return where a rank's own input begins and where its output begins, for separate buffers."""
    if collective.op == "all_to_all_v":
        return 0, max((sum(row) for row in collective.counts), default=0)
    if collective.op in ("all_to_all", "send_recv"):
        return 0, collective.chunks
    return 0, 0


def shape_problems(collective: Collective) -> list[Problem]:
    """Return what is wrong with the numbers of a collective, before any move is looked at."""
    op, ranks, chunks = collective.op, collective.ranks, collective.chunks
    problems = []
    if op not in OPS:
        problems.append(
            Problem("op", f"{op!r} is not a collective", f"use one of {', '.join(OPS)}")
        )
    if ranks < 1 or chunks < 1:
        what = f"{ranks} ranks and {chunks} chunks"
        return [*problems, Problem("ranks", what, "use 1 or more of each")]
    if op in SPLIT and chunks % ranks:
        what = f"{op} over {ranks} ranks cannot be cut into {chunks} chunks"
        fix = f"use a multiple of {ranks}, such as {max(1, round(chunks / ranks)) * ranks}"
        problems.append(Problem("chunks", what, fix))
    if op in ROOTED and not 0 <= collective.root < ranks:
        what = f"there is no rank {collective.root} among {ranks}"
        problems.append(Problem("root", what, f"use 0 to {ranks - 1}"))
    if op == "all_to_all_v":
        problems += _count_problems(collective)
    if op == "send_recv":
        problems += _peer_problems(collective)
    if not problems:
        least = _least_slots(collective)
        if collective.slots < least:
            what = f"{collective.slots} slots do not hold the {least} chunks of {op}"
            problems.append(Problem("slots", what, f"use {least} or more"))
    return problems


def _least_slots(collective: Collective) -> int:
    if collective.op == "all_to_all_v":
        sent = max(sum(row) for row in collective.counts)
        return sent + max(sum(column) for column in zip(*collective.counts, strict=True))
    return collective.chunks * (2 if collective.op in ("all_to_all", "send_recv") else 1)


def _count_problems(collective: Collective) -> list[Problem]:
    counts, ranks = collective.counts, collective.ranks
    if len(counts) != ranks or any(len(row) != ranks for row in counts):
        shape = f"{len(counts)} × {len(counts[0]) if counts else 0}"
        return [Problem("counts", f"{shape} counts for {ranks} ranks", f"give {ranks} × {ranks}")]
    if any(count < 0 for row in counts for count in row):
        return [Problem("counts", "a count is negative", "use 0 or more")]
    return []


def _peer_problems(collective: Collective) -> list[Problem]:
    peers, ranks = collective.peers, collective.ranks
    if len(peers) != ranks:
        return [Problem("peers", f"{len(peers)} peers for {ranks} ranks", f"give {ranks}")]
    strange = [peer for peer in peers if not -1 <= peer < ranks]
    if strange:
        what = f"there is no rank {strange[0]} among {ranks}"
        return [Problem("peers", what, f"use 0 to {ranks - 1}, or -1 for none")]
    taken = [peer for peer in peers if peer >= 0]
    twice = next((peer for peer in taken if taken.count(peer) > 1), None)
    if twice is not None:
        return [Problem("peers", f"rank {twice} receives from two ranks", "name each rank once")]
    return []


def _table(ranks: NDArray[np.int64], chunks: NDArray[np.int64]) -> Ints:
    """Return every (rank, chunk)."""
    pairs = np.empty((len(ranks) * len(chunks), 2), dtype=np.int32)
    pairs[:, 0] = np.repeat(ranks, len(chunks))
    pairs[:, 1] = np.tile(chunks, len(ranks))
    return pairs


def _own(pairs: Ints) -> Ints:
    """Slot c holds input c, which is part c of the message."""
    return pairs[:, [0, 1, 1, 1]]


def _sums(pairs: Ints) -> Ints:
    sums = np.full(len(pairs), SUM, dtype=np.int32)
    return np.column_stack((pairs, sums, pairs[:, 1])).astype(np.int32)


def _from(pairs: Ints, root: int, width: int) -> Ints:
    return np.column_stack((pairs, root * width + pairs[:, 1], pairs[:, 1])).astype(np.int32)


def _uneven(collective: Collective) -> Contract:
    counts = np.array(collective.counts, dtype=np.int64)
    width = int(max(1, counts.sum(axis=1).max()))
    sends = np.cumsum(counts, axis=1) - counts
    lands = np.cumsum(counts, axis=0) - counts
    given, wanted = [], []
    _, output = input_slots(collective)
    for source in range(collective.ranks):
        given += [(source, slot, slot, slot) for slot in range(int(counts[source].sum()))]
        for target in range(collective.ranks):
            for index in range(int(counts[source, target])):
                number = source * width + int(sends[source, target]) + index
                slot = output + int(lands[source, target]) + index
                wanted.append((target, slot, number, 0))
    return Contract(width, _rows(given), _rows(wanted))


def _sent(collective: Collective) -> Contract:
    chunks = collective.chunks
    given = [(rank, c, c, c) for rank in range(collective.ranks) for c in range(chunks)]
    wanted = [
        (peer, chunks + c, rank * chunks + c, c)
        for rank, peer in enumerate(collective.peers)
        if peer >= 0
        for c in range(chunks)
    ]
    return Contract(chunks, _rows(given), _rows(wanted))


def _rows(rows: list[tuple[int, int, int, int]]) -> Ints:
    return np.array(rows, dtype=np.int32).reshape(-1, 4)
