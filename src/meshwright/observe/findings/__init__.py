"""A library of named inefficiencies: what each looks like in a timeline, costs, and takes to mend.

find        every inefficiency of a run, costliest first
examine     what one rank shows (to run ranks in parallel), `combine` puts ranks together
patterns    the list itself
"""

from meshwright.observe.findings import (
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
from meshwright.observe.findings.registry import JOB_PATTERNS, RANK_PATTERNS, Pattern

_FAMILIES = (
    launching, waiting, hosting, copies, updating, arithmetic, passes, communicating, stepping,
    memory, lateness, comparing,
)  # fmt: skip
"""The modules whose patterns are registered by importing them."""


def patterns() -> tuple[Pattern, ...]:
    """Every pattern, family by family."""
    known = (*RANK_PATTERNS.values(), *JOB_PATTERNS.values())
    place = {module.__name__: number for number, module in enumerate(_FAMILIES)}
    ordered = sorted(known, key=lambda item: place[item[1].__module__])
    return tuple(pattern for pattern, _ in ordered)


__all__ = ["Examined", "Pattern", "Rank", "combine", "examine", "find", "patterns"]
