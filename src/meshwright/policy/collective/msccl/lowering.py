"""`lower_collective`: a collective as a lane program, ready for MSCCL.

Each pair of peers gets a lane that sends and one that receives, so that no lane waits for a peer
that waits for it. Where a lane can pass on what it receives (a ring, a chain), both become one lane
with fused steps, if all lanes still come to their end.
"""

from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.buffer_placement import BufferPlacement
from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.msccl.lowering_events import (
    MessageEvent,
    ThreadBlockKey,
    list_events,
)
from meshwright.policy.collective.msccl.lowering_messages import (
    list_buffer_placements,
    split_messages,
)
from meshwright.policy.collective.msccl.program_checks import PROGRAM_OPS
from meshwright.policy.collective.msccl.program_walk import ConnectionBuffer, walk_program
from meshwright.policy.collective.msccl.step_dependencies import (
    StepPosition,
    find_dependencies,
    sort_thread_blocks,
)
from meshwright.policy.collective.msccl.step_fusion import (
    StepsByThreadBlock,
    UnlinkedStep,
    build_fused_blocks,
    build_unfused_blocks,
)
from meshwright.policy.collective.msccl.thread_block_program import (
    PIECES_IN_FLIGHT,
    MscclProtocol,
    RankThreadBlocks,
    StepDependency,
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
)
from meshwright.policy.collective.switch_lowering import lower_switches

LoweringStyle = Literal["fused", "apart"]
MAX_STEP_CHUNKS = 71
"""A step of MSCCL holds fewer than 72 chunks."""


def lower_collective(
    collective: Collective,
    *,
    style: LoweringStyle = "fused",
    protocol: MscclProtocol = "Simple",
    most_steps: int | None = None,
    min_bytes: int = 0,
    max_bytes: int = 0,
) -> ThreadBlockProgram:
    """Return the lanes of a collective; switches get a host.

    No lane has more than `most_steps` steps, where given: the rest goes to further channels.
    """
    if collective.op not in PROGRAM_OPS:
        what = f"{collective.op} cannot be stated as lanes alone"
        fix = f"use one of {', '.join(sorted(PROGRAM_OPS))}, or the plain file"
        raise InputError([Problem("op", what, fix)])
    frame = ThreadBlockProgram(
        name=collective.name,
        op=collective.op,
        chunks=collective.chunks,
        ranks=(),
        protocol=protocol,
        # Input and output of an all-to-all are different chunks: sharing memory mixes them up.
        in_place=collective.op != "all_to_all",
        root=collective.root,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
    )
    plain = lower_switches(collective)
    places = list_buffer_placements(plain)
    cut = list(split_messages(plain, places, MAX_STEP_CHUNKS))
    most = 1 << 30 if most_steps is None else max(1, most_steps)
    while True:
        events = list_events(
            cut, places, channels=plain.channels, most=most, most_count=MAX_STEP_CHUNKS
        )
        program = _program(frame, places, events, style)
        longest = max(
            (len(lane.steps) for own in program.ranks for lane in own.thread_blocks), default=0
        )
        if most_steps is None or longest <= most_steps or most == 1:
            return program
        # Steps that only wait came on top: leave room for them.
        most = max(1, most * most_steps // longest if longest < 2 * most else most // 2)


def _program(
    frame: ThreadBlockProgram,
    places: list[BufferPlacement],
    events: list[list[MessageEvent]],
    style: LoweringStyle,
) -> ThreadBlockProgram:
    if style == "fused":
        lanes = [build_fused_blocks(own, places[rank]) for rank, own in enumerate(events)]
        fused = _assembled(frame, places, lanes, events)
        if fused is not None:
            room = ConnectionBuffer(PIECES_IN_FLIGHT[frame.protocol], fused.chunks_per_piece)
            if not walk_program(fused, room).blocked:
                return fused
    apart = _assembled(frame, places, [build_unfused_blocks(own) for own in events], events)
    assert apart is not None, "lanes for one direction never wait in a circle"
    return apart


def _assembled(
    frame: ThreadBlockProgram,
    places: list[BufferPlacement],
    lanes: list[StepsByThreadBlock],
    events: list[list[MessageEvent]],
) -> ThreadBlockProgram | None:
    """Return the whole program, or nothing where the lanes of a rank wait in a circle."""
    ranks = []
    for own, where, done in zip(lanes, places, events, strict=True):
        ordered = sort_thread_blocks(own)
        found = find_dependencies(ordered, done)
        if found is None:
            return None
        ranks.append(
            RankThreadBlocks(
                input_chunks=len(where.input_slots),
                output_chunks=len(where.output_slots),
                scratch_chunks=len(where.scratch_index),
                thread_blocks=_lanes(ordered, found),
            )
        )
    return msgspec.structs.replace(frame, ranks=tuple(ranks))


def _lanes(
    lanes: list[tuple[ThreadBlockKey, list[UnlinkedStep]]], found: list[list[list[StepPosition]]]
) -> tuple[ThreadBlock, ...]:
    """Put waits into steps; each waits for one other, so further waits are steps before it."""
    position = {}
    for lane, own in enumerate(found):
        number = -1
        for index, needs in enumerate(own):
            number += max(1, len(needs))
            position[lane, index] = number
    told = {need for own in found for needs in own for need in needs}
    made = []
    for lane, (key, items) in enumerate(lanes):
        steps: list[ThreadBlockStep] = []
        for index, item in enumerate(items):
            targets = [StepDependency(need[0], position[need]) for need in found[lane][index]]
            steps += [ThreadBlockStep(kind="nop", dependency=wait) for wait in targets[:-1]]
            steps.append(
                ThreadBlockStep(
                    kind=item.kind,
                    src=item.src,
                    dst=item.dst,
                    count=item.num_chunks,
                    dependency=targets[-1] if targets else None,
                    # Told apart as well where two additions would be taken for one.
                    has_dependents=(lane, index) in told or _would_fuse(items, index),
                )
            )
        made.append(
            ThreadBlock(
                send_peer=key.send_peer,
                recv_peer=key.recv_peer,
                channel=key.channel,
                steps=tuple(steps),
            )
        )
    return tuple(made)


def _would_fuse(items: list[UnlinkedStep], index: int) -> bool:
    """Whether MSCCL's parser would join an addition with the next one of another length."""
    if index + 1 >= len(items):
        return False
    item, after = items[index : index + 2]
    return (
        item.kind == after.kind == "re"
        and item.dst == after.dst
        and item.num_chunks != after.num_chunks
    )
