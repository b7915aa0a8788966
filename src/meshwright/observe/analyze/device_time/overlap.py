"""How much of the communication is hidden behind compute.

Overlap is the time in which communication and compute both run, over the time in which
communication runs; copies play no part.
"""

from typing import NamedTuple

from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, select_counted_spans
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    COMMUNICATION,
    COMPUTE,
    intersect,
    measure_total_ns,
)
from meshwright.timeline.memo import memoize
from meshwright.timeline.timeline import Timeline


class RankOverlap(NamedTuple):
    """Communication of one rank, and what of it compute hides."""

    rank: int
    communication_ns: int
    """When any communication ran."""
    hidden_ns: int
    """When communication and compute both ran."""

    @property
    def overlap_share(self) -> float | None:
        """The hidden part of the communication, 0 to 1; None where there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def analyze_overlap(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.WINDOW
) -> tuple[RankOverlap, ...]:
    """How much of every rank's communication is hidden."""
    return tuple(analyze_rank_overlap(part, extent) for part in split_by_device(timeline))


@memoize
def analyze_rank_overlap(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.WINDOW
) -> RankOverlap:
    """How much of one rank's communication is hidden."""
    spans = select_counted_spans(part, extent)
    communication = spans.intervals_of(COMMUNICATION)
    return RankOverlap(
        part.ranks[0] if part.ranks else 0,
        measure_total_ns(communication),
        measure_total_ns(intersect(communication, spans.intervals_of(COMPUTE))),
    )
