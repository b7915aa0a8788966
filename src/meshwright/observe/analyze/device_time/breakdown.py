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

from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, select_counted_spans
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    COMMUNICATION,
    COMPUTE,
    MEMORY_COPY,
    DeviceSpans,
    Intervals,
    measure_total_ns,
    subtract,
    union,
)
from meshwright.timeline.memo import memoize
from meshwright.timeline.readers.parsing.communication_names import match_communication_rule
from meshwright.timeline.timeline import Timeline


class ExposedCommunication(NamedTuple):
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
    communication: tuple[ExposedCommunication, ...]
    """Exposed communication by collective and library, most exposed first; adds up to it."""
    num_spans: int
    """How many device spans were counted."""
    num_excluded_spans: int
    """How many were not: see `AnalysisExtent`."""

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


def analyze_breakdown(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.WINDOW
) -> tuple[RankBreakdown, ...]:
    """Where the time of every rank's device goes."""
    return tuple(analyze_rank_breakdown(part, extent) for part in split_by_device(timeline))


@memoize
def analyze_rank_breakdown(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.WINDOW
) -> RankBreakdown:
    """Where the time of one rank's device goes."""
    spans = select_counted_spans(part, extent)
    start, end = spans.window_ns
    compute, communication = spans.intervals_of(COMPUTE), spans.intervals_of(COMMUNICATION)
    copies, busy = spans.intervals_of(MEMORY_COPY), spans.intervals_of()
    exposed = subtract(communication, compute)
    with_communication = spans.intervals_of(COMPUTE, COMMUNICATION)
    return RankBreakdown(
        rank=part.ranks[0] if part.ranks else 0,
        start_ns=start,
        end_ns=end,
        compute_ns=measure_total_ns(compute),
        exposed_communication_ns=measure_total_ns(exposed),
        exposed_memory_copy_ns=measure_total_ns(busy) - measure_total_ns(with_communication),
        idle_ns=end - start - measure_total_ns(busy),
        communication_ns=measure_total_ns(communication),
        memory_copy_ns=measure_total_ns(copies),
        communication=_by_collective(part, spans, exposed),
        num_spans=int(spans.row.size),
        num_excluded_spans=int(
            select_counted_spans(part, AnalysisExtent.ALL).row.size - spans.row.size
        ),
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


def _by_collective(
    part: Timeline, spans: DeviceSpans, exposed: Intervals
) -> tuple[ExposedCommunication, ...]:
    own = spans.take(spans.kind == COMMUNICATION)
    said = part.string_column("collective")
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
        taken = measure_total_ns(exposed) - measure_total_ns(left)
        exposed = left
        found.append(
            ExposedCommunication(
                collective, library, measure_total_ns(when), taken, int(mine.sum())
            )
        )
    return tuple(sorted(found, key=lambda item: -item.exposed_ns))


def _sort(said: str, name: str) -> tuple[str, str]:
    rule = match_communication_rule(name)
    collective = collective_of(said or name)
    return (said if said and collective == "other" else collective, rule.library if rule else "")
