"""The list of patterns: what each is, how it is told, and the function that looks for it.

A detector stands beside its pattern: `@of_rank(Pattern(...))` for those that one rank's timeline
shows, `@of_job(Pattern(...))` for those that only several ranks show together. Where patterns of a
family differ only in what they count, a function of that family registers them, one call each.
The table in the documentation is made of the same values.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from meshwright.observe.findings.frameworks import REMEDIES
from meshwright.observe.findings.job import Job
from meshwright.observe.findings.rank import Rank

LEAST_SHARE = 0.01
"""What costs less than this part of a GPU's time is not told."""
MAX_SPANS = 5
"""So many places to look at are kept."""
FAMILIES = (
    "launching", "waiting", "host", "copies", "optimizer", "arithmetic", "passes", "communication",
    "steps", "memory", "ranks",
)  # fmt: skip
"""In the order of the documentation."""


class Pattern(NamedTuple):
    """A named inefficiency."""

    name: str
    title: str
    family: str
    """One of `FAMILIES`."""
    detected: str
    """The rule, in words."""
    cost: str
    """What its cost is made of, and whether it is measured or estimated."""
    remedy: str
    """What to change, with the exact setting; a detector may say it more exactly."""
    least_share: float = LEAST_SHARE
    """The least part of the time that is told."""
    serving: str = ""
    """What to change instead where nothing shows training; empty for the same."""
    rocm: str = ""
    """What to change instead on AMD's devices; empty for the same."""

    def remedy_for(self, *, trains: bool, on_rocm: bool, framework: str = "") -> str:
        """What to change, for what the run is."""
        if self.name in REMEDIES.get(framework, {}):
            return REMEDIES[framework][self.name]
        if self.serving and not trains:
            return self.serving
        return self.rocm if self.rocm and on_rocm else self.remedy


class Hit(NamedTuple):
    """What a detector found."""

    cost_ns: float | None
    """On one rank, in the counted window; None where time is not what it costs."""
    evidence: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()
    """Where to look, start and end in ns."""
    remedy: str = ""
    """More exact than the pattern's; empty takes that."""


class JobHit(NamedTuple):
    """What a detector found that looks at all ranks."""

    hit: Hit
    ranks: tuple[int, ...]
    """The ranks that cause it or show it."""
    sharers: int
    """How many ranks pay the cost."""


OfRank = Callable[[Rank], Hit | None]
OfJob = Callable[[Job], Iterable[JobHit]]
RANK_PATTERNS: dict[str, tuple[Pattern, OfRank]] = {}
JOB_PATTERNS: dict[str, tuple[Pattern, OfJob]] = {}
_R = TypeVar("_R", bound=OfRank)
_J = TypeVar("_J", bound=OfJob)


def of_rank(pattern: Pattern) -> Callable[[_R], _R]:
    """Register a detector that reads one rank."""

    def register(detector: _R) -> _R:
        assert pattern.name not in RANK_PATTERNS | JOB_PATTERNS, pattern.name
        RANK_PATTERNS[pattern.name] = (pattern, detector)
        return detector

    return register


def of_job(pattern: Pattern) -> Callable[[_J], _J]:
    """Register a detector that compares ranks."""

    def register(detector: _J) -> _J:
        assert pattern.name not in RANK_PATTERNS | JOB_PATTERNS, pattern.name
        JOB_PATTERNS[pattern.name] = (pattern, detector)
        return detector

    return register
