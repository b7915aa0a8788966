"""Sums up what the page of a rank says."""

from meshwright.observe.watch.agent.pages import CAPTURES_OFF, ENDED, FAILED, PROFILES_ITSELF
from meshwright.observe.watch.pace import usual
from meshwright.observe.watch.processes import Process
from meshwright.observe.watch.status import RankStatus

MOST_TIMES = 4096
"""Steps, the newest, that figures are taken from."""


def rank_status(process: Process) -> RankStatus:
    """Sum up one rank."""
    reader = process.steps
    if reader is None:
        raise ValueError(f"process {process.said.pid} has made no step")
    head = reader.head()
    last_ns = reader.last_ns() or head.started_ns
    passed_ns = max(last_ns - head.started_ns, 1)
    figures = usual(reader.times(MOST_TIMES).step_s)
    state = "runs"
    if head.state & FAILED:
        state = "failed"
    elif head.state & ENDED:
        state = "ended"
    elif process.gone:
        state = "gone"
    return RankStatus(
        rank=process.rank if process.rank is not None else -1,
        pid=process.said.pid,
        steps=head.num_steps,
        step_ms=1e3 * figures.middle_s if figures else None,
        overhead=min(1.0, head.spent_ns / passed_ns),
        captures=head.num_captures,
        state=state,
    )


def notes(ranks: list[Process]) -> list[str]:
    """What the agents have to say."""
    states = [one.steps.head().state for one in ranks if one.steps is not None]
    found = []
    if any(state & PROFILES_ITSELF for state in states):
        found.append("the job was profiling itself when a capture was due: it went first")
    if any(state & CAPTURES_OFF for state in states):
        found.append("captures failed and are off on some ranks: see log.txt")
    return found
