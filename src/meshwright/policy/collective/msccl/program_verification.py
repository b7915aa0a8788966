"""`verify_program`: is a lane program sound? It answers with a proof or a counter-example.

Sound means: sends and receives match in number and size, every lane comes to its end with the room
there is between ranks, no two accesses race, nothing lies outside its buffer, and every output
holds each contribution once. It is asked of any program, whoever wrote it.

It is strict in one respect: in an operation that adds nothing up, a step that adds is refused even
where nobody reads its result.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.msccl.program_checks import find_program_problems
from meshwright.policy.collective.msccl.program_walk import (
    ConnectionBuffer,
    StepPiece,
    find_deadlock,
    walk_program,
)
from meshwright.policy.collective.msccl.symbolic_run import SymbolicRun
from meshwright.policy.collective.msccl.thread_block_program import (
    PIECES_IN_FLIGHT,
    ThreadBlockProgram,
)


class ProgramProof(msgspec.Struct, frozen=True, kw_only=True):
    """What was shown about a lane program."""

    is_correct: bool
    problems: tuple[Problem, ...]
    """The shortest counter-example found, or nothing."""
    max_thread_blocks: int
    """The most lanes of a rank."""
    steps: int
    """Steps of all lanes together."""
    pieces_in_flight: int
    """Pieces of a message that were allowed between a sender and a receiver."""
    chunks_per_piece: int
    """Chunks that such a piece was taken to hold."""


def verify_program(
    program: ThreadBlockProgram, *, in_flight: int | None = None, at_once: int | None = None
) -> ProgramProof:
    """Return the proof that a program is sound, or what refutes it.

    Between a sender and a receiver `in_flight` pieces of `at_once` chunks find room; where
    not given, what the protocol has for the largest message that the program is meant for.
    """
    room = ConnectionBuffer(
        PIECES_IN_FLIGHT[program.protocol] if in_flight is None else in_flight,
        program.chunks_per_piece if at_once is None else at_once,
    )
    if min(room) < 1:
        what = f"{room.pieces_in_flight} pieces of {room.chunks_per_piece} chunks"
        raise InputError([Problem("in_flight", what, "use 1 or more")])
    problem = next(iter(find_program_problems(program)), None)
    if problem is None:
        walked = walk_program(program, room)
        problem = find_deadlock(program, walked, room) or _wrong(program, walked.order)
    return ProgramProof(
        is_correct=problem is None,
        problems=() if problem is None else (problem,),
        max_thread_blocks=max((len(own.thread_blocks) for own in program.ranks), default=0),
        steps=program.steps,
        pieces_in_flight=room.pieces_in_flight,
        chunks_per_piece=room.chunks_per_piece,
    )


def _wrong(program: ThreadBlockProgram, order: list[StepPiece]) -> Problem | None:
    """Run the program in each way it may be run; return the first thing that goes wrong."""
    for shared, allowed in ((False, program.out_of_place), (True, program.in_place)):
        if not allowed:
            continue
        run = SymbolicRun(program, shared=shared)
        for unit in order:
            problem = run.run_piece(unit)
            if problem is not None:
                return problem
        problem = run.check_output()
        if problem is not None:
            return problem
    return None
