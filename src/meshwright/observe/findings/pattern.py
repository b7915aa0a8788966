"""The list of patterns: what each is, how it is told, and the function that looks for it.

A detector stands beside its pattern: `@detects_on_rank(Pattern(...))` for those that one rank's
timeline shows, `@detects_across_ranks(Pattern(...))` for those that only several ranks show
together. Where patterns of a family differ only in what they count, a function of that family
registers them, one call each.
The table in the documentation is made of the same values.
"""

from typing import NamedTuple

from meshwright.observe.findings.frameworks import FRAMEWORK_REMEDIES

MIN_GPU_SHARE = 0.01
"""What costs less than this part of a GPU's time is not told."""

MAX_SPANS = 5
"""So many places to look at are kept."""


class Pattern(NamedTuple):
    """A named inefficiency."""

    name: str
    title: str
    family: str
    """One of `JOB_FAMILIES`."""
    rule: str
    """The rule, in words."""
    cost_basis: str
    """What its cost is made of, and whether it is measured or estimated."""
    remedy: str
    """What to change, with the exact setting; a detector may say it more exactly."""
    min_cost: float = MIN_GPU_SHARE
    """The least part of the time that is told."""
    serving_remedy: str = ""
    """What to change instead where nothing shows training; empty for the same."""
    rocm_remedy: str = ""
    """What to change instead on AMD's devices; empty for the same."""

    def select_remedy(self, *, trains: bool, on_rocm: bool, framework: str = "") -> str:
        """What to change, for what the run is."""
        if self.name in FRAMEWORK_REMEDIES.get(framework, {}):
            return FRAMEWORK_REMEDIES[framework][self.name]
        if self.serving_remedy and not trains:
            return self.serving_remedy
        return self.rocm_remedy if self.rocm_remedy and on_rocm else self.remedy


class Detection(NamedTuple):
    """What a detector found."""

    cost_ns: float | None
    """On one rank, in the counted window; None where time is not what it costs."""
    evidence: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()
    """Where to look, start and end in ns."""
    remedy: str = ""
    """More exact than the pattern's; empty takes that."""


class CrossRankDetection(NamedTuple):
    """What a detector found that looks at all ranks."""

    detection: Detection
    ranks: tuple[int, ...]
    """The ranks that cause it or show it."""
    num_sharers: int
    """How many ranks pay the cost."""
