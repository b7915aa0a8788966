"""`lowered`: a collective as a lane program, ready for MSCCL.

Each pair of peers gets a lane that sends and one that receives, so that no lane waits for a peer
that waits for it. Where a lane can pass on what it receives (a ring, a chain), both become one lane
with fused steps, if all lanes still come to their end.
"""

from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.hosting import hosted
from meshwright.policy.collective.placement import Places
from meshwright.policy.collective.threadblocks.events import Event, LaneKey, events_of
from meshwright.policy.collective.threadblocks.fusing import Item, Lanes, apart_lanes, fused_lanes
from meshwright.policy.collective.threadblocks.pieces import pieces, places_of
from meshwright.policy.collective.threadblocks.program import (
    IN_FLIGHT,
    Lane,
    LaneProgram,
    Protocol,
    RankLanes,
    Step,
    Wait,
)
from meshwright.policy.collective.threadblocks.shape import LANE_OPS
from meshwright.policy.collective.threadblocks.waiting import At, in_order, waits
from meshwright.policy.collective.threadblocks.walk import Room, walk

Style = Literal["fused", "apart"]
MOST_COUNT = 71
"""A step of MSCCL holds fewer than 72 chunks."""


def lowered(
    collective: Collective,
    *,
    style: Style = "fused",
    protocol: Protocol = "Simple",
    most_steps: int | None = None,
    min_bytes: int = 0,
    max_bytes: int = 0,
) -> LaneProgram:
    """Return the lanes of a collective; switches get a host.

    No lane has more than `most_steps` steps, where given: the rest goes to further channels.
    """
    if collective.op not in LANE_OPS:
        what = f"{collective.op} cannot be stated as lanes alone"
        fix = f"use one of {', '.join(sorted(LANE_OPS))}, or the plain file"
        raise InputError([Problem("op", what, fix)])
    frame = LaneProgram(
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
    plain = hosted(collective)
    places = places_of(plain)
    cut = list(pieces(plain, places, MOST_COUNT))
    most = 1 << 30 if most_steps is None else max(1, most_steps)
    while True:
        events = events_of(cut, places, channels=plain.channels, most=most, most_count=MOST_COUNT)
        program = _program(frame, places, events, style)
        longest = max((len(lane.steps) for own in program.ranks for lane in own.lanes), default=0)
        if most_steps is None or longest <= most_steps or most == 1:
            return program
        # Steps that only wait came on top: leave room for them.
        most = max(1, most * most_steps // longest if longest < 2 * most else most // 2)


def _program(
    frame: LaneProgram, places: list[Places], events: list[list[Event]], style: Style
) -> LaneProgram:
    if style == "fused":
        lanes = [fused_lanes(own, places[rank]) for rank, own in enumerate(events)]
        fused = _assembled(frame, places, lanes, events)
        if fused is not None:
            room = Room(IN_FLIGHT[frame.protocol], fused.at_once)
            if not walk(fused, room).stuck:
                return fused
    apart = _assembled(frame, places, [apart_lanes(own) for own in events], events)
    assert apart is not None, "lanes for one direction never wait in a circle"
    return apart


def _assembled(
    frame: LaneProgram, places: list[Places], lanes: list[Lanes], events: list[list[Event]]
) -> LaneProgram | None:
    """Return the whole program, or nothing where the lanes of a rank wait in a circle."""
    ranks = []
    for own, where, done in zip(lanes, places, events, strict=True):
        ordered = in_order(own)
        found = waits(ordered, done)
        if found is None:
            return None
        ranks.append(
            RankLanes(
                input_chunks=len(where.given),
                output_chunks=len(where.wanted),
                scratch_chunks=len(where.scratch),
                lanes=_lanes(ordered, found),
            )
        )
    return msgspec.structs.replace(frame, ranks=tuple(ranks))


def _lanes(
    lanes: list[tuple[LaneKey, list[Item]]], found: list[list[list[At]]]
) -> tuple[Lane, ...]:
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
        steps: list[Step] = []
        for index, item in enumerate(items):
            targets = [Wait(need[0], position[need]) for need in found[lane][index]]
            steps += [Step(kind="nop", wait=wait) for wait in targets[:-1]]
            steps.append(
                Step(
                    kind=item.kind,
                    src=item.src,
                    dst=item.dst,
                    count=item.length,
                    wait=targets[-1] if targets else None,
                    # Told apart as well where two additions would be taken for one.
                    told=(lane, index) in told or _would_fuse(items, index),
                )
            )
        made.append(
            Lane(send=key.send, receive=key.receive, channel=key.channel, steps=tuple(steps))
        )
    return tuple(made)


def _would_fuse(items: list[Item], index: int) -> bool:
    """Whether MSCCL's parser would join an addition with the next one of another length."""
    if index + 1 >= len(items):
        return False
    item, after = items[index : index + 2]
    return item.kind == after.kind == "re" and item.dst == after.dst and item.length != after.length
