"""The list of patterns: what each is, how it is told, and the function that looks for it.

A detector stands beside its pattern, `@pattern(Pattern(...))`, takes the whole `Fleet` and gives
its hits. The table in the documentation is made of the same values.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from meshwright.observe.fleet.patterns.arrays import Ints
from meshwright.observe.fleet.patterns.fleet import Fleet

FAMILIES = (
    "idle", "activity", "input", "requests", "hardware", "peers", "faults", "repeats",
    "checkpoints", "placement",
)  # fmt: skip
"""In the order of the documentation."""
IDLE = ("never-used", "finished-but-held", "gpus-held-idle", "notebook-hoarding", "hung-job")
"""Patterns of GPUs that do nothing, which say why a job is hardly active."""
LEAST_HOURS = 1.0
"""What costs fewer GPU-hours is not told."""
NO_JOBS: Ints = np.zeros(0, dtype=np.int64)


class Pattern(NamedTuple):
    """A named inefficiency of a fleet."""

    name: str
    title: str
    family: str
    """One of `FAMILIES`."""
    detected: str
    """The rule, in words."""
    cost: str
    """What its GPU-hours are made of, and whether they are measured or estimated."""
    remedy: str
    """What to change, with the exact setting; a detector may say it more exactly."""
    owner: Literal["user", "operators"] = "user"
    """Who can change it."""
    least_hours: float = LEAST_HOURS
    yields_to: tuple[str, ...] = ()
    """Patterns that say of the same job why it is so: with one of them this is not told."""
    statistical: str = ""
    """The statistic that decides, where no fixed bound does."""


class Hit(NamedTuple):
    """One job, node or series of jobs that shows a pattern."""

    hours: float | None
    """GPU-hours it cost; None where that is not known."""
    tell: Callable[[], tuple[str, ...]]
    """The evidence, most telling first; worded only for what is shown."""
    jobs: Ints = NO_JOBS
    """Rows of `Fleet.jobs`; the first one's user owns it."""
    nodes: tuple[str, ...] = ()
    remedy: str = ""
    """More exact than the pattern's; empty takes that."""


def bound(tell: Callable[..., tuple[str, ...]], *given: Any) -> Callable[[], tuple[str, ...]]:
    """Evidence that is worded later, of what is at hand now."""
    return lambda: tell(*given)


Detector = Callable[[Fleet], Iterable[Hit]]
PATTERNS: dict[str, tuple[Pattern, Detector]] = {}
_D = TypeVar("_D", bound=Detector)


def pattern(known: Pattern) -> Callable[[_D], _D]:
    """Register a detector."""

    def register(detector: _D) -> _D:
        assert known.name not in PATTERNS, known.name
        assert known.family in FAMILIES, known.family
        PATTERNS[known.name] = (known, detector)
        return detector

    return register
