"""What a collective promises: which chunk lies where at the start, and which where at the end.

It knows operations, no algorithm. All-reduce, reduce-scatter, all-gather, broadcast, reduce, gather
and scatter work in place: slot c is chunk c of the message. All-to-all and send-receive have their
input in the first slots and their output in those that follow.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.errors import Problem
from meshwright.policy.collective.collective import (
    COLLECTIVE_OPS,
    PARTITIONED_OPS,
    REDUCING_OPS,
    ROOTED_OPS,
    SEPARATE_OUTPUT_OPS,
    Collective,
    Ints,
)
from meshwright.policy.collective.sweep_ranges import MAX_COLUMN_VALUE, find_sweep_problems

SUM = -1
"""Wanted in a slot where the contributions of all ranks are to be added up."""


class CollectiveContract(NamedTuple):
    """Chunks before and after. An input is known by a number, `rank · width + index`."""

    width: int
    """Inputs that one rank can have."""
    inputs: Ints
    """Columns: rank, slot, index of the input, and the part of the message it is."""
    outputs: Ints
    """Columns: rank, slot, number of the input (or `SUM`), and the part of the message."""


class ExpectedOutput(NamedTuple):
    """What a rank must hold in the end: one entry per slot."""

    slots: Ints
    input_ids: Ints
    """The number of the input that must lie there, or `SUM`."""
    chunk_ids: Ints
    """Which part of the message it is."""


def build_contract(collective: Collective) -> CollectiveContract:
    """Return what the operation of a collective promises, as tables of all ranks."""
    given, wanted = [], []
    for rank in range(collective.ranks):
        own, ends = (
            _ints(list_input_slots(collective, rank)),
            build_expected_output(collective, rank),
        )
        given.append(np.column_stack((np.full_like(own, rank), own, own, own)))
        wanted.append(np.column_stack((np.full_like(ends.slots, rank), *ends)))
    return CollectiveContract(
        inputs_per_rank(collective), np.concatenate(given), np.concatenate(wanted)
    )


def inputs_per_rank(collective: Collective) -> int:
    """Return how many inputs one rank can have."""
    if collective.op == "all_to_all_v":
        return max(1, *(sum(row) for row in collective.counts))
    return collective.chunks


def list_input_slots(collective: Collective, rank: int) -> range:
    """Return the slots that hold a rank's input; slot c holds input c, part c of the message."""
    op, chunks = collective.op, collective.chunks
    if op in ("broadcast", "scatter"):
        return range(chunks if rank == collective.root else 0)
    if op in ("all_gather", "gather"):
        return _own_part(collective, rank)
    return range(sum(collective.counts[rank]) if op == "all_to_all_v" else chunks)


def list_output_slots(collective: Collective, rank: int) -> range:
    """Return the slots that must hold a rank's output in the end."""
    op, chunks = collective.op, collective.chunks
    first = get_input_output_starts(collective)[1]
    if op == "all_to_all_v":
        return range(first, first + sum(row[rank] for row in collective.counts))
    if op == "send_recv":
        return range(first, first + (chunks if rank in collective.peers else 0))
    if op in ("reduce_scatter", "scatter"):
        return _own_part(collective, rank)
    if op in ("reduce", "gather") and rank != collective.root:
        return range(0)
    return range(first, first + chunks)


def build_expected_output(collective: Collective, rank: int) -> ExpectedOutput:
    """Return what a rank must hold in the end."""
    op, chunks = collective.op, collective.chunks
    slots = _ints(list_output_slots(collective, rank))
    if op == "all_to_all_v":
        return ExpectedOutput(slots, _uneven(collective, rank), np.zeros_like(slots))
    parts = slots - np.int32(get_input_output_starts(collective)[1])
    if op in REDUCING_OPS:
        return ExpectedOutput(slots, np.full_like(slots, SUM), parts)
    if op in ("broadcast", "scatter"):
        return ExpectedOutput(slots, collective.root * chunks + parts, parts)
    if op == "send_recv":
        giver = collective.peers.index(rank) if len(slots) else 0
        return ExpectedOutput(slots, giver * chunks + parts, parts)
    part = chunks // collective.ranks
    giver_of = parts // part
    if op == "all_to_all":
        return ExpectedOutput(slots, giver_of * chunks + rank * part + parts % part, parts)
    return ExpectedOutput(slots, giver_of * chunks + parts, parts)


def get_input_output_starts(collective: Collective) -> tuple[int, int]:
    """Return where a rank's own input begins and where its output begins, for separate buffers."""
    if collective.op == "all_to_all_v":
        return 0, max((sum(row) for row in collective.counts), default=0)
    if collective.op in SEPARATE_OUTPUT_OPS:
        return 0, collective.chunks
    return 0, 0


def find_shape_problems(collective: Collective) -> list[Problem]:
    """Return what is wrong with the numbers of a collective, before any step is made."""
    op, ranks, chunks = collective.op, collective.ranks, collective.chunks
    problems = []
    if op not in COLLECTIVE_OPS:
        problems.append(
            Problem("op", f"{op!r} is not a collective", f"use one of {', '.join(COLLECTIVE_OPS)}")
        )
    if ranks < 1 or chunks < 1:
        what = f"{ranks} ranks and {chunks} chunks"
        return [*problems, Problem("ranks", what, "use 1 or more of each")]
    large = [
        Problem(name, f"{value} is too large a number", f"use {MAX_COLUMN_VALUE} or fewer")
        for name, value in (("ranks", ranks), ("chunks", chunks), ("slots", collective.slots))
        if value > MAX_COLUMN_VALUE
    ]
    if large:
        return problems + large
    if op in PARTITIONED_OPS and chunks % ranks:
        what = f"{op} over {ranks} ranks cannot be cut into {chunks} chunks"
        fix = f"use a multiple of {ranks}, such as {max(1, round(chunks / ranks)) * ranks}"
        problems.append(Problem("chunks", what, fix))
    if op in ROOTED_OPS and not 0 <= collective.root < ranks:
        what = f"there is no rank {collective.root} among {ranks}"
        problems.append(Problem("root", what, f"use 0 to {ranks - 1}"))
    if op == "all_to_all_v":
        problems += find_count_problems(collective.counts, ranks)
    if op == "send_recv":
        problems += find_peer_problems(collective.peers, ranks)
    if not problems:
        least = _least_slots(collective)
        if collective.slots < least:
            what = f"{collective.slots} slots do not hold the {least} chunks of {op}"
            problems.append(Problem("slots", what, f"use {least} or more"))
    return problems + find_sweep_problems(collective)


def _least_slots(collective: Collective) -> int:
    if collective.op == "all_to_all_v":
        _, output = get_input_output_starts(collective)
        columns = zip(*collective.counts, strict=True)
        return output + max((sum(column) for column in columns), default=0)
    return collective.chunks * (2 if collective.op in SEPARATE_OUTPUT_OPS else 1)


def find_count_problems(counts: Sequence[Sequence[int]], ranks: int) -> list[Problem]:
    """Return what is wrong with the counts of an all_to_all_v."""
    if len(counts) != ranks or any(len(row) != ranks for row in counts):
        shape = f"{len(counts)} × {len(counts[0]) if counts else 0}"
        return [Problem("counts", f"{shape} counts for {ranks} ranks", f"give {ranks} × {ranks}")]
    if any(count < 0 for row in counts for count in row):
        return [Problem("counts", "a count is negative", "use 0 or more")]
    total = sum(sum(row) for row in counts)
    if total > MAX_COLUMN_VALUE:
        return [Problem("counts", f"{total} chunks in all", f"use {MAX_COLUMN_VALUE} or fewer")]
    return []


def find_peer_problems(peers: Sequence[int], ranks: int) -> list[Problem]:
    """Return what is wrong with the peers of a send_recv."""
    if len(peers) != ranks:
        return [Problem("peers", f"{len(peers)} peers for {ranks} ranks", f"give {ranks}")]
    strange = [peer for peer in peers if not -1 <= peer < ranks]
    if strange:
        what = f"there is no rank {strange[0]} among {ranks}"
        return [Problem("peers", what, f"use 0 to {ranks - 1}, or -1 for none")]
    takes = Counter(peer for peer in peers if peer >= 0)
    twice = next((peer for peer, times in takes.items() if times > 1), None)
    if twice is not None:
        return [Problem("peers", f"rank {twice} receives from two ranks", "name each rank once")]
    return []


def _uneven(collective: Collective, rank: int) -> Ints:
    """Return the numbers of the inputs that a rank gets in an all_to_all_v."""
    counts = np.array(collective.counts, dtype=np.int32)
    firsts = np.arange(collective.ranks) * inputs_per_rank(collective) + counts[:, :rank].sum(
        axis=1
    )
    lengths = counts[:, rank]
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(len(before)) - before
    return (np.repeat(firsts, lengths) + index).astype(np.int32)


def _own_part(collective: Collective, rank: int) -> range:
    part = collective.chunks // collective.ranks
    return range(rank * part, (rank + 1) * part)


def _ints(numbers: range) -> Ints:
    return np.arange(numbers.start, numbers.stop, dtype=np.int32)
