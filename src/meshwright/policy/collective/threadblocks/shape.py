"""What can be wrong with a lane program before anything runs: bounds, peers, waits, messages."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.policy.collective.collective import REDUCING
from meshwright.policy.collective.contract import given_slots, shape_problems, wanted_slots
from meshwright.policy.collective.placement import Spot
from meshwright.policy.collective.threadblocks.program import (
    READS_SRC,
    RECEIVING,
    SENDING,
    WRITES_DST,
    Lane,
    LaneProgram,
    Step,
    described,
    spot_name,
    step_name,
)
from meshwright.policy.collective.threadblocks.walk import Link, announced

MOST_CHUNKS = 1 << 24
"""Chunks of all buffers, and of all steps, that a program is followed through: each is looked at
by itself. MSCCL's offsets have 16 bits, so programs that run anywhere stay far below."""
LANE_OPS = frozenset(
    {
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "reduce",
        "all_to_all",
        "gather",
        "scatter",
    }
)
"""Collectives that a lane program can state in full: no counts or peers beside the program."""

_ONE_BUFFER = frozenset({"all_reduce", "reduce", "broadcast", "all_to_all"})
"""Collectives whose input and output are the very same chunks when they share memory."""


def lane_problems(program: LaneProgram) -> Iterator[Problem]:
    """Go through all that is wrong, the simplest first."""
    if program.op not in LANE_OPS:
        fix = f"use one of {', '.join(sorted(LANE_OPS))}"
        yield Problem("op", f"{program.op} cannot be stated as lanes alone", fix)
        return
    if not (program.in_place or program.out_of_place):
        what = "the program may run neither in place nor out of place"
        yield Problem("in_place", what, "allow one of them")
    shape = shape_problems(program.task)
    shape += _size_problems(program)
    yield from shape
    if shape:
        return
    for rank, own in enumerate(program.ranks):
        sizes = buffer_sizes(program, rank)
        taken: dict[tuple[str, int, int], int] = {}
        for index, lane in enumerate(own.lanes):
            yield from _peer_problems(program, rank, index, lane, taken)
            for number, step in enumerate(lane.steps):
                at = step_name(rank, index, number)
                yield from _step_problems(program, lane, step, at, sizes)
                yield from _overlap_problems(program, rank, step, at)
                yield from _wait_problems(program, rank, step, at)
    yield from _message_problems(program)


def _size_problems(program: LaneProgram) -> list[Problem]:
    lanes = (lane for own in program.ranks for lane in own.lanes)
    moved = sum(max(0, step.count) for lane in lanes for step in lane.steps)
    scratch = max((own.scratch_chunks for own in program.ranks), default=0)
    return [
        Problem(where, f"{many:,} chunks {what}", f"use {MOST_CHUNKS:,} or fewer")
        for where, many, what in (
            ("chunks", program.chunks * len(program.ranks), "of all ranks together"),
            ("scratch", scratch, "of scratch memory"),
            ("steps", moved, "in all steps together"),
        )
        if many > MOST_CHUNKS
    ]


class MemoryChunk(NamedTuple):
    """A chunk of memory of one rank."""

    memory: str
    chunk: int


def memory_of(program: LaneProgram, rank: int, spot: Spot, *, shared: bool) -> MemoryChunk:
    """Return the memory behind a chunk of a buffer; `shared` where input and output are one."""
    if not shared or spot.buffer == "scratch":
        return MemoryChunk(spot.buffer, spot.chunk)
    # NCCL's rule: the smaller buffer lies inside the larger one, at the rank's own part.
    op, part = program.op, program.chunks // len(program.ranks)
    inner = "input" if op in ("all_gather", "gather") else "output"
    split = op in ("all_gather", "gather", "reduce_scatter", "scatter")
    return MemoryChunk(
        "memory", spot.chunk + (rank * part if split and spot.buffer == inner else 0)
    )


def buffer_sizes(program: LaneProgram, rank: int) -> dict[str, int]:
    """Return how many chunks each buffer of a rank has, whatever the program says it uses."""
    task = program.task
    return {
        "input": len(given_slots(task, rank)),
        "output": len(wanted_slots(task, rank)),
        "scratch": program.ranks[rank].scratch_chunks,
    }


def _peer_problems(
    program: LaneProgram, rank: int, index: int, lane: Lane, taken: dict[tuple[str, int, int], int]
) -> Iterator[Problem]:
    at, ranks = f"rank {rank}, lane {index}", len(program.ranks)
    alone = lane.send < 0 and lane.receive < 0
    if not (-1 if alone else 0) <= lane.channel < MOST_CHUNKS:
        yield Problem(at, f"channel {lane.channel}", f"use 0 to {MOST_CHUNKS - 1}")
    for way, peer in (("send", lane.send), ("receive", lane.receive)):
        if not -1 <= peer < ranks or peer == rank:
            fix = f"use another rank from 0 to {ranks - 1}, or -1 for none"
            yield Problem(at, f"{way} peer {peer} of rank {rank} among {ranks}", fix)
        elif peer >= 0:
            other = taken.setdefault((way, peer, lane.channel), index)
            if other != index:
                what = f"lane {other} too has {way} peer {peer} on channel {lane.channel}"
                yield Problem(at, what, "put one of them on another channel")


def _step_problems(
    program: LaneProgram, lane: Lane, step: Step, at: str, sizes: dict[str, int]
) -> Iterator[Problem]:
    if step.kind == "nop":
        return
    if step.count < 1:
        yield Problem(at, f"{step.count} chunks", "use 1 or more")
    if step.kind in SENDING and lane.send < 0:
        yield Problem(at, f"{step.kind} in a lane without a send peer", "name the peer")
    if step.kind in RECEIVING and lane.receive < 0:
        yield Problem(at, f"{step.kind} in a lane without a receive peer", "name the peer")
    if (step.kind.startswith("rr") or step.kind == "re") and program.op not in REDUCING:
        yield Problem(at, f"{step.kind} adds, but {program.op} adds nothing up")
    for used, spot in ((READS_SRC, step.src), (WRITES_DST, step.dst)):
        if step.kind in used:
            yield from _bound_problems(program, step, spot, at, sizes)


def _overlap_problems(program: LaneProgram, rank: int, step: Step, at: str) -> Iterator[Problem]:
    """A step reads and writes in pieces, in no order: it may work in place, but not half so."""
    if step.kind not in READS_SRC & WRITES_DST or step.src is None or step.dst is None:
        return
    for shared, allowed in ((False, program.out_of_place), (True, program.in_place)):
        source = memory_of(program, rank, step.src, shared=shared)
        target = memory_of(program, rank, step.dst, shared=shared)
        apart = abs(source.chunk - target.chunk)
        if allowed and source.memory == target.memory and 0 < apart < step.count:
            mode = " (run in place)" if shared else ""
            what = f"{step.kind} reads {spot_name(step.src)} and writes {spot_name(step.dst)}"
            fix = f"move {apart} chunks at a time, or go through scratch chunks"
            yield Problem(at, f"{what}, {step.count} chunks each, which overlap{mode}", fix)
            return


def _bound_problems(
    program: LaneProgram, step: Step, spot: Spot | None, at: str, sizes: dict[str, int]
) -> Iterator[Problem]:
    if spot is None:
        yield Problem(at, f"{step.kind} does not say which chunk", "name buffer and offset")
        return
    size = sizes[spot.buffer]
    only_shared = program.in_place and not program.out_of_place
    if spot.buffer != "scratch" and only_shared and program.op in _ONE_BUFFER:
        size = max(sizes["input"], sizes["output"])
    last = spot.chunk + step.count - 1
    if spot.chunk < 0 or last >= size:
        what = f"{step.kind} uses {spot.buffer} {spot.chunk} to {last}, but there are {size} chunks"
        yield Problem(at, what, f"stay within 0 to {size - 1}" if size else "use another buffer")


def _wait_problems(program: LaneProgram, rank: int, step: Step, at: str) -> Iterator[Problem]:
    if step.wait is None:
        return
    lanes = program.ranks[rank].lanes
    if not 0 <= step.wait.lane < len(lanes):
        what = f"waits for lane {step.wait.lane}, but rank {rank} has {len(lanes)}"
        yield Problem(at, what, "name a lane of the same rank")
        return
    other = lanes[step.wait.lane]
    if not 0 <= step.wait.step < len(other.steps):
        what = f"waits for step {step.wait.step} of lane {step.wait.lane}, which has "
        yield Problem(at, f"{what}{len(other.steps)}", "name one of its steps")
    elif announced(other, step.wait.step) < 0:
        what = f"waits for step {step.wait.step} of lane {step.wait.lane}, whose end is never told"
        yield Problem(at, what, "mark that step as one that others wait for (hasdep)")


def _message_problems(program: LaneProgram) -> Iterator[Problem]:
    sent: dict[Link, list[tuple[str, int]]] = {}
    taken: dict[Link, list[tuple[str, int]]] = {}
    for rank, own in enumerate(program.ranks):
        for index, lane in enumerate(own.lanes):
            for number, step in enumerate(lane.steps):
                at = f"{step_name(rank, index, number)} ({described(lane, step)})"
                if step.kind in SENDING:
                    link = rank, lane.send, lane.channel
                    sent.setdefault(link, []).append((at, step.count))
                if step.kind in RECEIVING:
                    link = lane.receive, rank, lane.channel
                    taken.setdefault(link, []).append((at, step.count))
    for link in sorted(sent.keys() | taken.keys()):
        yield from _link_problems(link, sent.get(link, []), taken.get(link, []))


def _link_problems(
    link: Link, sent: list[tuple[str, int]], taken: list[tuple[str, int]]
) -> Iterator[Problem]:
    src, dst, channel = link
    for number, ((giver, gives), (taker, takes)) in enumerate(zip(sent, taken, strict=False)):
        if gives != takes:
            what = f"{giver} sends {gives} chunks, but {taker} expects {takes}"
            where = f"message {number} from rank {src} to rank {dst} on channel {channel}"
            yield Problem(where, what, "cut both into the same messages")
            return
    if len(sent) != len(taken):
        more, few = (sent, taken) if len(sent) > len(taken) else (taken, sent)
        what = "is never received" if more is sent else "waits for a message that is never sent"
        at, _ = more[len(few)]
        counts = f"rank {src} sends {len(sent)} messages to rank {dst} on channel {channel}"
        yield Problem(at, f"{what}: {counts}, which takes {len(taken)}", "match sends and receives")
