"""The list of patterns: what each is, how it is told, and the function that looks for it.

A detector stands beside its pattern, `@register_fleet_pattern(FleetPattern(...))`, takes the whole
`FleetData` and gives its hits. The table in the documentation is made of the same values.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Ints

FLEET_FAMILIES = (
    "idle", "activity", "input", "requests", "hardware", "peers", "faults", "repeats",
    "checkpoints", "placement",
)  # fmt: skip
"""In the order of the documentation."""
IDLE_PATTERNS = (
    "never-used",
    "finished-but-held",
    "idle-allocation",
    "idle-notebook",
    "hung-job",
)
"""Patterns of GPUs that do nothing, which say why a job is hardly active."""
DEFAULT_MIN_GPU_HOURS = 1.0
"""What costs fewer GPU-hours is not told."""
NO_JOBS: Ints = np.zeros(0, dtype=np.int64)


class FleetPattern(NamedTuple):
    """A named inefficiency of a fleet."""

    name: str
    title: str
    family: str
    """One of `FLEET_FAMILIES`."""
    rule: str
    """The rule, in words."""
    cost_basis: str
    """What its GPU-hours are made of, and whether they are measured or estimated."""
    remedy: str
    """What to change, with the exact setting; a detector may say it more exactly."""
    owner: Literal["user", "operators"] = "user"
    """Who can change it."""
    min_gpu_hours: float = DEFAULT_MIN_GPU_HOURS
    explained_by: tuple[str, ...] = ()
    """Patterns that say of the same job why it is so: with one of them this is not told."""
    statistic: str = ""
    """The statistic that decides, where no fixed bound does."""


class FleetDetection(NamedTuple):
    """One job, node or series of jobs that shows a pattern."""

    gpu_hours: float | None
    """GPU-hours it cost; None where that is not known."""
    evidence: Callable[[], tuple[str, ...]]
    """The evidence, most telling first; worded only for what is shown."""
    jobs: Ints = NO_JOBS
    """Rows of `FleetData.jobs`; the first one's user owns it."""
    nodes: tuple[str, ...] = ()
    remedy: str = ""
    """More exact than the pattern's; empty takes that."""


def defer_evidence(
    tell: Callable[..., tuple[str, ...]], *given: Any
) -> Callable[[], tuple[str, ...]]:
    """Evidence that is worded later, of what is at hand now."""
    return lambda: tell(*given)


FleetDetector = Callable[[FleetData], Iterable[FleetDetection]]
FLEET_PATTERNS: dict[str, tuple[FleetPattern, FleetDetector]] = {}
_D = TypeVar("_D", bound=FleetDetector)


def register_fleet_pattern(known: FleetPattern) -> Callable[[_D], _D]:
    """Register a detector."""

    def register(detector: _D) -> _D:
        assert known.name not in FLEET_PATTERNS, known.name
        assert known.family in FLEET_FAMILIES, known.family
        FLEET_PATTERNS[known.name] = (known, detector)
        return detector

    return register
