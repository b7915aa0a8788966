"""Whether a job was still moving when its dumps were written: then what is unfinished is no hang.

Dumps do not say when they were made, their files do. A file that was copied without its time looks
older work up than it was: that is no sign of a moving job, and hides none of a hang.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import FlightRecorderDump

TYPICAL_PENDING_NS = 5_000_000_000
"""Hosts enqueue seconds ahead of their GPU; no timeout is as short."""
MAX_TYPICAL_NS = 60_000_000_000
"""Who waits longer is looked at, whatever finished operations took: first ones take minutes."""
TYPICAL_FACTOR = 2
TYPICAL_QUANTILE = 0.9
"""So many of the finished operations took the usual time, or less."""
MAX_CLOCK_SKEW_NS = 2_000_000_000
"""The clock of a file system may be behind a host's by so much."""


class PendingAge(NamedTuple):
    """How long the oldest unfinished operation had been enqueued when its rank was dumped."""

    pending_ns: int
    typical_ns: int
    """What nine of ten finished ones took at most, from being enqueued to their end."""

    @property
    def is_typical(self) -> bool:
        """Whether nothing had waited longer than it does in a job that moves."""
        return self.pending_ns <= min(
            max(TYPICAL_PENDING_NS, TYPICAL_FACTOR * self.typical_ns), MAX_TYPICAL_NS
        )


def measure_pending_age(dumps: Sequence[FlightRecorderDump]) -> PendingAge | None:
    """Say how long a job had waited; None where it waits for nothing or files do not tell."""
    waited = -1
    took: list[int] = []
    for dump in dumps:
        newest = 0
        oldest = 0
        for each in dump.operations:
            newest = max(newest, each.created_ns, each.completed_ns)
            if each.is_pending:
                if not each.created_ns:
                    return None
                oldest = min(oldest or each.created_ns, each.created_ns)
            elif each.completed_ns > each.created_ns > 0:
                took.append(each.completed_ns - each.created_ns)
        if not oldest:
            continue
        if not dump.file_modified_ns or dump.file_modified_ns < newest - MAX_CLOCK_SKEW_NS:
            return None
        waited = max(waited, dump.file_modified_ns - oldest)
    if waited < 0:
        return None
    took.sort()
    return PendingAge(waited, took[int(TYPICAL_QUANTILE * (len(took) - 1))] if took else 0)
