"""What the device of each rank spends its time on.

Every moment between the first start and the last end of device work is in exactly one part, so
the parts add up to the window, to the nanosecond:

    compute                  a compute kernel runs, whatever else does
    exposed communication    a collective runs and no compute
    exposed memory copy      a copy or fill runs, and neither compute nor communication
    idle                     nothing runs
"""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.spans import (
    COMMUNICATION,
    COMPUTE,
    MEMORY_COPY,
    DeviceSpans,
    Intervals,
    measure,
    subtract,
    union,
)
from meshwright.observe.analyze.steps import Extent, counted
from meshwright.timeline.once import once
from meshwright.timeline.readers.communication import rule_of
from meshwright.timeline.timeline import Timeline


class Exposed(NamedTuple):
    """Communication of one sort that no compute hides."""

    collective: str
    """Which collective, such as `all_gather`; from the trace or the kernel's name."""
    library: str
    """Whose kernels: `nccl`, `deepep`, …; empty where only the trace's kind says so."""
    total_ns: int
    """When any of it ran."""
    exposed_ns: int
    """When any of it ran and no compute did.

    Where two sorts run at once, the first in the alphabet has the moment."""
    num_spans: int
    """How many kernels."""


class RankBreakdown(NamedTuple):
    """The time of one rank's device."""

    rank: int
    start_ns: int
    """First start of counted device work."""
    end_ns: int
    """Last end of it."""
    compute_ns: int
    exposed_communication_ns: int
    exposed_memory_copy_ns: int
    idle_ns: int
    communication_ns: int
    """When any communication ran, hidden or not."""
    memory_copy_ns: int
    """When any copy ran, hidden or not."""
    communication: tuple[Exposed, ...]
    """Exposed communication by collective and library, most exposed first; adds up to it."""
    num_spans: int
    """How many device spans were counted."""
    num_left_out: int
    """How many were not: see `Extent`."""

    @property
    def window_ns(self) -> int:
        """From first start to last end: the four parts together."""
        return self.end_ns - self.start_ns

    @property
    def busy_ns(self) -> int:
        """When anything ran."""
        return self.window_ns - self.idle_ns

    def share(self, part_ns: int) -> float:
        """A part of the window, 0 to 1; 0 where there is no window."""
        return part_ns / self.window_ns if self.window_ns else 0.0


def breakdown(timeline: Timeline, extent: Extent = Extent.WINDOW) -> tuple[RankBreakdown, ...]:
    """Where the time of every rank's device goes."""
    return tuple(breakdown_of(part, extent) for part in per_device(timeline))


@once
def breakdown_of(part: Timeline, extent: Extent = Extent.WINDOW) -> RankBreakdown:
    """Where the time of one rank's device goes."""
    spans = counted(part, extent)
    start, end = spans.window_ns
    compute, communication = spans.of(COMPUTE), spans.of(COMMUNICATION)
    copies, busy = spans.of(MEMORY_COPY), spans.of()
    exposed = subtract(communication, compute)
    with_communication = spans.of(COMPUTE, COMMUNICATION)
    return RankBreakdown(
        rank=part.ranks[0] if part.ranks else 0,
        start_ns=start,
        end_ns=end,
        compute_ns=measure(compute),
        exposed_communication_ns=measure(exposed),
        exposed_memory_copy_ns=measure(busy) - measure(with_communication),
        idle_ns=end - start - measure(busy),
        communication_ns=measure(communication),
        memory_copy_ns=measure(copies),
        communication=_by_collective(part, spans, exposed),
        num_spans=int(spans.row.size),
        num_left_out=int(counted(part, Extent.ALL).row.size - spans.row.size),
    )


def collective_of(name: str) -> str:
    """Which collective a kernel's name says, in the words of the record; `other` for none."""
    lower = name.lower().replace("_", "").replace(" ", "")
    for word, collective in _COLLECTIVES:
        if word in lower:
            return collective
    return "other"


_COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("barrier", "barrier"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
    ("message", "message"),
)
"""Words in names of kernels, longest meaning first: `allreduce` before `reduce`."""


def _by_collective(part: Timeline, spans: DeviceSpans, exposed: Intervals) -> tuple[Exposed, ...]:
    own = spans.take(spans.kind == COMMUNICATION)
    said = part.strings("collective")
    # One row per distinct pair of what the trace says and what the kernel is called.
    pairs, place = np.unique(
        np.stack([said.codes[own.row], own.name], axis=1), axis=0, return_inverse=True
    )
    sorts = [
        _sort(said.values[code] if code >= 0 else "", own.names[name])
        for code, name in pairs.tolist()
    ]
    found = []
    for collective, library in sorted(set(sorts)):
        has = np.array([sort == (collective, library) for sort in sorts], dtype=np.bool_)
        mine = has[place.reshape(-1)]
        when = union(own.start[mine], own.end[mine])
        left = subtract(exposed, when)
        taken = measure(exposed) - measure(left)
        exposed = left
        found.append(Exposed(collective, library, measure(when), taken, int(mine.sum())))
    return tuple(sorted(found, key=lambda item: -item.exposed_ns))


def _sort(said: str, name: str) -> tuple[str, str]:
    rule = rule_of(name)
    collective = collective_of(said or name)
    return (said if said and collective == "other" else collective, rule.library if rule else "")
