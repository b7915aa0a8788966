"""A library of named inefficiencies: what each looks like in a timeline, costs, and takes to mend.

find        every inefficiency of a run, costliest first
examine     what one rank shows (to run ranks in parallel), `combine` puts ranks together
patterns    the list itself
"""

from meshwright.observe.findings import (  # noqa: F401  importing them registers their patterns
    arithmetic,
    communicating,
    comparing,
    copies,
    hosting,
    lateness,
    launching,
    memory,
    passes,
    stepping,
    updating,
    waiting,
)
from meshwright.observe.findings.find import Examined, combine, examine, find
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import FAMILIES, JOB_PATTERNS, RANK_PATTERNS, Pattern


def patterns() -> tuple[Pattern, ...]:
    """Every pattern, family by family."""
    known = [pattern for pattern, _ in (*RANK_PATTERNS.values(), *JOB_PATTERNS.values())]
    return tuple(sorted(known, key=lambda pattern: FAMILIES.index(pattern.family)))


__all__ = ["Examined", "Pattern", "Rank", "combine", "examine", "find", "patterns"]
