"""`verify_lanes`: is a lane program sound? It answers with a proof or a counter-example.

Sound means: sends and receives match in number and size, every lane comes to its end with the room
there is between ranks, no two accesses race, nothing lies outside its buffer, and every output
holds each contribution once. It is asked of any program, whoever wrote it.

It is strict in one respect: in an operation that adds nothing up, a step that adds is refused even
where nobody reads its result.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.threadblocks.program import IN_FLIGHT, LaneProgram
from meshwright.policy.collective.threadblocks.shape import lane_problems
from meshwright.policy.collective.threadblocks.values import LaneRun
from meshwright.policy.collective.threadblocks.walk import Room, Unit, deadlock, walk


class LaneProof(msgspec.Struct, frozen=True, kw_only=True):
    """What was shown about a lane program."""

    sound: bool
    problems: tuple[Problem, ...]
    """The shortest counter-example found, or nothing."""
    lanes: int
    """The most lanes of a rank."""
    steps: int
    """Steps of all lanes together."""
    in_flight: int
    """Pieces of a message that were allowed between a sender and a receiver."""
    at_once: int
    """Chunks that such a piece was taken to hold."""


def verify_lanes(
    program: LaneProgram, *, in_flight: int | None = None, at_once: int | None = None
) -> LaneProof:
    """Return the proof that a program is sound, or what refutes it.

    Between a sender and a receiver `in_flight` pieces of `at_once` chunks find room; where not
    given, what the protocol has for the largest message that the program is meant for.
    """
    room = Room(
        IN_FLIGHT[program.protocol] if in_flight is None else in_flight,
        program.at_once if at_once is None else at_once,
    )
    if min(room) < 1:
        what = f"{room.in_flight} pieces of {room.at_once} chunks"
        raise InputError([Problem("in_flight", what, "use 1 or more")])
    problem = next(iter(lane_problems(program)), None)
    if problem is None:
        walked = walk(program, room)
        problem = deadlock(program, walked, room) or _wrong(program, walked.order)
    return LaneProof(
        sound=problem is None,
        problems=() if problem is None else (problem,),
        lanes=max((len(own.lanes) for own in program.ranks), default=0),
        steps=program.steps,
        in_flight=room.in_flight,
        at_once=room.at_once,
    )


def _wrong(program: LaneProgram, order: list[Unit]) -> Problem | None:
    """Run the program in each way it may be run; return the first thing that goes wrong."""
    for shared, allowed in ((False, program.out_of_place), (True, program.in_place)):
        if not allowed:
            continue
        run = LaneRun(program, shared=shared)
        for unit in order:
            problem = run.step(unit)
            if problem is not None:
                return problem
        problem = run.outcome()
        if problem is not None:
            return problem
    return None
