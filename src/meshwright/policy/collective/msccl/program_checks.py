"""What can be wrong with a lane program before anything runs: bounds, peers, waits, messages."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.errors import Problem
from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.collective import REDUCING_OPS
from meshwright.policy.collective.contract import (
    find_shape_problems,
    list_input_slots,
    list_output_slots,
)
from meshwright.policy.collective.msccl.program_walk import ConnectionKey, find_signalling_step
from meshwright.policy.collective.msccl.thread_block_program import (
    DST_WRITING_KINDS,
    RECEIVING_KINDS,
    SENDING_KINDS,
    SRC_READING_KINDS,
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
    describe_step,
    format_chunk_name,
    format_step_name,
)

MAX_CHUNKS = 1 << 24
"""Chunks of all buffers, and of all steps, that a program is followed through: each is looked at
by itself. MSCCL's offsets have 16 bits, so programs that run anywhere stay far below."""
PROGRAM_OPS = frozenset(
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


def find_program_problems(program: ThreadBlockProgram) -> Iterator[Problem]:
    """Go through all that is wrong, the simplest first."""
    if program.op not in PROGRAM_OPS:
        fix = f"use one of {', '.join(sorted(PROGRAM_OPS))}"
        yield Problem("op", f"{program.op} cannot be stated as lanes alone", fix)
        return
    if not (program.in_place or program.out_of_place):
        what = "the program may run neither in place nor out of place"
        yield Problem("in_place", what, "allow one of them")
    shape = find_shape_problems(program.specification)
    shape += _size_problems(program)
    yield from shape
    if shape:
        return
    for rank, own in enumerate(program.ranks):
        sizes = count_buffer_chunks(program, rank)
        taken: dict[tuple[str, int, int], int] = {}
        for index, lane in enumerate(own.thread_blocks):
            yield from _peer_problems(program, rank, index, lane, taken)
            for number, step in enumerate(lane.steps):
                at = format_step_name(rank, index, number)
                yield from _step_problems(program, lane, step, at, sizes)
                yield from _overlap_problems(program, rank, step, at)
                yield from _wait_problems(program, rank, step, at)
    yield from _message_problems(program)


def _size_problems(program: ThreadBlockProgram) -> list[Problem]:
    lanes = (lane for own in program.ranks for lane in own.thread_blocks)
    moved = sum(max(0, step.count) for lane in lanes for step in lane.steps)
    scratch = max((own.scratch_chunks for own in program.ranks), default=0)
    return [
        Problem(where, f"{many:,} chunks {what}", f"use {MAX_CHUNKS:,} or fewer")
        for where, many, what in (
            ("chunks", program.chunks * len(program.ranks), "of all ranks together"),
            ("scratch", scratch, "of scratch memory"),
            ("steps", moved, "in all steps together"),
        )
        if many > MAX_CHUNKS
    ]


class MemoryChunk(NamedTuple):
    """A chunk of memory of one rank."""

    memory: str
    chunk: int


def get_memory_chunk(
    program: ThreadBlockProgram, rank: int, spot: BufferChunk, *, shared: bool
) -> MemoryChunk:
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


def count_buffer_chunks(program: ThreadBlockProgram, rank: int) -> dict[str, int]:
    """Return how many chunks each buffer of a rank has, whatever the program says it uses."""
    task = program.specification
    return {
        "input": len(list_input_slots(task, rank)),
        "output": len(list_output_slots(task, rank)),
        "scratch": program.ranks[rank].scratch_chunks,
    }


def _peer_problems(
    program: ThreadBlockProgram,
    rank: int,
    index: int,
    lane: ThreadBlock,
    taken: dict[tuple[str, int, int], int],
) -> Iterator[Problem]:
    at, ranks = f"rank {rank}, lane {index}", len(program.ranks)
    alone = lane.send_peer < 0 and lane.recv_peer < 0
    if not (-1 if alone else 0) <= lane.channel < MAX_CHUNKS:
        yield Problem(at, f"channel {lane.channel}", f"use 0 to {MAX_CHUNKS - 1}")
    for way, peer in (("send", lane.send_peer), ("receive", lane.recv_peer)):
        if not -1 <= peer < ranks or peer == rank:
            fix = f"use another rank from 0 to {ranks - 1}, or -1 for none"
            yield Problem(at, f"{way} peer {peer} of rank {rank} among {ranks}", fix)
        elif peer >= 0:
            other = taken.setdefault((way, peer, lane.channel), index)
            if other != index:
                what = f"lane {other} too has {way} peer {peer} on channel {lane.channel}"
                yield Problem(at, what, "put one of them on another channel")


def _step_problems(
    program: ThreadBlockProgram,
    lane: ThreadBlock,
    step: ThreadBlockStep,
    at: str,
    sizes: dict[str, int],
) -> Iterator[Problem]:
    if step.kind == "nop":
        return
    if step.count < 1:
        yield Problem(at, f"{step.count} chunks", "use 1 or more")
    if step.kind in SENDING_KINDS and lane.send_peer < 0:
        yield Problem(at, f"{step.kind} in a lane without a send peer", "name the peer")
    if step.kind in RECEIVING_KINDS and lane.recv_peer < 0:
        yield Problem(at, f"{step.kind} in a lane without a receive peer", "name the peer")
    if (step.kind.startswith("rr") or step.kind == "re") and program.op not in REDUCING_OPS:
        yield Problem(at, f"{step.kind} adds, but {program.op} adds nothing up")
    for used, spot in ((SRC_READING_KINDS, step.src), (DST_WRITING_KINDS, step.dst)):
        if step.kind in used:
            yield from _bound_problems(program, step, spot, at, sizes)


def _overlap_problems(
    program: ThreadBlockProgram, rank: int, step: ThreadBlockStep, at: str
) -> Iterator[Problem]:
    """A step reads and writes in pieces, in no order: it may work in place, but not half so."""
    if (
        step.kind not in SRC_READING_KINDS & DST_WRITING_KINDS
        or step.src is None
        or step.dst is None
    ):
        return
    for shared, allowed in ((False, program.out_of_place), (True, program.in_place)):
        source = get_memory_chunk(program, rank, step.src, shared=shared)
        target = get_memory_chunk(program, rank, step.dst, shared=shared)
        apart = abs(source.chunk - target.chunk)
        if allowed and source.memory == target.memory and 0 < apart < step.count:
            mode = " (run in place)" if shared else ""
            what = (
                f"{step.kind} reads {format_chunk_name(step.src)} and writes "
                f"{format_chunk_name(step.dst)}"
            )
            fix = f"move {apart} chunks at a time, or go through scratch chunks"
            yield Problem(at, f"{what}, {step.count} chunks each, which overlap{mode}", fix)
            return


def _bound_problems(
    program: ThreadBlockProgram,
    step: ThreadBlockStep,
    spot: BufferChunk | None,
    at: str,
    sizes: dict[str, int],
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


def _wait_problems(
    program: ThreadBlockProgram, rank: int, step: ThreadBlockStep, at: str
) -> Iterator[Problem]:
    if step.dependency is None:
        return
    lanes = program.ranks[rank].thread_blocks
    if not 0 <= step.dependency.thread_block < len(lanes):
        what = f"waits for lane {step.dependency.thread_block}, but rank {rank} has {len(lanes)}"
        yield Problem(at, what, "name a lane of the same rank")
        return
    other = lanes[step.dependency.thread_block]
    if not 0 <= step.dependency.step < len(other.steps):
        what = (
            f"waits for step {step.dependency.step} of lane {step.dependency.thread_block}, "
            f"which has "
        )
        yield Problem(at, f"{what}{len(other.steps)}", "name one of its steps")
    elif find_signalling_step(other, step.dependency.step) < 0:
        what = (
            f"waits for step {step.dependency.step} of lane {step.dependency.thread_block}, "
            f"whose end is never told"
        )
        yield Problem(at, what, "mark that step as one that others wait for (hasdep)")


def _message_problems(program: ThreadBlockProgram) -> Iterator[Problem]:
    sent: dict[ConnectionKey, list[tuple[str, int]]] = {}
    taken: dict[ConnectionKey, list[tuple[str, int]]] = {}
    for rank, own in enumerate(program.ranks):
        for index, lane in enumerate(own.thread_blocks):
            for number, step in enumerate(lane.steps):
                at = f"{format_step_name(rank, index, number)} ({describe_step(lane, step)})"
                if step.kind in SENDING_KINDS:
                    link = rank, lane.send_peer, lane.channel
                    sent.setdefault(link, []).append((at, step.count))
                if step.kind in RECEIVING_KINDS:
                    link = lane.recv_peer, rank, lane.channel
                    taken.setdefault(link, []).append((at, step.count))
    for link in sorted(sent.keys() | taken.keys()):
        yield from _link_problems(link, sent.get(link, []), taken.get(link, []))


def _link_problems(
    link: ConnectionKey, sent: list[tuple[str, int]], taken: list[tuple[str, int]]
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
