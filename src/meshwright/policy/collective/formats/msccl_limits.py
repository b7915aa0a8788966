"""How much MSCCL's interpreters hold: a program beyond that is refused with what would help."""

from collections.abc import Iterator

import msgspec

from meshwright.errors import Problem
from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.msccl.thread_block_program import (
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
    format_step_name,
)


class MscclLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one interpreter can take."""

    name: str
    thread_blocks: int
    """Thread blocks of a rank."""
    thread_blocks_per_channel: int
    """Of those, thread blocks that send (or receive) on one channel."""
    steps: int
    """Steps of a thread block, waits included."""
    channels: int
    step_chunks: int = 71
    """Chunks of a step (MSCCL_MAX_COUNT is 72, and a count must be less)."""
    max_offset: int = 32767
    """The last chunk of a buffer; offsets have 16 bits."""
    elements: int = 4096
    """XML elements that the parser keeps: ranks, and the own thread blocks and steps."""


RCCL = MscclLimits(
    name="RCCL", thread_blocks=64, thread_blocks_per_channel=32, steps=64, channels=128
)
"""msccl_struct.h and msccl_parser.h of RCCL 2.21.5."""
MSCCL_EXECUTOR = MscclLimits(
    name="msccl-executor-nccl",
    thread_blocks=128,
    thread_blocks_per_channel=32,
    steps=64,
    channels=32,
)
"""The same files of Azure/msccl-executor-nccl: it has room for 1,024 thread blocks, but the one
that a step waits for is kept in 8 bits. The number of steps is its default when it is built."""
_FIRST = BufferChunk("input", 0)


def find_limit_problems(program: ThreadBlockProgram, limits: MscclLimits) -> Iterator[Problem]:
    """Go through the limits that a program breaks."""
    for rank, own in enumerate(program.ranks):
        if len(own.thread_blocks) > limits.thread_blocks:
            what = (
                f"{len(own.thread_blocks)} lanes, more than the {limits.thread_blocks} of "
                f"{limits.name}"
            )
            fix = "use an algorithm with fewer peers or channels, such as a ring or a hierarchy"
            yield Problem(f"rank {rank}", what, fix)
        elements = 1 + len(program.ranks) + sum(1 + len(lane.steps) for lane in own.thread_blocks)
        if elements > limits.elements:
            what = f"{elements} XML elements, more than the {limits.elements} of {limits.name}"
            yield Problem(f"rank {rank}", what, "cut the message into fewer chunks")
        for index, lane in enumerate(own.thread_blocks):
            yield from _lane_problems(f"rank {rank}, lane {index}", lane, limits)
            for number, step in enumerate(lane.steps):
                if step.count > limits.step_chunks:
                    what = f"{step.count} chunks at once, more than {limits.step_chunks}"
                    yield Problem(
                        format_step_name(rank, index, number), what, "cut the step in two"
                    )
                last = max(spot.chunk for spot in (step.src, step.dst, _FIRST) if spot is not None)
                if last > limits.max_offset:
                    what = f"chunk {last} of a buffer, past the last one, {limits.max_offset}"
                    fix = "cut the message into fewer chunks"
                    yield Problem(format_step_name(rank, index, number), what, fix)
        for way in ("send", "receive"):
            yield from _crowded(f"rank {rank}", own.thread_blocks, way, limits)


def _lane_problems(at: str, lane: ThreadBlock, limits: MscclLimits) -> Iterator[Problem]:
    if len(lane.steps) > limits.steps:
        what = f"{len(lane.steps)} steps, more than the {limits.steps} of {limits.name}"
        fix = (
            f"spread it over more channels: lower_collective(collective, most_steps={limits.steps})"
        )
        yield Problem(at, what, fix)
    if not 0 <= lane.channel < limits.channels:
        what = f"channel {lane.channel}, but {limits.name} has {limits.channels}"
        yield Problem(at, what, "use fewer channels")
    for number, (step, after) in enumerate(zip(lane.steps, lane.steps[1:], strict=False)):
        if step.kind == "nop" and (step.dependency is None or after.dependency is None):
            what = "a nop only waits together with the step after it, and both must name a wait"
            yield Problem(f"{at}, step {number}", what, "move the wait to the next step")
    for number in range(1, len(lane.steps)):
        before, step = lane.steps[number - 1 : number + 1]
        if is_fused_by_parser(before, step) and before.count != step.count:
            what = f"additions of {before.count} and {step.count} chunks to one place are fused"
            yield Problem(f"{at}, step {number}", what, "mark the first as waited for (hasdep)")


def _crowded(
    at: str, lanes: tuple[ThreadBlock, ...], way: str, limits: MscclLimits
) -> Iterator[Problem]:
    peers = [(lane.send_peer if way == "send" else lane.recv_peer, lane.channel) for lane in lanes]
    channels = [channel for peer, channel in peers if peer >= 0]
    for channel in sorted(set(channels)):
        if channels.count(channel) > limits.thread_blocks_per_channel:
            what = f"{channels.count(channel)} lanes {way} on channel {channel}, more than "
            fix = "spread the peers over more channels"
            yield Problem(at, f"{what}{limits.thread_blocks_per_channel}", fix)


def is_fused_by_parser(before: ThreadBlockStep, step: ThreadBlockStep) -> bool:
    """Whether the parser takes two additions for one (msccl_parser.cc)."""
    return (
        before.kind == step.kind == "re"
        and before.dst == step.dst
        and before.src is not None
        and step.src is not None
        and before.src.buffer == step.src.buffer
        and step.dependency is None
        and not before.has_dependents
    )
