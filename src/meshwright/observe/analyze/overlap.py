"""How much of the communication is hidden behind compute.

Overlap is the time in which communication and compute both run, over the time in which
communication runs; copies play no part.
"""

from typing import NamedTuple

from meshwright.observe.analyze.per_device import per_device
from meshwright.observe.analyze.spans import COMMUNICATION, COMPUTE, intersect, measure
from meshwright.observe.analyze.steps import Extent, counted
from meshwright.timeline.once import once
from meshwright.timeline.timeline import Timeline


class RankOverlap(NamedTuple):
    """Communication of one rank, and what of it compute hides."""

    rank: int
    communication_ns: int
    """When any communication ran."""
    hidden_ns: int
    """When communication and compute both ran."""

    @property
    def share(self) -> float | None:
        """The hidden part of the communication, 0 to 1; None where there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def overlap(timeline: Timeline, extent: Extent = Extent.WINDOW) -> tuple[RankOverlap, ...]:
    """How much of every rank's communication is hidden."""
    return tuple(overlap_of(part, extent) for part in per_device(timeline))


@once
def overlap_of(part: Timeline, extent: Extent = Extent.WINDOW) -> RankOverlap:
    """How much of one rank's communication is hidden."""
    spans = counted(part, extent)
    communication = spans.of(COMMUNICATION)
    return RankOverlap(
        part.ranks[0] if part.ranks else 0,
        measure(communication),
        measure(intersect(communication, spans.of(COMPUTE))),
    )
