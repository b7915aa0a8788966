"""What a collective promises: which chunk lies where at the start, and which where at the end.

It knows operations, no algorithm. All-reduce, reduce-scatter, all-gather, broadcast, reduce, gather
and scatter work in place: slot c is chunk c of the message. All-to-all and send-receive have their
input in the first slots and their output in those that follow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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


class Wanted(NamedTuple):
    """What a rank must hold in the end: one entry per slot."""

    slots: Ints
    numbers: Ints
    """The number of the input that must lie there, or `SUM`."""
    parts: Ints
    """Which part of the message it is."""


def contract(collective: Collective) -> Contract:
    """Return what the operation of a collective promises, as tables of all ranks."""
    given, wanted = [], []
    for rank in range(collective.ranks):
        own, ends = given_slots(collective, rank), wanted_of(collective, rank)
        given.append(np.column_stack((np.full_like(own, rank), own, own, own)))
        wanted.append(np.column_stack((np.full_like(ends.slots, rank), *ends)))
    return Contract(input_width(collective), np.concatenate(given), np.concatenate(wanted))


def input_width(collective: Collective) -> int:
    """Return how many inputs one rank can have."""
    if collective.op == "all_to_all_v":
        return max(1, *(sum(row) for row in collective.counts))
    return collective.chunks


def given_slots(collective: Collective, rank: int) -> Ints:
    """Return the slots that hold a rank's input; slot c holds input c, part c of the message."""
    op, chunks = collective.op, collective.chunks
    if op in ("broadcast", "scatter"):
        return _ints(0, chunks if rank == collective.root else 0)
    if op in ("all_gather", "gather"):
        part = chunks // collective.ranks
        return _ints(rank * part, (rank + 1) * part)
    return _ints(0, sum(collective.counts[rank]) if op == "all_to_all_v" else chunks)


def wanted_of(collective: Collective, rank: int) -> Wanted:
    """Return what a rank must hold in the end."""
    op, chunks, root = collective.op, collective.chunks, collective.root
    part = chunks // collective.ranks
    every, mine = _ints(0, chunks), _ints(rank * part, (rank + 1) * part)
    nothing = _ints(0, 0)
    match op:
        case "all_reduce":
            return Wanted(every, np.full_like(every, SUM), every)
        case "reduce":
            slots = every if rank == root else nothing
            return Wanted(slots, np.full_like(slots, SUM), slots)
        case "reduce_scatter":
            return Wanted(mine, np.full_like(mine, SUM), mine)
        case "broadcast":
            return Wanted(every, root * chunks + every, every)
        case "scatter":
            return Wanted(mine, root * chunks + mine, mine)
        case "all_gather" | "gather":
            slots = every if op == "all_gather" or rank == root else nothing
            return Wanted(slots, slots // part * chunks + slots, slots)
        case "all_to_all":
            number = every // part * chunks + rank * part + every % part
            return Wanted(chunks + every, number, every)
        case "all_to_all_v":
            return _uneven(collective, rank)
        case "send_recv":
            return _sent(collective, rank)


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
        problems += count_problems(collective.counts, ranks)
    if op == "send_recv":
        problems += peer_problems(collective.peers, ranks)
    if not problems:
        least = _least_slots(collective)
        if collective.slots < least:
            what = f"{collective.slots} slots do not hold the {least} chunks of {op}"
            problems.append(Problem("slots", what, f"use {least} or more"))
    return problems


def _least_slots(collective: Collective) -> int:
    if collective.op == "all_to_all_v":
        _, output = input_slots(collective)
        columns = zip(*collective.counts, strict=True)
        return output + max((sum(column) for column in columns), default=0)
    return collective.chunks * (2 if collective.op in ("all_to_all", "send_recv") else 1)


def count_problems(counts: Sequence[Sequence[int]], ranks: int) -> list[Problem]:
    """Return what is wrong with the counts of an all_to_all_v."""
    if len(counts) != ranks or any(len(row) != ranks for row in counts):
        shape = f"{len(counts)} × {len(counts[0]) if counts else 0}"
        return [Problem("counts", f"{shape} counts for {ranks} ranks", f"give {ranks} × {ranks}")]
    if any(count < 0 for row in counts for count in row):
        return [Problem("counts", "a count is negative", "use 0 or more")]
    return []


def peer_problems(peers: Sequence[int], ranks: int) -> list[Problem]:
    """Return what is wrong with the peers of a send_recv."""
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


def _uneven(collective: Collective, rank: int) -> Wanted:
    counts = np.array(collective.counts, dtype=np.int32)
    firsts = np.arange(collective.ranks) * input_width(collective) + counts[:, :rank].sum(axis=1)
    lengths = counts[:, rank]
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(len(before)) - before
    numbers = (np.repeat(firsts, lengths) + index).astype(np.int32)
    output = input_slots(collective)[1]
    return Wanted(_ints(output, output + len(numbers)), numbers, np.zeros_like(numbers))


def _sent(collective: Collective, rank: int) -> Wanted:
    chunks = collective.chunks
    if rank not in collective.peers:
        return Wanted(_ints(0, 0), _ints(0, 0), _ints(0, 0))
    every = _ints(0, chunks)
    return Wanted(chunks + every, collective.peers.index(rank) * chunks + every, every)


def _ints(first: int, end: int) -> Ints:
    return np.arange(first, end, dtype=np.int32)
