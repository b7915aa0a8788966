"""The obvious way to run a schedule: look at every rank again and again until nothing moves.

It shares no code with what it checks, knows one length per pass, and takes all the time it wants.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import strategies as st

from meshwright.policy.pipeline import PipelineAction, PipelineSchedule
from meshwright.policy.pipeline.schedule_builder import ACTION_WRITERS, build_schedule

Number = int | Fraction


@dataclass
class Run:
    """Where everything fell."""

    start: dict[tuple[str, int, int], Number] = field(default_factory=dict)
    end: dict[tuple[str, int, int], Number] = field(default_factory=dict)
    first: dict[int, Number] = field(default_factory=dict)
    last: dict[int, Number] = field(default_factory=dict)
    finished: bool = False

    @property
    def longest_rank(self) -> Number:
        """The longest time any rank takes from its first action to its last."""
        return max(self.last[rank] - self.first[rank] for rank in self.first)


def execute(
    schedule: PipelineSchedule,
    forward: Number = 1,
    backward_input: Number = 1,
    backward_weight: Number = 1,
    overlapped: Number | None = None,
) -> Run:
    """Run a schedule of compute actions as early as it goes."""
    cost = {"F": forward, "I": backward_input, "W": backward_weight}
    cost["B"] = backward_input + backward_weight
    run = Run()
    todo = [_together(lane) for lane in schedule.actions]
    clock: list[Number] = [0] * len(todo)
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(todo):
            while lane and all(_ready(action, run, schedule.chunks) for action in lane[0]):
                group = lane.pop(0)
                begin = max(
                    [clock[rank], *(t for a in group for t in _waits(a, run, schedule.chunks))]
                )
                length = sum((cost[action.op] for action in group), start=Fraction(0))
                if len(group) > 1 and overlapped is not None:
                    length = Fraction(overlapped)
                clock[rank] = begin + length
                for action in group:
                    run.start[_key(action)] = begin
                    run.end[_key(action)] = clock[rank]
                run.first.setdefault(rank, begin)
                run.last[rank] = clock[rank]
                moved = True
    run.finished = not any(todo)
    return run


def _together(lane: tuple[PipelineAction, ...]) -> list[list[PipelineAction]]:
    found: list[list[PipelineAction]] = []
    for action in lane:
        if action.is_concurrent:
            found[-1].append(action)
        else:
            found.append([action])
    return found


def _key(action: PipelineAction) -> tuple[str, int, int]:
    return ("I" if action.op == "B" else action.op, action.chunk, action.microbatch)


def _sources(action: PipelineAction, chunks: int) -> list[tuple[str, int, int]]:
    op, chunk, microbatch = _key(action)
    if op == "F":
        return [("F", chunk - 1, microbatch)] if chunk > 0 else []
    if op == "W":
        return [("I", chunk, microbatch)]
    later = [("I", chunk + 1, microbatch)] if chunk + 1 < chunks else []
    return [("F", chunk, microbatch), *later]


def _ready(action: PipelineAction, run: Run, chunks: int) -> bool:
    return all(source in run.end for source in _sources(action, chunks))


def _waits(action: PipelineAction, run: Run, chunks: int) -> list[Number]:
    return [run.end[source] for source in _sources(action, chunks)]


@st.composite
def schedules(
    draw: st.DrawFn, most_ranks: int = 6, most_microbatches: int = 16
) -> PipelineSchedule:
    """Any kind of schedule, small."""
    kind = draw(st.sampled_from(sorted(ACTION_WRITERS)))
    ranks = draw(st.integers(1, most_ranks))
    if kind == "dualpipe" and ranks > 1:
        ranks += ranks % 2
    virtual = draw(st.integers(2, 4)) if kind == "interleaved" and ranks > 1 else None
    microbatches = draw(st.integers(1, most_microbatches))
    return build_schedule(kind, ranks, microbatches, virtual_stages=virtual)
