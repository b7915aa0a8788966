"""Draws a schedule as text: a line per rank, a column per unit of length.

A cell shows the pass and its microbatch; small letters mark a rank's second chunk, and where a
rank holds more than two a letter behind the number counts them (`F3a`, `F3b`). Dots are idle.
"""

from meshwright.policy.pipeline.action_times import compute_action_times
from meshwright.policy.pipeline.schedule import PipelineAction, PipelineSchedule


def format_schedule(schedule: PipelineSchedule) -> str:
    """Return the drawing of a sound schedule with all three passes one slot long."""
    placed = compute_action_times(schedule)
    held = [schedule.chunks_of(rank) for rank in range(schedule.ranks)]
    letters = max(len(chunks) for chunks in held) > 2
    width = 1 + len(str(schedule.microbatches - 1)) + letters
    end = round(max(one.end for one in placed))
    lines = [list(" ".join(["." * width] * end)) for _ in held]
    for one in placed:
        text = "&".join(_cell(action, held[one.rank], letters) for action in one.group)
        first = round(one.start) * (width + 1)
        room = round(one.end - one.start) * (width + 1) - 1
        lines[one.rank][first : first + room] = text.ljust(room, "-")
    label = len(f"rank {schedule.ranks - 1}")
    return "\n".join(
        f"rank {rank}".ljust(label) + "  " + "".join(line).rstrip()
        for rank, line in enumerate(lines)
    )


def _cell(action: PipelineAction, held: tuple[int, ...], letters: bool) -> str:
    turn = held.index(action.chunk)
    if letters:
        return f"{action.op}{action.microbatch}{'abcdefghijklmnopqrstuvwxyz'[turn % 26]}"
    return f"{action.op.lower() if turn else action.op}{action.microbatch}"
